"""The two calls of decoding with transformers' static cache, ready to be captured in CUDA graphs.

One call reads all prompts, the other makes one new token of each. Both run the model's own forward,
with an attention that is fast for one token. torch.compile can fuse the small operations between
the products of a step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.random_model import cache_length
from quantkit.errors import RecipeError, reason

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Name under which `attention` is registered with transformers.
ATTENTION = "quantkit"
#: Arguments of attention variants that are not supported.
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
#: With at least this many heads in a batch, attention in one kernel is faster: two per
#: multiprocessor of an H200.
MANY_HEADS = 256
#: The most pieces of a vocabulary. One block searches each piece for the likeliest token.
MAX_PIECES = 256


@dataclass(frozen=True)
class DecodeCalls:
    """The two calls that are timed: `prompt` reads all prompts, `step` makes one new token of each.

    Only `step` runs blocks that are `fused`, because the products of a prompt take far longer than
    the rest. `rewind(t)` sets the cache to `t` tokens: 0 before a prompt, its length before steps.
    Both calls write the likeliest next tokens to `token`, int64 `[b, 1]`.
    """

    prompt: Callable[[], object]
    step: Callable[[], object]
    rewind: Callable[[int], None]
    token: Tensor


def likeliest(logits: Tensor) -> Tensor:
    """Find the largest of logits `[b, vocabulary]`, the first of equals; returns indices int64 `[b,
    1]`.

    The vocabulary is searched in pieces, because torch gives a whole row of an argmax to one block,
    compiled or not.
    """
    b, vocabulary = logits.shape
    largest, at = logits.view(b, math.gcd(vocabulary, MAX_PIECES), -1).max(-1)
    piece = largest.argmax(-1, keepdim=True)
    return at.gather(1, piece) + piece * (vocabulary // largest.shape[1])


def decode_calls(
    model: PreTrainedModel, ids: Tensor, new: int, pick: Callable[[Tensor], Tensor] = likeliest
) -> DecodeCalls:
    """Make the calls of a model for prompts int64 `[b, t]` and `new` tokens each, over a static
    cache.

    `pick` finds the next tokens `[b, 1]` from logits `[b, vocabulary]`. All values that change from
    step to step are tensors at fixed addresses, so both calls can be captured after a first run.
    RecipeError for a model with another kind of cache or attention.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
    model.set_attn_implementation(ATTENTION)
    if model.config.get_text_config()._attn_implementation != ATTENTION:
        raise RecipeError(
            "its attention is its own, which is not measured",
            "use another",
            subject=model.config.model_type,
        )
    length = ids.shape[1]
    cache = static_cache(model, cache_length(length, new))
    index = torch.arange(cache_length(length, new), device=ids.device)
    position = torch.full((1, 1), length, device=ids.device)
    token = ids[:, -1:].clone()

    visible, hidden = (torch.tensor(value, device=ids.device, dtype=model.dtype) for value in (0.0, float("-inf")))

    # Logits of the last token only, if the model can: those of all tokens may take more memory than
    # its weights.
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}

    def forward(tokens: Tensor, positions: Tensor, mask: Tensor) -> None:
        mask = torch.where(mask, visible, hidden)  # once for all blocks
        given: Any = {
            "position_ids": positions,
            "past_key_values": cache,
            "use_cache": True,
            **last,
        }
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

    return DecodeCalls(prompt, step, rewind, token)


@contextmanager
def fused(model: PreTrainedModel, paths: Collection[str], backend: str = "inductor") -> Iterator[None]:
    """Let torch.compile fuse the small operations of the blocks at `paths` inside, for one batch
    size.

    All blocks share the code compiled for the first. So the number of a block, its key into the
    cache, is an argument of the compiled code, and the cache's own lookup is not compiled.
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
        # Independent operations share a launch, such as those of keys and queries.
        together = torch._inductor.config.patch(combo_kernels=True)
        with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True), together:
            yield
    finally:
        Cache.update, StaticLayer.update = update, of_layer  # type: ignore[method-assign]
        for block in found:
            block._compiled_call_impl = None
        torch.compiler.reset()


def static_cache(model: PreTrainedModel, length: int) -> Any:
    """Make an empty static cache for `length` tokens; RecipeError for a model with another kind of
    cache.
    """
    from transformers import StaticCache

    kind = model.config.model_type
    try:
        cache: Any = StaticCache(config=model.config, max_cache_len=length)
    except Exception as error:  # a broken config can raise anything
        raise RecipeError(
            f"transformers has no static cache for it ({reason(error)})",
            "use another",
            subject=kind,
        ) from error
    if any(getattr(layer, "is_sliding", True) for layer in cache.layers):
        raise RecipeError("attention by a sliding window is not measured", "use another model", subject=kind)
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
    """Attend as transformers' "sdpa": prompts to themselves, a single token to the whole cache.

    For a single token `attention_mask` is added to the scores of each position. cuDNN's kernel has
    one block for each head. With few heads, two products and a softmax are faster. Heads that share
    keys are then computed as one head. Query `[b, h, t, d]`, key and value `[b, g, length, d]`;
    returns `[b, t, h, d]`. RecipeError for attention with more features, such as soft caps.
    """
    unsupported = [name for name in UNSUPPORTED if given.get(name) is not None]
    if unsupported:
        raise RecipeError(f"attention with {unsupported[0]} is not measured", "use another model")
    b, heads, t, _ = query.shape
    shared = key.shape[1] != heads
    if t == 1 and b * heads >= MANY_HEADS:
        mask = attention_mask.expand(b, heads, 1, -1)
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True):
            y = functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=shared)
    elif t == 1:
        query = query.reshape(b, key.shape[1], heads // key.shape[1], -1)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = torch.matmul(query, key.transpose(2, 3)).float() * scale + attention_mask
        y = torch.matmul(scores.softmax(-1).to(value.dtype), value)
    else:
        key, value = key[:, :, :t], value[:, :, :t]
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=shared)
    return y.reshape(b, heads, t, -1).transpose(1, 2).contiguous(), None
