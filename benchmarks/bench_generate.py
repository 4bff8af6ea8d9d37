"""Time whole models that read prompts and write tokens: each packed layout beside the same model dense.

    python -m benchmarks.bench_generate --model llama2-70b --layout tcfpx --csv generate.csv

Weights are random, so nothing is downloaded. All variants run the same two calls (`decode_graphs`) as CUDA graphs, so
that no launch from Python is timed. The floor of a step is one read of all weights at the speed of a copy.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import timing
from benchmarks.bench_kernels import argument_parser, positive, require_gpu, run
from benchmarks.decode_graphs import decode_calls, fused, likeliest, static_cache
from benchmarks.random_model import (
    BATCHES,
    CONFIGS,
    DENSE,
    Outline,
    Sizes,
    Variant,
    Workload,
    build,
    cache_length,
    fit_batches,
    read,
    sizes,
    variants,
)
from benchmarks.timing import Device
from quantkit.cli import show
from quantkit.core.quantized_tensor import Scheme
from quantkit.core.units import format_bytes
from quantkit.errors import KernelError, RecipeError, reason
from quantkit.inference import swap_linears
from quantkit.kernels import MATMULS, preferred
from quantkit.models.meta_model import skeleton
from quantkit.models.modules import find_blocks
from quantkit.models.outline import dense_matrices
from quantkit.models.weights import free_gpu_memory
from quantkit.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Rounds of a timing; only one of a call that takes longer than LONG_S seconds.
ROUNDS, LONG_S = 3, 1.0


#: The head of each column of the printed table, and its format.
PACES = (
    ("layout", "{layout}"),
    ("scheme", "{scheme}"),
    ("batch", "{batch}"),
    ("prompt tok/s", "{prompt_tokens_per_s:.0f}"),
    ("x dense", "{prompt_vs_dense}"),
    ("decode tok/s", "{decode_tokens_per_s:.1f}"),
    ("x dense", "{decode_vs_dense}"),
    ("floor tok/s", "{floor_tokens_per_s:.1f}"),
    ("of floor", "{pct_of_floor:.0f} %"),
    ("weights", "{weight_bytes}"),
    ("packed size", "{packed_bytes}"),
    ("peak", "{peak_bytes}"),
)


def main() -> None:
    """Time what the command line asks for, and print the table."""
    parser = argument_parser(__doc__)
    shapes = f"{', '.join(CONFIGS)}, a config.json or a folder with one [%(default)s]"
    parser.add_argument("--model", metavar="NAME|PATH", default="llama3-8b", help=shapes)
    parser.add_argument("--skip", action="append", default=[], metavar="REGEX", help="linears that stay dense")
    parser.add_argument("--batch", action="append", type=positive, help=f"prompts; repeatable {list(BATCHES)}")
    parser.add_argument("--prompt-tokens", type=positive, default=512, help="tokens of each prompt [512]")
    parser.add_argument("--new-tokens", type=positive, default=64, help="tokens written after it [64]")
    parser.add_argument("--eager", action="store_true", help="do not fuse small operations with torch.compile")
    args = parser.parse_args()

    def time_model() -> dict[str, Any]:
        schemes = list(dict.fromkeys(map(Scheme.parse, args.scheme)))
        batches = tuple(sorted(set(args.batch or BATCHES)))
        model = read(args.model)
        load = Workload(batches, args.prompt_tokens, args.new_tokens, getattr(torch, args.dtype), args.eager)
        found = variants(model, list(dict.fromkeys(args.layout)), schemes, args.skip)
        return measure(model, found, load, Progress(args.quiet, args.verbose))

    run(args, time_model, format_paces)


def format_paces(found: Mapping[str, Any]) -> str:
    """Format the table of paces, what was left out, and the machine."""
    first, device = found["rows"][0], found["device"]
    kernels = dict.fromkeys((row["layout"], row["scheme"], row["weights"]) for row in found["rows"])
    mode = "compiled" if first["fused"] else "not compiled"
    rows = [[form.format(**_shown(row)) for _, form in PACES] for row in found["rows"]]
    lines = [show.table([head for head, _ in PACES], rows), ""]
    lines += [f"{' '.join(filter(None, names))}: {how}" for *names, how in kernels]
    lines += [f"note: {notice}" for notice in found["notices"]]
    lines.append(
        f"{first['model']}, random weights, prompts of {first['prompt_tokens']} tokens, then {first['new_tokens']} new "
        f"ones each, in CUDA graphs over a static cache, {mode}; {device['gpu']}, torch {device['torch']}, "
        f"transformers {first['transformers']}, CUDA {device['cuda']}, {device['dtype']}; the floor is to read all "
        f"weights once a step at the {device['copy'] / 1e9:.0f} GB/s of a copy"
    )
    return "\n".join(lines)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    ratios = {key: row[key] for key in ("prompt_vs_dense", "decode_vs_dense")}
    sizes = {key: format_bytes(row[key]) for key in ("weight_bytes", "packed_bytes", "peak_bytes")}
    return {**row, **{key: "-" if ratio is None else f"{ratio:.2f}" for key, ratio in ratios.items()}, **sizes}


@dataclass(frozen=True)
class Pace:
    """One timing: seconds of a prompt and of a step for a batch, and bytes on the GPU.

    `held_bytes` is the size of the weights, `peak_bytes` the most memory in use. `multiplied_by`
    names the kernel or the fallback, `sizes` are the expected bytes.
    """

    layout: str
    scheme: str
    multiplied_by: str
    batch: int
    prompt_s: float
    step_s: float
    held_bytes: int
    peak_bytes: int
    sizes: Sizes


def rows(model: str, load: Workload, device: Device, paces: Sequence[Pace]) -> list[dict[str, Any]]:
    """List timings as rows of a CSV; ratios are to the dense model in the same batch, None without
    it.
    """
    dense = {pace.batch: pace for pace in paces if pace.layout == DENSE}
    return [_row(model, load, device, pace, dense.get(pace.batch)) for pace in paces]


def _row(model: str, load: Workload, device: Device, pace: Pace, dense: Pace | None) -> dict[str, Any]:
    floor = pace.sizes.read / device.copy
    return {
        "model": model,
        "layout": pace.layout,
        "scheme": pace.scheme,
        "dtype": device.dtype,
        "fused": not load.eager,
        "batch": pace.batch,
        "prompt_tokens": load.prompt,
        "new_tokens": load.new,
        "prompt_tokens_per_s": pace.batch * load.prompt / pace.prompt_s,
        "decode_tokens_per_s": pace.batch / pace.step_s,
        "prompt_vs_dense": dense and dense.prompt_s / pace.prompt_s,
        "decode_vs_dense": dense and dense.step_s / pace.step_s,
        "floor_tokens_per_s": pace.batch / floor,
        "pct_of_floor": 100 * floor / pace.step_s,
        "prompt_ms": 1e3 * pace.prompt_s,
        "step_ms": 1e3 * pace.step_s,
        "weight_bytes": pace.held_bytes,
        "packed_bytes": pace.sizes.weights,
        "read_bytes": pace.sizes.read,
        "peak_bytes": pace.peak_bytes,
        "weights": pace.multiplied_by,
        "copy_GBps": device.copy / 1e9,
        "gpu": device.gpu,
        "torch": device.torch,
        "transformers": version("transformers"),
        "cuda": device.cuda,
        "nvrtc": device.nvrtc,
    }


def graph_of(call: Callable[[], object], rewind: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture a call in a CUDA graph; `rewind` runs before each call.

    Two calls on another stream come first. They compile and load kernels and allocate workspaces,
    which cannot happen during a capture. The second call finds the cache initialised, and may run
    other code than the first.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            rewind()
            call()
    torch.cuda.current_stream().wait_stream(stream)
    rewind()
    _free_memory()  # the graph cannot use memory that the other stream still reserves
    return timing.captured(lambda _: call(), 1)


def per_call(graph: torch.cuda.CUDAGraph, rewind: Callable[[], None], calls: int) -> float:
    """Measure the median seconds of a call, when `calls` of them follow each other
    after `rewind`.
    """

    def replays() -> None:
        for _ in range(calls):
            graph.replay()

    rewind()
    once = timing.seconds(graph.replay)
    if once > LONG_S:
        return once
    found = []
    for _ in range(ROUNDS):
        rewind()
        graph.replay()  # keeps the GPU busy until the timed replays are queued
        rewind()
        found.append(timing.seconds(replays) / calls)
    return median(found)


def measure(model: Outline, variants: Sequence[Variant], load: Workload, progress: Progress) -> dict[str, Any]:
    """Time the variants of a model in all batches, the dense one in those that fit.

    Returns the `device`, `notices` of the cases that were left out, and `rows` of a CSV. Before
    anything is timed, RecipeError for more tokens than the model has positions and for a model
    without a static cache, and KernelError without a GPU, CuPy or enough memory. KernelError for a
    model that cannot be captured.
    """
    built = skeleton(model, load.dtype)
    positions = getattr(built.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and load.prompt + load.new > positions:
        raise RecipeError(
            f"{load.prompt} tokens of a prompt and {load.new} new ones are more than the "
            f"{positions} positions "
            f"of {model.name}",
            "use smaller --prompt-tokens or --new-tokens",
        )
    static_cache(built, cache_length(load.prompt, load.new))
    packed_in = [variant.layout for variant in variants if variant.schemes]
    where = require_gpu([layout if layout in MATMULS else preferred()[0] for layout in packed_in])
    jobs, notices = fit_batches(model.name, built, variants, load, free_gpu_memory(where))
    notices += dense_matrices(built)
    for line in notices:
        progress.warn(line)
    device = timing.measured_on(where, load.dtype)
    paces: list[Pace] = []
    for variant, batches in jobs:
        try:
            with torch.inference_mode():
                made, fallbacks = _time_variant(model, variant, batches, load, where, progress)
        except torch.OutOfMemoryError as error:
            raise KernelError(
                f"{model.name} as {variant.layout} {variant.scheme} does not fit into the GPU's memory",
                "use smaller --batch or --prompt-tokens",
            ) from error
        notices += fallbacks
        paces += made
    return {
        "device": asdict(device),
        "notices": notices,
        "rows": rows(model.name, load, device, paces),
    }


def _time_variant(
    model: Outline,
    variant: Variant,
    batches: Sequence[int],
    load: Workload,
    where: torch.device,
    progress: Progress,
) -> tuple[list[Pace], list[str]]:
    """Time one variant; returns the timings, and notices of weights that no kernel multiplies."""
    _free_memory()
    before = torch.cuda.memory_allocated(where)
    with (
        torch.inference_mode(False),
        torch.no_grad(),
    ):  # kernels read weights early only if torch counts writes to them
        built, notices = build(model, variant, load.dtype, where, progress)
    _free_memory()
    held = torch.cuda.memory_allocated(where) - before
    for line in notices:
        progress.warn(line)
    empty = skeleton(model, load.dtype)
    expected, paths = sizes(empty, variant), find_blocks(empty)
    paces = []
    for batch in progress.bar(list(batches), f"{variant.layout} {variant.scheme}".strip()):
        torch.cuda.reset_peak_memory_stats(where)
        with nullcontext() if load.eager else fused(built, paths):
            prompt_s, step_s = _time_batch(built, batch, load, where)
        peak = torch.cuda.max_memory_allocated(where) - before
        how = swap_linears.describe_weights(built)
        paces.append(Pace(variant.layout, variant.scheme, how, batch, prompt_s, step_s, held, peak, expected))
        progress.note(f"{variant.layout}, batch {batch}: prompt {1e3 * prompt_s:.2f} ms, step {1e3 * step_s:.3f} ms")
        _free_memory()
    return paces, notices


def _time_batch(model: PreTrainedModel, batch: int, load: Workload, where: torch.device) -> tuple[float, float]:
    """Measure the seconds of a prompt and of a step; KernelError for a model that cannot be
    captured.
    """
    random = torch.Generator(where).manual_seed(0)
    vocabulary = model.get_input_embeddings().get_parameter("weight").shape[0]
    ids = torch.randint(vocabulary, (batch, load.prompt), device=where, generator=random)
    pair = decode_calls(model, ids, load.new, likeliest if load.eager else torch.compile(likeliest))
    times = []
    try:
        for call, before, calls in (
            (pair.prompt, 0, 1),
            (pair.step, load.prompt, load.timed or load.new),
        ):
            rewind = partial(pair.rewind, before)
            times.append(per_call(graph_of(call, rewind), rewind, calls))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise KernelError(
            f"{type(model).__name__} cannot be captured in a CUDA graph ({reason(error)})",
            "use --eager or another model",
        ) from error
    return times[0], times[1]


def _free_memory() -> None:
    """Return unused memory to the GPU, including that of graphs."""
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
