"""Time whole models that read prompts and write tokens: each packed layout beside the same model
dense.

All variants run the same two calls (`decode_graphs`) as CUDA graphs, so that no launch from Python
is timed. The floor of a step is one read of all weights at the speed of a copy.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from quantkit.bench import timing
from quantkit.bench.decode_graphs import decode_calls, fused, likeliest, static_cache
from quantkit.bench.kernels import require_gpu
from quantkit.bench.random_model import (
    DENSE,
    Outline,
    Sizes,
    Variant,
    Workload,
    build,
    cache_length,
    fit_batches,
    sizes,
)
from quantkit.bench.roofline import Device
from quantkit.errors import KernelError, RecipeError, reason
from quantkit.inference import swap_linears
from quantkit.kernels import MATMULS, preferred
from quantkit.models.devices import free_gpu_memory
from quantkit.models.meta_model import dense_matrices, find_blocks, skeleton
from quantkit.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Rounds of a timing; only one of a call that takes longer than LONG_S seconds.
ROUNDS, LONG_S = 3, 1.0


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


def _row(
    model: str, load: Workload, device: Device, pace: Pace, dense: Pace | None
) -> dict[str, Any]:
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


def _per_call(graph: torch.cuda.CUDAGraph, rewind: Callable[[], None], calls: int) -> float:
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


def measure(
    model: Outline, variants: Sequence[Variant], load: Workload, progress: Progress
) -> dict[str, Any]:
    """Time the variants of a model in all batches, the dense one in those that fit.

    Returns the `device`, `notices` of the cases that were left out, and `rows` of a CSV. Before
    anything is timed, RecipeError for more tokens than the model has positions and for a model
    without a static cache, and KernelError without a GPU, CuPy or enough memory. KernelError for a
    model that cannot be captured.
    """
    built = skeleton(model, load.dtype, False)
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
            with nondeterministic(), torch.inference_mode():
                made, fallbacks = _time_variant(model, variant, batches, load, where, progress)
        except torch.OutOfMemoryError as error:
            raise KernelError(
                f"{model.name} as {variant.layout} {variant.scheme} does not fit into the GPU's "
                "memory",
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
    empty = skeleton(model, load.dtype, False)
    expected, paths = sizes(empty, variant), find_blocks(empty)
    paces = []
    for batch in progress.bar(list(batches), f"{variant.layout} {variant.scheme}".strip()):
        torch.cuda.reset_peak_memory_stats(where)
        with nullcontext() if load.eager else fused(built, paths):
            prompt_s, step_s = _time_batch(built, batch, load, where)
        peak = torch.cuda.max_memory_allocated(where) - before
        how = swap_linears.describe_weights(built)
        paces.append(
            Pace(variant.layout, variant.scheme, how, batch, prompt_s, step_s, held, peak, expected)
        )
        progress.note(
            f"{variant.layout}, batch {batch}: prompt {1e3 * prompt_s:.2f} ms, step "
            f"{1e3 * step_s:.3f} ms"
        )
        _free_memory()
    return paces, notices


def _time_batch(
    model: PreTrainedModel, batch: int, load: Workload, where: torch.device
) -> tuple[float, float]:
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
            times.append(_per_call(graph_of(call, rewind), rewind, calls))
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


@contextmanager
def nondeterministic() -> Iterator[None]:
    """Let torch write to the cache without sorting positions first, since each is written once
    anyway.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
