"""Compare TC-FPx on Hopper with itself when each weight's exponent is converted, by a product or by integers.

The kernel leaves a power of two out of all weights and multiplies the sums by it, once (docs/layouts.md, 6.4). This is
the bias shift of the ZeroQuant(4+2) paper. `converted` multiplies two weights at a time by the power. `integer` adds to
each exponent and normalises subnormals, one weight at a time. All have the same tile and take turns; times are medians.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import bench_kernels, timing
from quantkit.io import files
from quantkit.kernels import loader

#: In place of the product by a power of two in kernels/tcfpx_hopper.cu: the exponent of each float16, by integers.
PRODUCT = 'DEVICE void multiply_pair(half, u32 &a, u32 by) { asm("mul.f16x2 %0, %0, %1;" : "+r"(a) : "r"(by)); }'
INTEGERS = """
DEVICE u32 exponent_added(u32 x, u32 up) {
    const u32 sign = x & 0x8000, exponent = x >> 10 & 31, mantissa = x & 0x3ff;
    if (exponent) return sign | (exponent + up) << 10 | mantissa;
    if (!mantissa) return sign;
    const u32 shift = __clz(mantissa) - 21;  // of a subnormal number, to its leading one
    return sign | (up + 1 - shift) << 10 | (mantissa << shift & 0x3ff);
}

DEVICE void multiply_pair(half, u32 &a, u32 by) {
    const u32 up = (by >> 10 & 31) - 15;
    a = exponent_added(a & 0xffff, up) | exponent_added(a >> 16, up) << 16;
}
"""
NAME = "tcfpx_integer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheme", default="fp6:channel")
    parser.add_argument("--shape", nargs="+", default=["28672x4096", "57344x8192"], help="NxK")
    parser.add_argument("--m", nargs="+", type=int, default=[1, 16, 32, 64, 128, 1024])
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sources = write_sources(Path(folder) / "kernels")
        loader.source_dir = lambda: sources
        layers = bench_kernels.layers([], args.shape)
        rows = [row for layer in layers for row in measure(args.scheme, layer.n, layer.k, args.m)]
    for row in rows:
        print(row)
    if args.csv:
        files.write_atomic(args.csv, timing.table(rows))


def write_sources(folder: Path) -> Path:
    """Copy the CUDA sources, and add a kernel that converts exponents by integers."""
    shutil.copytree(loader.source_dir(), folder)
    text = (folder / "tcfpx_hopper.cu").read_text()
    assert PRODUCT in text, "the kernel no longer multiplies pairs here"
    (folder / f"{NAME}.cu").write_text(text.replace(PRODUCT, INTEGERS).replace("tcfpx_hopper", NAME))
    return folder


def measure(label: str, n: int, k: int, tokens: list[int]) -> list[dict[str, Any]]:
    """Return a row for each number of float16 tokens by one random weight."""
    import torch

    from quantkit.core.quantized_tensor import Scheme
    from quantkit.kernels import LAUNCHERS
    from quantkit.kernels.hopper import HopperKernel
    from quantkit.kernels.proof import mismatch
    from quantkit.kernels.tiles import HopperTile
    from quantkit.layouts import LAYOUTS

    scheme, cuda = Scheme.parse(label), torch.device("cuda")
    one = LAYOUTS["tcfpx"].pack(bench_kernels.random_record(scheme, n, k, cuda))
    size = sum(part.nbytes for part in one.values())
    count = timing.copies(size, torch.cuda.get_device_properties(cuda).L2_cache_size)
    packed = [{name: part.clone() for name, part in one.items()} for _ in range(count)]
    launcher = LAUNCHERS["tcfpx"]
    weight, plain = launcher.weight(scheme, n, k), launcher.kernels(scheme, n, k).hopper
    assert plain is not None

    class Converted(HopperKernel):
        def instance(self, dtype: torch.dtype, tile: HopperTile) -> str:
            return super().instance(dtype, tile).removesuffix(">") + ", true>"  # the source's last template argument

    same = {part.name: getattr(plain, part.name) for part in fields(plain)}
    variants = (plain, Converted(**same), Converted(**same | {"source": NAME}))

    def call(i: int, x: torch.Tensor, out: torch.Tensor, kernel: HopperKernel) -> None:
        kernel.launch(weight, x, [packed[i % count][suffix] for suffix in weight.tensors], None, out)

    rows = []
    for m in tokens:
        random = torch.Generator(cuda).manual_seed(m)
        x = torch.randn(m, k, device=cuda, generator=random).half()
        out = torch.empty(m, n, dtype=x.dtype, device=cuda)
        found = []
        for kernel in variants:
            call(0, x, out, kernel)
            found.append(out.clone())
            wrong = mismatch(out, found[0])
            if wrong is not None:
                raise SystemExit(f"{kernel.source} with {m} tokens {wrong}")
        timed = [timing.prepared(partial(call, x=x, out=out, kernel=kernel), 20.0, count) for kernel in variants]
        shifted, not_shifted, by_integers = timing.medians(timed)
        row = {"scheme": label, "N": n, "K": k, "M": m, "us": shifted, "converted_us": not_shifted}
        ratios = {"ratio": not_shifted / shifted, "integer_us": by_integers, "integer_ratio": by_integers / shifted}
        rows.append(row | ratios)
    return rows


if __name__ == "__main__":
    main()
