"""Times whole models while they read prompts and write tokens: each packed layout beside the same model dense.

All run the same two calls (`turns`) as CUDA graphs: one of a whole prompt, one of a single step that is replayed for
each new token, so that no launch from Python is timed. In a step torch.compile fuses what stands between a block's
products: some forty tiny kernels take as long as the products of an 8B model. Weights are noise (`outline`). A step
reads every weight once, which at the speed of a copy is the floor.
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

from quantkit.bench import kernels
from quantkit.bench.decode_graphs import fused, likeliest, static_cache, turns
from quantkit.bench.random_model import DENSE, Load, Outline, Sizes, Variant, build, places, share_room, sizes
from quantkit.bench.roofline import Device
from quantkit.errors import KernelError, RecipeError, reason
from quantkit.inference import swap_linears
from quantkit.inference.packed_linear import PREFERRED
from quantkit.kernels import MATMULS
from quantkit.models.block_runner import blocks, no_linears
from quantkit.models.meta_model import skeleton
from quantkit.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCHES = (1, 4, 16, 64)
#: Timed rounds of what takes no longer than LONG seconds; of longer ones there is one.
ROUNDS, LONG = 3, 1.0


@dataclass(frozen=True)
class Pace:
    """One timing: seconds of a prompt and of a step in a batch, bytes on the GPU: of weights, and at the peak.

    `way` says how weights were multiplied, `sizes` what they should take.
    """

    layout: str
    scheme: str
    way: str
    batch: int
    prompt_s: float
    step_s: float
    held: int
    peak: int
    sizes: Sizes


@dataclass(frozen=True)
class Decoding:
    """What was measured of a model, on which device; `notices` say what was left out."""

    model: str
    load: Load
    device: Device
    paces: tuple[Pace, ...]
    notices: tuple[str, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """Return the timings as rows of a CSV; ratios are to the dense model in the same batch, None without it."""
        dense = {pace.batch: pace for pace in self.paces if pace.layout == DENSE}
        return [self._row(pace, dense.get(pace.batch)) for pace in self.paces]

    def to_dict(self) -> dict[str, Any]:
        """Return the device, the notices and the rows as one JSON object."""
        return {"device": asdict(self.device), "notices": list(self.notices), "rows": self.rows()}

    def _row(self, pace: Pace, dense: Pace | None) -> dict[str, Any]:
        floor = pace.sizes.read / self.device.copy
        return {
            "model": self.model,
            "layout": pace.layout,
            "scheme": pace.scheme,
            "dtype": self.device.dtype,
            "fused": not self.load.eager,
            "batch": pace.batch,
            "prompt_tokens": self.load.prompt,
            "new_tokens": self.load.new,
            "prompt_tokens_per_s": pace.batch * self.load.prompt / pace.prompt_s,
            "decode_tokens_per_s": pace.batch / pace.step_s,
            "prompt_vs_dense": dense and dense.prompt_s / pace.prompt_s,
            "decode_vs_dense": dense and dense.step_s / pace.step_s,
            "floor_tokens_per_s": pace.batch / floor,
            "pct_of_floor": 100 * floor / pace.step_s,
            "prompt_ms": 1e3 * pace.prompt_s,
            "step_ms": 1e3 * pace.step_s,
            "weight_bytes": pace.held,
            "packed_bytes": pace.sizes.weights,
            "read_bytes": pace.sizes.read,
            "peak_bytes": pace.peak,
            "weights": pace.way,
            "copy_GBps": self.device.copy / 1e9,
            "gpu": self.device.gpu,
            "torch": self.device.torch,
            "transformers": version("transformers"),
            "cuda": self.device.cuda,
            "nvrtc": self.device.nvrtc,
        }


# ------------------------------------------------------------------------------------------------ one batch


def graph_of(call: Callable[[], object], rewind: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return a call as a CUDA graph; `rewind` is called before each time that it is made.

    The only place that captures. Two calls are made on another stream before: they compile and load kernels, and make
    the memory that is theirs alone, which cannot be done during a capture. The second finds the cache made, which may
    be another program.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            rewind()
            call()
    torch.cuda.current_stream().wait_stream(stream)
    rewind()
    _forget()  # what that stream keeps for later, the graph could not use
    return kernels.captured(lambda _: call(), 1)


def _per_call(graph: torch.cuda.CUDAGraph, rewind: Callable[[], None], calls: int) -> float:
    """Return the seconds of a call, of which `calls` follow each other after `rewind`: a median of the rounds."""

    def replays() -> None:
        for _ in range(calls):
            graph.replay()

    rewind()
    once = kernels.seconds(graph.replay)
    if once > LONG:
        return once
    found = []
    for _ in range(ROUNDS):
        rewind()
        graph.replay()  # the GPU is busy with it until those that are timed are queued
        rewind()
        found.append(kernels.seconds(replays) / calls)
    return median(found)


# ------------------------------------------------------------------------------------------------ all of them


def measure(model: Outline, variants: Sequence[Variant], load: Load, progress: Progress) -> Decoding:
    """Time the variants of a model in all batches, the dense one where it fits.

    Before anything is timed, RecipeError for more tokens than the model has positions and for one without a static
    cache, KernelError without a GPU, CuPy or enough memory. KernelError for a model that CUDA graphs cannot hold.
    """
    built = skeleton(model, load.dtype, False)
    positions = getattr(built.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and load.prompt + load.new > positions:
        raise RecipeError(
            f"{load.prompt} tokens of a prompt and {load.new} new ones are more than the {positions} positions of "
            f"{model.name}: use smaller --prompt-tokens or --new-tokens"
        )
    static_cache(built, places(load.prompt, load.new))
    packed_in = [variant.layout for variant in variants if variant.schemes]
    where = kernels.gpu([layout if layout in MATMULS else PREFERRED[0] for layout in packed_in])
    jobs, notices = share_room(model.name, built, variants, load, swap_linears.free_memory(where))
    notices += no_linears(built)
    for line in notices:
        progress.warn(line)
    device = kernels.measured_on(where, load.dtype)
    paces: list[Pace] = []
    for variant, batches in jobs:
        try:
            with _fast(), torch.inference_mode():
                made, slow = _variant(model, variant, batches, load, where, progress)
        except torch.OutOfMemoryError as error:
            raise KernelError(
                f"{model.name} as {variant.layout} {variant.scheme} does not fit into the GPU's memory: use smaller "
                "--batch or --prompt-tokens"
            ) from error
        notices += slow
        paces += made
    return Decoding(model.name, load, device, tuple(paces), tuple(notices))


def _variant(
    model: Outline, variant: Variant, batches: Sequence[int], load: Load, where: torch.device, progress: Progress
) -> tuple[list[Pace], list[str]]:
    """Return the timings of one variant, and notices of weights that are decoded."""
    _forget()
    before = torch.cuda.memory_allocated(where)
    with torch.inference_mode(False), torch.no_grad():  # weights whose writes torch counts may be read early
        built, notices = build(model, variant, load.dtype, where, progress)
    _forget()
    held = torch.cuda.memory_allocated(where) - before
    for line in notices:
        progress.warn(line)
    blank = skeleton(model, load.dtype, False)
    expected, paths = sizes(blank, variant), blocks(blank)
    paces = []
    for batch in progress.bar(list(batches), f"{variant.layout} {variant.scheme}".strip()):
        torch.cuda.reset_peak_memory_stats(where)
        with nullcontext() if load.eager else fused(built, paths):
            prompt_s, step_s = _batch(built, batch, load, where)
        peak = torch.cuda.max_memory_allocated(where) - before
        way = swap_linears.describe_weights(built)
        paces.append(Pace(variant.layout, variant.scheme, way, batch, prompt_s, step_s, held, peak, expected))
        progress.note(f"{variant.layout}, batch {batch}: prompt {1e3 * prompt_s:.2f} ms, step {1e3 * step_s:.3f} ms")
        _forget()
    return paces, notices


def _batch(model: PreTrainedModel, batch: int, load: Load, where: torch.device) -> tuple[float, float]:
    """Return the seconds of a prompt and of a step; KernelError for a model that cannot be captured."""
    random = torch.Generator(where).manual_seed(0)
    vocabulary = model.get_input_embeddings().get_parameter("weight").shape[0]
    ids = torch.randint(vocabulary, (batch, load.prompt), device=where, generator=random)
    turn = turns(model, ids, load.new, likeliest if load.eager else torch.compile(likeliest))
    times = []
    try:
        for call, before, calls in ((turn.prompt, 0, 1), (turn.step, load.prompt, load.new)):
            rewind = partial(turn.rewind, before)
            times.append(_per_call(graph_of(call, rewind), rewind, calls))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise KernelError(
            f"{type(model).__name__} cannot be captured in a CUDA graph ({reason(error)}): use --eager or another model"
        ) from error
    return times[0], times[1]


def _forget() -> None:
    """Give the memory of what is no longer used back to the GPU, graphs' included."""
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def _fast() -> Iterator[None]:
    """Let torch write into the cache in its fast way: the deterministic one sorts places, and each is written once."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
