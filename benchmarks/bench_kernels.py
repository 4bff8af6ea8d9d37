"""Time the kernels of packed weights beside cuBLAS, the speed of a copy and the floor, all in one run.

    python -m benchmarks.bench_kernels --layout marlin --model llama3-8b --csv kernels.csv

Every call takes the next of several copies of the weight, which together exceed the L2 cache, so weights come from
memory as in a model. Kernel and cuBLAS take turns. Activations are random, because zeros draw less power and raise the
clocks. cuBLAS gets unquantized weights. A wrong product is an error, and is not timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import ROTATED, Device, Timed, copies, floor, measured_on, medians, prepared, table
from quantkit.cli import show
from quantkit.core import sparsity
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import KernelError, QuantkitError, RecipeError, about
from quantkit.io import files
from quantkit.kernels import LAUNCHERS, missing
from quantkit.kernels.contract import ACTIVATIONS
from quantkit.kernels.hopper import HopperKernel
from quantkit.kernels.proof import activations, mismatch, reference, relative_error
from quantkit.layouts import LAYOUTS
from quantkit.names import KERNELS
from quantkit.progress import Progress

#: Layout with a kernel -> the schemes that are timed unless others are named.
SCHEMES = {
    "marlin": ("int4:g128", "int4:channel"),
    "marlin24": ("int4:g128:24", "int4:channel:24"),
    "tcfpx": ("fp6:channel", "fp5:channel"),
    "quick": ("int4:g128:asym",),
}
#: Model -> its linears as `[n, k]`: the layers of the published figures.
MODELS = {
    "llama3-8b": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
    },
    "llama2-70b": {
        "qkv": (10240, 8192),
        "o": (8192, 8192),
        "gate_up": (57344, 8192),
        "down": (8192, 28672),
    },
    "large": {"": (73728, 18432)},
}
TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024)


@dataclass(frozen=True)
class Layer:
    """A named weight `[n, k]` to be timed."""

    name: str
    n: int
    k: int


#: The head of each column of a printed table, and its format.
SPEEDS = {
    "layout": "{layout}",
    "scheme": "{scheme}",
    "kernel": "{path}",
    "layer": "{layer}",
    "NxK": "{N}x{K}",
    "M": "{M}",
    "us": "{time_us:.2f}",
    "floor us": "{floor_us:.2f}",
    "of floor": "{pct_of_floor:.0f} %",
    "cuBLAS us": "{cublas_us:.2f}",
    "speedup": "{speedup_vs_cublas:.2f}",
    "GB/s": "{weight_GBps:.0f}",
    "TFLOP/s": "{tflops:.1f}",
}
MEANS = {
    "layout": "{layout}",
    "scheme": "{scheme}",
    "model": "{model}",
    "M": "{M}",
    "speedup_vs_cublas": "{speedup_vs_cublas:.3f}",
    "floor_speedup": "{floor_speedup:.3f}",
}


def main() -> None:
    """Time what the command line asks for, and print the table."""
    parser = argument_parser(__doc__)
    several: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--model", **several, choices=MODELS, help="its layers' shapes; repeatable [llama3-8b]")
    parser.add_argument("--shape", **several, metavar="NxK", help="output by input features; repeatable")
    parser.add_argument("--m", **several, type=positive, help=f"tokens; repeatable {list(TOKENS)}")
    parser.add_argument("--kernel", choices=("fastest", "portable"), default="fastest", help="[fastest]")
    args = parser.parse_args()

    def measure() -> dict[str, Any]:
        return kernels(
            layers(args.model or (() if args.shape else ("llama3-8b",)), args.shape),
            tokens=sorted(set(args.m or TOKENS)),
            layouts=list(dict.fromkeys(args.layout or SCHEMES)),
            schemes=list(dict.fromkeys(map(Scheme.parse, args.scheme))),
            dtype=getattr(torch, args.dtype),
            progress=Progress(args.quiet, args.verbose),
            portable=args.kernel == "portable",
        )

    run(args, measure, format_speeds)


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Make a parser with the options that both benches share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    several: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--layout", **several, choices=KERNELS, help="whose kernel; repeatable [all]")
    parser.add_argument("--scheme", **several, help="like int4:g128; repeatable [the layout's usual]")
    parser.add_argument("--dtype", choices=[str(one).removeprefix("torch.") for one in ACTIVATIONS], default="float16")
    parser.add_argument("--csv", type=Path, help="write the figures into this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("-v", "--verbose", action="store_true")
    return parser


def positive(text: str) -> int:
    """Parse a number of at least one."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def run(
    args: argparse.Namespace, measure: Callable[[], dict[str, Any]], formatted: Callable[[dict[str, Any]], str]
) -> None:
    """Measure, write the CSV, and print the figures; any of our errors ends the script with one line.

    A CSV that cannot be written is refused before the hours of work that make it.
    """
    if args.csv is not None and not args.csv.absolute().parent.is_dir():
        sys.exit(f"Error: {args.csv}: its folder does not exist")
    try:
        found = measure()
        if args.csv is not None:
            files.write_atomic(args.csv, table(found["rows"]))
    except QuantkitError as error:
        sys.exit(f"Error: {error}")
    print(json.dumps(found, indent=1, allow_nan=False) if args.json else formatted(found))


