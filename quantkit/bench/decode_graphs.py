"""The two calls of a language model that decoding is made of, over transformers' static cache, ready to be captured.

One reads all prompts, one takes a token more of each. Both are the forward of transformers itself, with an attention
that is fast for one token; what stands between a block's products in a step can be compiled.
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

from quantkit.bench.random_model import places
from quantkit.errors import RecipeError, reason

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Under which name transformers knows `attention`.
ATTENTION = "quantkit"
#: Arguments of an attention that is not the plain one.
PECULIAR = ("softcap", "s_aux", "position_bias")
#: From so many heads in a batch on, some two for each multiprocessor of an H200, attention in one kernel is the faster.
CROWD = 256
#: Into how many pieces a vocabulary is cut at most, so that as many blocks look for the likeliest token.
PIECES = 256


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
