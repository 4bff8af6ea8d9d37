"""Time products of many tokens: a packed weight in one launch and in several, beside cuBLAS.

    python benchmarks/batches.py --csv benchmarks/gpu/batches.csv

`cublas_us` is the faster order of an unquantized weight; past 4096 tokens only that of nn.Linear is timed.
`packed_SIZE_us` multiplies the packed weight in launches of at most SIZE tokens, `packed_us` in one. `time_us` is that
of the launches that quantkit makes, and `vs_cublas` their speed beside cuBLAS. `error` is relative to float32.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.bench_kernels import MODELS, random_record
from quantkit.core.quantized_tensor import Scheme
from quantkit.kernels import LAUNCHERS, proof
from quantkit.kernels.hopper import MAX_TOKENS, HopperKernel
from quantkit.kernels.portable import multiprocessors
from quantkit.kernels.tiles import choose_tile, representative
from quantkit.layouts import LAYOUTS

TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SIZES = (2048, 4096)
PACKED = ("packed_us", *(f"packed_{size}_us" for size in SIZES))
COLUMNS = ("cublas_w_us", "cublas_wt_us", *PACKED, "cublas_us")
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
    args = parser.parse_args()
    cases = [tuple(case.split("=", 1)) for case in args.case] if args.case else CASES
    shapes = [(f"{model} {name}", n, k) for model in args.model for name, (n, k) in MODELS[model].items()]
    rows: list[dict[str, Any]] = []
    with args.csv.open("w", newline="") as file, torch.inference_mode():
        writer: Any = None
        for layout, label in cases:
            for layer, n, k in shapes:
                for row in timed(layout, Scheme.parse(label), layer, n, k, args.m, args.dtype):
                    writer = writer or csv.DictWriter(file, list(row), lineterminator="\n")
                    if not rows:
                        writer.writeheader()
                    writer.writerow({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in row.items()})
                    file.flush()
                    rows.append(row)
                print(layout, label, layer, *(f"{row['M']}:{row['vs_cublas']:.3f}" for row in rows[-len(args.m) :]))
    print("\n".join(summary(rows)))


def timed(
    layout: str, scheme: Scheme, layer: str, n: int, k: int, tokens: Sequence[int], dtype_name: str = "float16"
) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of tokens, all with one random weight, on a Hopper GPU."""
    where, dtype = torch.device("cuda", torch.cuda.current_device()), getattr(torch, dtype_name)
    launcher, (sms, _) = LAUNCHERS[layout], multiprocessors(where)
    l2 = torch.cuda.get_device_properties(where).L2_cache_size
    with torch.inference_mode(False):  # kernels begin early only if torch counts writes to the weights
        q = random_record(scheme, n, k, where)
        dense = q.dequantize()
        one = launcher.named(LAYOUTS[layout].pack(q))
        first = [one[name] for name in launcher.weight(scheme, n, k).tensors]
        size = sum(tensor.nbytes for tensor in first)
        count = timing.copies(size, l2)
        packed = [first, *([tensor.clone() for tensor in first] for _ in range(count - 1))]
    del q
    random = torch.Generator(where).manual_seed(1)
    plain = torch.randn(n, k, device=where, generator=random).mul_(0.02).to(dtype)
    w = [plain.clone() for _ in range(timing.copies(plain.nbytes, l2))]
    wt = [plain.t().contiguous() for _ in range(len(w))]
    weight, kernel = launcher.weight(scheme, n, k), launcher.fastest(scheme, n, k, where)
    if not isinstance(kernel, HopperKernel):
        raise SystemExit(f"{layout} {scheme.label} {n}x{k}: launches of several sizes are those of a Hopper GPU")
    for m in tokens:
        x = torch.randn(m, k, device=where, generator=random).to(dtype)
        out = torch.full((m, n), float("nan"), dtype=dtype, device=where)

        def in_parts(size: int, x: Tensor = x, out: Tensor = out, m: int = m) -> Call:
            parts = [slice(start, min(start + size, m)) for start in range(0, m, size)]

            def multiply(i: int) -> None:
                for part in parts:  # a given tile keeps the launch whole
                    tile = choose_tile(kernel.choice, dtype, representative(part.stop - part.start), n, k, sms)
                    kernel.launch(weight, x[part], packed[i % count], None, out[part], tile)

            return multiply

        calls: dict[str, Call] = {
            "cublas_w_us": lambda i, x=x, out=out: torch.mm(x, w[i % len(w)].t(), out=out),
            "cublas_wt_us": lambda i, x=x, out=out: torch.mm(x, wt[i % len(wt)], out=out),
            "packed_us": in_parts(m),
        }
        if m > 4096:
            del calls["cublas_wt_us"]
        calls |= {f"packed_{size}_us": in_parts(size) for size in SIZES if size < m}
        errors = [checked(call, x, dense, out, name) for name, call in calls.items() if name.startswith("packed")]
        found = measured(calls)
        found |= {f"packed_{size}_us": found["packed_us"] for size in SIZES if size >= m}
        found["cublas_us"] = min(found["cublas_w_us"], found.setdefault("cublas_wt_us", found["cublas_w_us"]))
        us = found[f"packed_{MAX_TOKENS}_us"]
        about = {"layout": layout, "scheme": scheme.label, "layer": layer, "N": n, "K": k, "M": m, "dtype": dtype_name}
        yield (
            about
            | {"vs_cublas": found["cublas_us"] / us, "time_us": us}
            | {name: found[name] for name in COLUMNS}
            | {
                "tflops": 2 * m * n * k / us / 1e6,
                "weight_GBps": size / us / 1e3,
                "error": max(errors),
                "gpu": torch.cuda.get_device_name(where),
                "torch": str(torch.__version__),
            }
        )
        del calls, x, out


def checked(call: Call, x: Tensor, dense: Tensor, out: Tensor, name: str) -> float:
    """Compare the first and the last rows with float32."""
    out.fill_(float("nan"))
    call(0)
    errors = []
    for ends in (slice(0, CHECKED), slice(-CHECKED, None)):
        expected = proof.reference(x[ends], dense).to(out.dtype)
        errors.append(proof.relative_error(out[ends], expected))
        wrong = proof.mismatch(out[ends], expected)
        if wrong is not None:
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
    """Yield for each layout and number of tokens the mean over layers of the speed beside cuBLAS, and the worst one."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["layout"], row["scheme"], row["M"]].append(row)
    for (layout, scheme, m), part in groups.items():
        shares = {
            name.removesuffix("_us"): geometric_mean([float(row["cublas_us"]) / float(row[name]) for row in part])
            for name in PACKED
        }
        worst = min(part, key=lambda row: float(row["vs_cublas"]))
        yield (
            f"{layout} {scheme} M={m}: "
            + ", ".join(f"{name} {share:.3f}" for name, share in shares.items())
            + f" of cuBLAS; worst {float(worst['vs_cublas']):.3f} ({worst['layer']})"
        )


if __name__ == "__main__":
    main()
