"""Time products of many tokens: packed in launches of several sizes, decoded for cuBLAS, and cuBLAS alone.

    python benchmarks/batches.py --csv benchmarks/gpu/batches.csv

`cublas_us` is the faster order of an unquantized weight; past 4096 tokens only that of nn.Linear is timed.
`packed_SIZE_us` multiplies the packed weight in launches of SIZE tokens, `packed_us` in one. `decoded_us` decodes
strips and multiplies with cuBLAS, in `decoded_32MiB_us` with smaller strips; `decode_us` is the decoding alone.
`chosen` is the path that quantkit takes, and `vs_cublas` its speed beside cuBLAS. Printed last are the constants of
quantkit/kernels/decoded.py and `MAX_TOKENS` of quantkit/kernels/hopper.py that these times ask for.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from torch import Tensor

from quantkit.bench import timing
from quantkit.bench.kernels import random_record
from quantkit.bench.workloads import MODELS
from quantkit.core.scheme import Scheme
from quantkit.kernels import LAUNCHERS, proof
from quantkit.kernels import decoded as decoding
from quantkit.kernels.decoded import strips
from quantkit.kernels.hopper import MAX_TOKENS, HopperKernel, multiprocessors
from quantkit.kernels.hopper_tiles import choose_tile, representative
from quantkit.layouts import LAYOUTS

TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SIZES = (2048, 4096)
#: Bytes of strips, besides those of the buffer: they fit into an L2 cache.
SMALLER = 32 << 20
CASES = (
    ("marlin", "int4:g128"),
    ("marlin24", "int4:g128:24"),
    ("quick", "int4:g128:asym"),
    ("tcfpx", "fp6:channel"),
    ("tcfpx", "fp5:channel"),
)
#: Microseconds of a graph, and rounds. The GPU rests half as long as each timing took.
GRAPH_US, ROUNDS = 3000.0, 3
#: Rows at both ends of a product that are compared with float32.
CHECKED = 64

Call = Callable[[int], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--case", nargs="*", help="LAYOUT=SCHEME, like marlin=int4:g64 [the usual ones]")
    parser.add_argument("--model", nargs="*", default=["llama3-8b", "llama2-70b"])
    parser.add_argument("--m", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--portable", action="store_true", help="the portable kernels in place of Hopper's")
    args = parser.parse_args()
    cases = [tuple(case.split("=", 1)) for case in args.case] if args.case else CASES
    shapes = [(f"{model} {name}", n, k) for model in args.model for name, (n, k) in MODELS[model].items()]
    rows: list[dict[str, Any]] = []
    with args.csv.open("w", newline="") as file, torch.inference_mode():
        writer: Any = None
        for layout, label in cases:
            for layer, n, k in shapes:
                for row in timed(layout, Scheme.parse(label), layer, n, k, args):
                    writer = writer or csv.DictWriter(file, list(row), lineterminator="\n")
                    if not rows:
                        writer.writeheader()
                    writer.writerow({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in row.items()})
                    file.flush()
                    rows.append(row)
                print(layout, label, layer, *(f"{row['M']}:{row['vs_cublas']:.3f}" for row in rows[-len(args.m) :]))
    print("\n".join(summary(rows)))


def timed(
    layout: str, scheme: Scheme, layer: str, n: int, k: int, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    where, dtype = torch.device("cuda", torch.cuda.current_device()), getattr(torch, args.dtype)
    launcher, sms = LAUNCHERS[layout], multiprocessors(where)
    l2 = torch.cuda.get_device_properties(where).L2_cache_size
    with torch.inference_mode(False):  # kernels begin early only if torch counts writes to the weights
        q = random_record(scheme, n, k, where)
        dense = q.dequantize()
        one = launcher.named(LAYOUTS[layout].pack(q))
        first = [one[name] for name in launcher.weight(scheme, n, k).tensors]
        count = timing.copies(sum(tensor.nbytes for tensor in first), l2)
        packed = [first, *([tensor.clone() for tensor in first] for _ in range(count - 1))]
    del q
    random = torch.Generator(where).manual_seed(1)
    plain = torch.randn(n, k, device=where, generator=random).mul_(0.02).to(dtype)
    w = [plain.clone() for _ in range(timing.copies(plain.nbytes, l2))]
    wt = [plain.t().contiguous() for _ in range(len(w))]
    weight = launcher.weight(scheme, n, k)
    kernel, decoded = launcher.fastest(scheme, n, k, where, args.portable), launcher.kernels(scheme, n, k).decoded
    rows = torch.empty(strips(n, k)[0][1], k, dtype=dtype, device=where)
    for m in args.m:
        x = torch.randn(m, k, device=where, generator=random).to(dtype)
        out = torch.full((m, n), float("nan"), dtype=dtype, device=where)

        def in_parts(size: int, x: Tensor = x, out: Tensor = out, m: int = m) -> Call:
            def multiply(i: int) -> None:
                for start in range(0, m, size):
                    part = x[start : start + size]
                    tile = None
                    if isinstance(kernel, HopperKernel):  # a given tile keeps the launch whole
                        tile = choose_tile(kernel.choice, dtype, representative(len(part)), n, k, sms)
                    kernel.launch(weight, part, packed[i % count], None, out[start : start + size], tile)

            return multiply

        def decode(i: int) -> None:
            for start, end in strips(n, k):
                decoded.decode(weight, packed[i % count], start, rows[: end - start])

        def smaller(i: int, x: Tensor = x, out: Tensor = out) -> None:
            with strips_of(SMALLER):
                decoded.launch(weight, x, packed[i % count], None, out)

        calls: dict[str, Call] = {
            "cublas_w_us": lambda i, x=x, out=out: torch.mm(x, w[i % len(w)].t(), out=out),
            "cublas_wt_us": lambda i, x=x, out=out: torch.mm(x, wt[i % len(w)], out=out),
            "decoded_us": lambda i, x=x, out=out: decoded.launch(weight, x, packed[i % count], None, out),
            "decoded_32MiB_us": smaller,
            "decode_us": decode,
            "packed_us": in_parts(m),
        }
        if m > 4096:
            del calls["cublas_wt_us"]
        sizes = [size for size in SIZES if size < m and not args.portable]
        calls |= {f"packed_{size}_us": in_parts(size) for size in sizes}
        errors = {name: checked(call, x, dense, out, name) for name, call in calls.items() if name[:2] in ("pa", "de")}
        found = measured(calls)
        found |= {f"packed_{size}_us": found["packed_us"] for size in SIZES if size not in sizes}
        found["cublas_us"] = min(found["cublas_w_us"], found.setdefault("cublas_wt_us", found["cublas_w_us"]))
        path = kernel.path if args.portable else launcher.chosen(scheme, n, k, m, dtype, where).path
        us = found["decoded_us" if path == decoded.path else f"packed_{MAX_TOKENS}_us"]
        about = {"layout": layout, "scheme": scheme.label, "layer": layer, "N": n, "K": k, "M": m, "dtype": args.dtype}
        size = sum(tensor.nbytes for tensor in first)
        yield (
            about
            | {"chosen": path, "vs_cublas": found["cublas_us"] / us, "time_us": us}
            | found
            | {
                "weight_bytes": size,
                "decode_GBps": (size + 2 * n * k) / found["decode_us"] / 1e3,
                "tflops": 2 * m * n * k / us / 1e6,
                "decoded_error": errors["decoded_us"],
                "packed_error": errors["packed_us"],
                "gpu": torch.cuda.get_device_name(where),
                "torch": str(torch.__version__),
            }
        )
        del calls, x, out


@contextmanager
def strips_of(size: int) -> Iterator[None]:
    """Cut strips of `size` bytes inside; the buffer was allocated before, and is larger."""
    before, decoding.BUFFER = decoding.BUFFER, size
    strips.cache_clear()
    try:
        yield
    finally:
        decoding.BUFFER = before
        strips.cache_clear()


def checked(call: Call, x: Tensor, dense: Tensor, out: Tensor, name: str) -> float:
    """Compare the first and the last rows with float32; decoding alone writes no product."""
    out.fill_(float("nan"))
    call(0)
    if name == "decode_us":
        return 0.0
    errors = []
    for ends in (slice(0, CHECKED), slice(-CHECKED, None)):
        expected = proof.reference(x[ends], dense).to(out.dtype)
        errors.append(proof.relative_error(out[ends], expected))
        wrong = proof.mismatch(out[ends], expected)
        if wrong is not None and not (name.startswith("decoded") and out.dtype == torch.bfloat16):
            raise SystemExit(f"{name}: the product {wrong}")
    if out.isnan().any():
        raise SystemExit(f"{name}: numbers are missing")
    return max(errors)


def measured(calls: dict[str, Call]) -> dict[str, float]:
    """Measure the median microseconds of each call in graphs, by turns."""
    graphs = {}
    for name, call in calls.items():
        seen = timing.seconds(lambda call=call: call(0)) * 1e6
        repeated = max(1, min(64, round(GRAPH_US / seen)))
        for i in range(repeated):
            call(i)  # later launches may fetch weights early that were read here
        graphs[name] = (timing.captured(call, repeated), repeated)
    times: dict[str, list[float]] = defaultdict(list)
    for turn in range(ROUNDS):
        for name in sorted(graphs, reverse=turn % 2 == 1):
            graph, repeated = graphs[name]
            if turn == 0:
                graph.replay()
            took = timing.seconds(graph.replay)
            times[name].append(1e6 * took / repeated)
            time.sleep(took / 2)
    return {name: median(found) for name, found in times.items()}


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the means over layers, and the constants that the times ask for."""
    for layout, scheme in dict.fromkeys((row["layout"], row["scheme"]) for row in rows):
        own = [row for row in rows if (row["layout"], row["scheme"]) == (layout, scheme)]
        for m in dict.fromkeys(row["M"] for row in own):
            part = [row for row in own if row["M"] == m]
            shares = {
                name.removesuffix("_us"): geometric_mean([row["cublas_us"] / row[name] for row in part])
                for name in ("packed_us", *(f"packed_{size}_us" for size in SIZES), "decoded_us", "decoded_32MiB_us")
            }
            worst = min(part, key=lambda row: row["vs_cublas"])
            yield (
                f"{layout} {scheme} M={m}: chosen {geometric_mean([row['vs_cublas'] for row in part]):.3f} of cuBLAS, "
                f"worst {worst['vs_cublas']:.3f} ({worst['layer']}, {worst['chosen']}); "
                + ", ".join(f"{name} {share:.3f}" for name, share in shares.items())
            )
        large = [row for row in own if row["M"] >= 4096] or own
        share = geometric_mean([row["cublas_us"] / row[f"packed_{MAX_TOKENS}_us"] for row in large])
        yield f"{layout} {scheme}: share={share:.3f}, decoding {median(row['decode_GBps'] for row in own):.0f} GB/s"
    rate = median(2e-6 * row["M"] * row["N"] * row["K"] / row["cublas_us"] for row in rows)
    yield f"HOPPER: multiply={rate:.0f}e12, decode={median(row['decode_GBps'] for row in rows):.0f}e9"


if __name__ == "__main__":
    main()