def format_speeds(found: Mapping[str, Any]) -> str:
    """Format the table of kernels, the means over the layers of a model, and the machine."""
    lines = [format_table(SPEEDS, found["rows"]), ""]
    if found["means"]:
        lines += ["geometric means over the layers of a model", format_table(MEANS, found["means"]), ""]
    device = found["device"]
    lines.append(
        f"{device['gpu']}, torch {device['torch']}, CUDA {device['cuda']}, {device['dtype']}: copy "
        f"{device['copy'] / 1e9:.0f} GB/s, dense product {device['rate'] / 1e12:.0f} TFLOP/s, which make the floor"
    )
    return "\n".join(lines)


def format_table(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Format one line for each row; `columns` maps heads to formats."""
    return show.table(list(columns), [[form.format(**row) for form in columns.values()] for row in rows])


def kernels(
    layers: Sequence[Layer],
    tokens: Sequence[int],
    layouts: Sequence[str],
    schemes: Sequence[Scheme],
    dtype: torch.dtype,
    progress: Progress,
    portable: bool = False,
) -> dict[str, Any]:
    """Time the kernels of `layouts` on every layer with every number of tokens; no `schemes` stands
    for the defaults.

    Returns the `device`, `rows` of a CSV, and their `means`. `dtype` is the dtype of the
    activations, float16 or bfloat16; `portable` leaves Hopper's kernels out. Before anything is
    timed, LayoutError for a shape or a scheme that a layout cannot hold, and KernelError without a
    GPU or CuPy. KernelError for a product outside the bounds of `proof.mismatch`, and if the GPU's
    memory does not suffice.
    """
    jobs = []
    for layer in layers:
        for layout in layouts:
            for scheme in schemes or map(Scheme.parse, SCHEMES[KERNELS[layout]]):
                with about(f"{layer.n}x{layer.k} in {scheme.label} cannot be timed as {layout}, choose others"):
                    LAYOUTS[layout].check(scheme, layer.n, layer.k)
                jobs.append((layer, layout, scheme))
    where = require_gpu(layouts)
    device = measured_on(where, dtype)
    rows: list[dict[str, Any]] = []
    bar = progress.bar(len(jobs) * len(tokens), "timing")
    for layer, layout, scheme in jobs:
        try:
            for timed in _time_weight(layer, tokens, layout, scheme, dtype, device, where, progress, portable):
                rows.append(timed)
                bar.update(1)
        except torch.OutOfMemoryError as error:
            raise KernelError(
                f"{layer.n}x{layer.k} with up to {max(tokens)} tokens does not fit into the GPU's memory",
                "leave it out, or fewer tokens with --m",
            ) from error
    bar.close()
    return {"device": asdict(device), "rows": rows, "means": means(rows)}


def require_gpu(layouts: Sequence[str]) -> torch.device:
    """Return the current GPU; KernelError if there is none, or it cannot run the kernels of
    `layouts`.
    """
    where = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    for layout in layouts:
        problem = missing(layout, where)
        if problem is not None:
            raise KernelError(f"the {layout} kernel cannot be timed here: {problem}; quantkit doctor says what runs")
    return where


def random_record(scheme: Scheme, n: int, k: int, device: torch.device, seed: int = 0) -> QuantizedTensor:
    """Make a random weight of `scheme` `[n, k]`: every code, scales around 0.01, the same in every
    run.
    """
    random = torch.Generator(device).manual_seed(seed)
    top, g = 2**scheme.format.bits, scheme.groups(k)
    codes = torch.randint(0, top, (n, k), dtype=torch.uint8, device=device, generator=random)
    if scheme.sparsity is not None:
        stored = sparsity.mask(torch.rand(n, k, device=device, generator=random))
        codes.masked_fill_(~stored, scheme.format.zero_code)
    scales = torch.rand(n, g, device=device, generator=random).add_(0.5).mul_(0.01).half()
    zeros = None
    if not scheme.symmetric:
        zeros = torch.randint(0, top, (n, g), dtype=torch.uint8, device=device, generator=random)
    return QuantizedTensor(scheme, codes, scales, zeros)


def flops(layout: str, n: int, k: int, m: int) -> int:
    """Count the operations of a product: half of them where only two of each four weights are
    stored.
    """
    return 2 * m * n * k // (2 if layout.startswith("marlin24") else 1)


def _time_weight(
    layer: Layer,
    tokens: Sequence[int],
    layout: str,
    scheme: Scheme,
    dtype: torch.dtype,
    device: Device,
    where: torch.device,
    progress: Progress,
    portable: bool,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of tokens, all with one random weight."""
    gc.collect()  # frees the memory of the previous weight
    n, k = layer.n, layer.k
    l2 = torch.cuda.get_device_properties(where).L2_cache_size
    q = random_record(scheme, n, k, where)
    dense = q.dequantize()
    one = LAYOUTS[layout].pack(q)
    del q
    size = sum(tensor.nbytes for tensor in one.values())
    packed = [one] + [{name: part.clone() for name, part in one.items()} for _ in range(copies(size, l2) - 1)]
    if len(packed) * size < ROTATED * l2:
        progress.warn(f"{layer.name}: {len(packed)} copies are {len(packed) * size} bytes, less than {ROTATED} L2")
    count = copies(n * k * dtype.itemsize, l2)
    plain = _unquantized(n, k, dtype, where)
    w = [plain.clone() for _ in range(count)]
    wt = [plain.t().contiguous() for _ in range(count)]
    del plain
    launcher = LAUNCHERS[layout]
    for m in tokens:
        x = activations(dense, m, dtype)
        expected = reference(x, dense).to(dtype)
        out, y = torch.full_like(expected, float("nan")), torch.empty_like(expected)

        def ours(i: int, x: Tensor = x, out: Tensor = out) -> object:
            return launcher.matmul(x, packed[i % len(packed)], scheme, n, k, out=out, portable=portable)

        def cublas_w(i: int, x: Tensor = x, y: Tensor = y) -> object:
            return torch.mm(x, w[i % count].t(), out=y)

        def cublas_wt(i: int, x: Tensor = x, y: Tensor = y) -> object:
            return torch.mm(x, wt[i % count], out=y)

        moved, work = x.nbytes + out.nbytes, flops(layout, n, k, m)
        least = floor(size + moved, work, device.copy, device.rate)
        least_dense = floor(w[0].nbytes + moved, 2 * m * n * k, device.copy, device.rate)
        mine = prepared(ours, least, len(packed))
        peers = [prepared(order, least_dense, count) for order in (cublas_w, cublas_wt)]
        error = _checked(mine, out, expected, f"{layout}, {scheme.label}, {n}x{k}, {m} {device.dtype} tokens")
        time_us, cublas_w_us, cublas_wt_us = medians([mine, *peers])
        kernel = launcher.fastest(scheme, n, k, where, portable)
        yield row_of(
            layer,
            m,
            device,
            layout=layout,
            scheme=scheme.label,
            path="hopper" if isinstance(kernel, HopperKernel) else "portable",
            times=(time_us, cublas_w_us, cublas_wt_us),
            floor_us=least,
            weight_bytes=size,
            relative_error=error,
            copies=len(packed),
            calls=mine.calls,
            rounds=mine.rounds,
        )


def _unquantized(n: int, k: int, dtype: torch.dtype, where: torch.device) -> Tensor:
    """Make a dense weight `[n, k]` of normal numbers.

    Dequantized or half-zero weights draw less power, so cuBLAS would be faster with them.
    """
    random = torch.Generator(where).manual_seed(1)
    return torch.randn(n, k, device=where, generator=random).mul_(0.02).to(dtype)


def _checked(timed: Timed, out: Tensor, expected: Tensor, what: str) -> float:
    """Replay a graph, and compute the relative error of `out`; KernelError if it is too large."""
    out.fill_(float("nan"))
    timed.graph.replay()
    wrong = mismatch(out, expected)
    if wrong is not None:
        raise KernelError(f"the product {wrong}: it is wrong, not timed", subject=what)
    return relative_error(out, expected)


def layers(models: Sequence[str], shapes: Sequence[str]) -> list[Layer]:
    """List the layers of models by name and of shapes such as `6144x4096` (n x k), each once.

    RecipeError for an unknown model or a malformed shape.
    """
    found: dict[tuple[int, int], Layer] = {}
    for model in models:
        if model not in MODELS:
            raise RecipeError(f"unknown model {model!r}", f"use one of {', '.join(MODELS)}", "--shape NxK")
        for name, (n, k) in MODELS[model].items():
            found.setdefault((n, k), Layer(f"{model} {name}".strip(), n, k))
    known = {layer: f"{model} {name}".strip() for model, parts in MODELS.items() for name, layer in parts.items()}
    for text in shapes:
        sizes = re.fullmatch(r"([1-9]\d{0,6})[xX]([1-9]\d{0,6})", text)
        if sizes is None:
            raise RecipeError(f"{text!r} is no shape", "write out features by in features, like 6144x4096")
        n, k = int(sizes[1]), int(sizes[2])
        found.setdefault((n, k), Layer(known.get((n, k), f"{n}x{k}"), n, k))
    return list(found.values())


def row_of(
    layer: Layer,
    m: int,
    device: Device,
    *,
    layout: str,
    scheme: str,
    path: str,
    times: tuple[float, float, float],
    floor_us: float,
    weight_bytes: int,
    **more: float,
) -> dict[str, Any]:
    """Build the row of a CSV, one timing of `layer` by `m` tokens.

    Columns that published figures have too carry their names. `times` are the microseconds of the
    kernel, and of cuBLAS with the weight as `[n, k]` and as `[k, n]`. `path` names the kernel:
    hopper or portable. `more` are the relative error, and how often the product was timed.
    """
    time_us, *cublas = times
    return {
        "layer": layer.name,
        "K": layer.k,
        "N": layer.n,
        "M": m,
        "kernel": "matmul",
        "path": path,
        "layout": layout,
        "scheme": scheme,
        "dtype": device.dtype,
        "time_us": time_us,
        "floor_us": floor_us,
        "pct_of_floor": 100 * floor_us / time_us,
        "cublas_us": min(cublas),
        "cublas_w_us": cublas[0],
        "cublas_wt_us": cublas[1],
        "speedup_vs_cublas": min(cublas) / time_us,
        "floor_speedup": min(cublas) / floor_us,
        "weight_GBps": weight_bytes / time_us / 1e3,
        "pct_of_copy_bandwidth": 100 * weight_bytes / time_us * 1e6 / device.copy,
        "tflops": 2 * m * layer.n * layer.k / time_us / 1e6,
        **more,
        "copy_GBps": device.copy / 1e9,
        "matrix_tflops": device.rate / 1e12,
        "gpu": device.gpu,
        "torch": device.torch,
        "cuda": device.cuda,
        "nvrtc": device.nvrtc,
    }


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compute geometric means over the layers of each model, for each layout and M, if all its
    layers were timed.

    A row has `layout`, `scheme`, `model`, `M`, `speedup_vs_cublas` and `floor_speedup`.
    """
    found: dict[tuple[str, str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        model = row["layer"].split(" ")[0]
        found.setdefault((row["layout"], row["scheme"], model, row["M"]), []).append(row)
    return [
        {"layout": layout, "scheme": scheme, "model": model, "M": m}
        | {key: geometric_mean([row[key] for row in part]) for key in ("speedup_vs_cublas", "floor_speedup")}
        for (layout, scheme, model, m), part in found.items()
        if len(part) == len(MODELS.get(model, ())) > 1
    ]


if __name__ == "__main__":
    main()
