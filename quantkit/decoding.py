"""Times whole models while they read prompts and write tokens: each packed layout beside the same model dense.

All run the same forward of transformers over its static cache, as CUDA graphs: one of a whole prompt, one of a single
step that is replayed for each new token, so that no launch from Python is timed. In a step torch.compile fuses what
stands between a block's products: some forty tiny kernels take as long as the products of an 8B model. Weights are
noise (`outline`). A step reads every weight once, which at the speed of a copy is the floor.
"""

from __future__ import annotations

import gc
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from quantkit import bench, packed
from quantkit.errors import KernelError, RecipeError, reason
from quantkit.kernels import MATMULS
from quantkit.linear import PREFERRED
from quantkit.models import blocks, no_linears
from quantkit.outline import DENSE, Load, Outline, Sizes, Variant, build, places, share_room, sizes
from quantkit.progress import Progress
from quantkit.skeleton import skeleton
from quantkit.speeds import Device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCHES = (1, 4, 16, 64)
#: Under which name transformers knows `attention`.
ATTENTION = "quantkit"
#: Arguments of an attention that is not the plain one.
PECULIAR = ("softcap", "s_aux", "position_bias")
#: From so many heads in a batch on, some two for each multiprocessor of an H200, attention in one kernel is the faster.
CROWD = 256
#: Into how many pieces a vocabulary is cut at most, so that as many blocks look for the likeliest token.
PIECES = 256
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


@dataclass(frozen=True)
class Turns:
    """The two calls that are timed: `prompt` reads all prompts, `step` takes one token more of each.

    Blocks that are `fused` are so in a step; a prompt's products take long enough to leave the rest as it is.

    `rewind(t)` makes the cache one of `t` tokens: 0 before a prompt, its length before steps. `token`, int64 `[b, 1]`,
    is always the last of each, written by either call as the likeliest.
    """

    prompt: Callable[[], object]
    step: Callable[[], object]
    rewind: Callable[[int], None]
    token: Tensor


