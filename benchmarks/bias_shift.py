"""Compare TC-FPx on Hopper with itself when each weight's exponent is converted, two weights by a product.

The kernel leaves a power of two out of all weights and multiplies the sums by it, once (docs/layouts.md, 6.4). This is
the bias shift of the ZeroQuant(4+2) paper. Both variants have the same tile and take turns; times are medians.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.bench import kernels, roofline, timing
from quantkit.io import files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheme", default="fp6:channel")
    parser.add_argument("--shape", nargs="+", default=["28672x4096", "57344x8192"], help="NxK")
    parser.add_argument("--m", nargs="+", type=int, default=[1, 16, 32, 64, 128, 1024])
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    rows = [row for layer in roofline.layers([], args.shape) for row in measure(args.scheme, layer.n, layer.k, args.m)]
    for row in rows:
        print(row)
    if args.csv:
        files.write_atomic(args.csv, roofline.table(rows))


def measure(label: str, n: int, k: int, tokens: list[int]) -> list[dict[str, Any]]:
    """Return a row for each number of float16 tokens by one random weight."""
    import torch

    from quantkit.core.scheme import Scheme
    from quantkit.kernels import LAUNCHERS
    from quantkit.kernels.hopper import HopperKernel
    from quantkit.kernels.hopper_tiles import HopperTile
    from quantkit.layouts import LAYOUTS

    scheme, cuda = Scheme.parse(label), torch.device("cuda")
    one = LAYOUTS["tcfpx"].pack(kernels.random_record(scheme, n, k, cuda))
    size = sum(part.nbytes for part in one.values())
    count = timing.copies(size, torch.cuda.get_device_properties(cuda).L2_cache_size)
    packed = [{name: part.clone() for name, part in one.items()} for _ in range(count)]
    launcher = LAUNCHERS["tcfpx"]
    weight, plain = launcher.weight(scheme, n, k), launcher.kernels(scheme, n, k).hopper
    assert plain is not None

    class Converted(HopperKernel):
        def instance(self, dtype: torch.dtype, tile: HopperTile) -> str:
            return super().instance(dtype, tile).removesuffix(">") + ", true>"  # the source's last template argument

    converted = Converted(**{part.name: getattr(plain, part.name) for part in fields(plain)})

    def call(i: int, x: torch.Tensor, out: torch.Tensor, kernel: HopperKernel) -> None:
        kernel.multiply(weight, x, packed[i % count], None, out)

    rows = []
    for m in tokens:
        random = torch.Generator(cuda).manual_seed(m)
        x = torch.randn(m, k, device=cuda, generator=random).half()
        out = torch.empty(m, n, dtype=x.dtype, device=cuda)
        both = [timing.prepared(partial(call, x=x, out=out, kernel=one), 20.0, count) for one in (plain, converted)]
        shifted, not_shifted = timing.medians(both)
        ratio = not_shifted / shifted
        rows.append(
            {"scheme": label, "N": n, "K": k, "M": m, "us": shifted, "converted_us": not_shifted, "ratio": ratio}
        )
    return rows


if __name__ == "__main__":
    main()