def likeliest(logits: Tensor) -> Tensor:
    """Return where logits `[b, vocabulary]` are largest, int64 `[b, 1]`, the first of equals.

    Looked for in pieces first: torch gives a row of an argmax, long as it is, to one block, compiled or not.
    """
    b, vocabulary = logits.shape
    largest, at = logits.view(b, math.gcd(vocabulary, PIECES), -1).max(-1)
    piece = largest.argmax(-1, keepdim=True)
    return at.gather(1, piece) + piece * (vocabulary // largest.shape[1])


def turns(model: PreTrainedModel, ids: Tensor, new: int, pick: Callable[[Tensor], Tensor] = likeliest) -> Turns:
    """Return the calls of a model for prompts int64 `[b, t]` and `new` tokens each, over a static cache.

    `pick` finds the next tokens `[b, 1]` by logits `[b, vocabulary]`.

    Everything that changes from step to step is a tensor in its place, so that both calls can be captured once they
    have been made. RecipeError for a model whose cache or attention is no plain one.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
    model.set_attn_implementation(ATTENTION)
    if model.config.get_text_config()._attn_implementation != ATTENTION:
        raise RecipeError(f"{model.config.model_type}: its attention is its own, which is not measured: use another")
    length = ids.shape[1]
    cache = static_cache(model, places(length, new))
    index = torch.arange(places(length, new), device=ids.device)
    position = torch.full((1, 1), length, device=ids.device)
    token = ids[:, -1:].clone()

    near, far = (torch.tensor(value, device=ids.device, dtype=model.dtype) for value in (0.0, float("-inf")))

    # Logits of the last token alone, where the model can: those of all prompts may take more room than its weights.
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}

    def forward(tokens: Tensor, positions: Tensor, mask: Tensor) -> None:
        mask = torch.where(mask, near, far)  # once for all blocks
        given: Any = {"position_ids": positions, "past_key_values": cache, "use_cache": True, **last}
        out: Any = model(tokens, attention_mask=mask.view(1, 1, 1, -1), **given)
        token.copy_(pick(out.logits[:, -1]))

    def prompt() -> None:
        with torch.compiler.set_stance("force_eager"):
            forward(ids, index[None, :length], index < length)

    def step() -> None:
        forward(token, position, index <= position)
        position.add_(1)

    def rewind(tokens: int) -> None:
        layers: Any = cache.layers
        for layer in layers:
            layer.cumulative_length.fill_(tokens)
        position.fill_(max(tokens, length))

    return Turns(prompt, step, rewind, token)


@contextmanager
def fused(model: PreTrainedModel, paths: Collection[str], backend: str = "inductor") -> Iterator[None]:
    """Have torch.compile fuse the small operations of the blocks at `paths` inside, for one batch size.

    All blocks share what is compiled for the first: the number of a block, with which it asks the cache for its layer,
    is an argument, and that call is left out.
    """
    import torch._dynamo
    import torch._inductor.config
    from transformers import Cache
    from transformers.cache_utils import StaticLayer

    update, of_layer = Cache.update, StaticLayer.update
    found = [model.get_submodule(path) for path in paths]
    Cache.update = torch.compiler.disable(update, recursive=False)  # type: ignore[method-assign]
    StaticLayer.update = torch.compile(of_layer, backend=backend)  # type: ignore[method-assign]
    try:
        for block in found:
            block.compile(backend=backend)
        # What does not depend on each other goes into one launch, such as keys and queries.
        together = torch._inductor.config.patch(combo_kernels=True)
        with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True), together:
            yield
    finally:
        Cache.update, StaticLayer.update = update, of_layer  # type: ignore[method-assign]
        for block in found:
            block._compiled_call_impl = None
        torch.compiler.reset()


def static_cache(model: PreTrainedModel, room: int) -> Any:
    """Return an empty static cache for `room` tokens; RecipeError for a model whose cache is no plain one."""
    from transformers import StaticCache

    kind = model.config.model_type
    try:
        cache: Any = StaticCache(config=model.config, max_cache_len=room)
    except Exception as error:  # a config is free to be wrong in any way
        raise RecipeError(f"{kind}: transformers has no static cache for it ({reason(error)}): use another") from error
    if any(getattr(layer, "is_sliding", True) for layer in cache.layers):
        raise RecipeError(f"{kind}: attention by a sliding window is not measured: use another model")
    return cache


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Attend by prompts to themselves, as transformers does with "sdpa", and by one token to all places of the cache.

    To these `attention_mask`, a number for each place, says how near they are. Attention in one kernel, cuDNN's, has a
    block for each head. Where these are few, two products with a softmax between are faster, with heads that share keys
    taken as one head of several queries. Query `[b, h, t, d]`, key and value `[b, g, room, d]`; returns `[b, t, h, d]`.
    RecipeError for an attention with more to it, such as soft caps.
    """
    more = [name for name in PECULIAR if given.get(name) is not None]
    if more:
        raise RecipeError(f"attention with {more[0]} is not measured: use another model")
    b, heads, t, _ = query.shape
    shared = key.shape[1] != heads
    if t == 1 and b * heads >= CROWD:
        mask = attention_mask.expand(b, heads, 1, -1)
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True):
            y = functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=shared)
    elif t == 1:
        query = query.reshape(b, key.shape[1], heads // key.shape[1], -1)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        nearness = torch.matmul(query, key.transpose(2, 3)).float() * scale + attention_mask
        y = torch.matmul(nearness.softmax(-1).to(value.dtype), value)
    else:
        key, value = key[:, :, :t], value[:, :, :t]
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=shared)
    return y.reshape(b, heads, t, -1).transpose(1, 2).contiguous(), None


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
    return bench.captured(lambda _: call(), 1)


def _per_call(graph: torch.cuda.CUDAGraph, rewind: Callable[[], None], calls: int) -> float:
    """Return the seconds of a call, of which `calls` follow each other after `rewind`: a median of the rounds."""

    def replays() -> None:
        for _ in range(calls):
            graph.replay()

    rewind()
    once = bench.seconds(graph.replay)
    if once > LONG:
        return once
    found = []
    for _ in range(ROUNDS):
        rewind()
        graph.replay()  # the GPU is busy with it until those that are timed are queued
        rewind()
        found.append(bench.seconds(replays) / calls)
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
    where = bench.gpu([layout if layout in MATMULS else PREFERRED[0] for layout in packed_in])
    jobs, notices = share_room(model.name, built, variants, load, packed.free(where))
    notices += no_linears(built)
    for line in notices:
        progress.warn(line)
    device = bench.measured_on(where, load.dtype)
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
        way = packed.way(built)
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
