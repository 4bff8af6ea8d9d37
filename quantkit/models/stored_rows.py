"""Linears as the checkpoint stores them, where transformers splits or stacks their rows on loading.

`follow_storage` puts a linear for each stored matrix into the model, and the model's own linears
return its rows. So a matrix is quantized, packed and loaded under its stored name, which is the
name that engines know.

One product serves all linears that are rows of one weight and get the same input tensor. At each
call the input tensor decides. The first part that gets a tensor computes the product with all rows,
and caches it for the others. A part that gets a different tensor computes a new product with all
rows, which is correct but slow.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from quantkit.checkpoint.reader import Checkpoint
from quantkit.kernels import driver
from quantkit.models.modules import (
    add_module,
    is_free,
    is_linear,
    is_transposed,
    language_model,
    size_of,
)
from quantkit.models.state_names import Merged, Rows, StateNames, rows_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CachedProduct(NamedTuple):
    """The product `y` with the tensor behind the weak reference `x`, for the parts that have not
    read it.

    `version` is the version of `x` when `y` was computed, see `_version`.
    """

    x: Callable[[], Tensor | None]
    version: tuple[int, ...]
    y: Tensor
    unread: frozenset[int]


class SharedProduct:
    """Base of a class that multiplies an input with all rows at once, by `multiply`, for `readers`
    parts.
    """

    multiply: Callable[[Tensor], Tensor]
    readers: int
    cached: CachedProduct | None = None
    traced: tuple[Tensor, Tensor, tuple[int, ...]] | None = None

    def product(self, x: Tensor, index: int) -> Tensor:
        """Return the product of all parts for the part `index`: look it up, or compute it and cache
        it for the rest.
        """
        return (
            self._traced_product(x, index)
            if torch.compiler.is_compiling()
            else self._cached_product(x, index)
        )

    def _cached_product(self, x: Tensor, index: int) -> Tensor:
        cached, version = self.cached, _version(x)
        if (
            cached is not None
            and cached.x() is x
            and cached.version == version
            and index in cached.unread
        ):
            unread, y, source = cached.unread - {index}, cached.y, cached.x
        else:
            unread, y = frozenset(range(self.readers)) - {index}, self.multiply(x)
            source = weakref.ref(x, self._forget)  # an unread product is freed together with x
        self.cached = CachedProduct(source, version, y, unread) if unread else None
        return y

    def _forget(self, dead: object) -> None:
        if self.cached is not None and self.cached.x is dead:
            self.cached = None

    def _traced_product(self, x: Tensor, index: int) -> Tensor:
        """Do as `_cached_product` in code that torch.compile can trace: a traced tensor has one
        value.
        """
        traced = self.traced
        if traced is not None and traced[0] is x and index in traced[2]:
            y, unread = traced[1], tuple(i for i in traced[2] if i != index)
        else:
            y, unread = self.multiply(x), tuple(i for i in range(self.readers) if i != index)
        self.traced = (x, y, unread) if unread else None
        return y


def _version(x: Tensor) -> tuple[int, ...]:
    """Identify the values of a tensor: equal keys mean that a cached product with it is valid here
    and now.

    The key has torch's counter of in-place writes, which inference mode does not keep. On a GPU the
    key includes the stream and the graph capture, because a captured product does not exist outside
    its graph.
    """
    version = -1 if x.is_inference() else x._version
    return (version, *driver.stream_state(x.device)[:2]) if x.is_cuda else (version,)


class StoredLinear(SharedProduct):
    """Hold the linear of a stored matrix, whose product serves all its `readers`; `linear` may be
    replaced.
    """

    def __init__(self, linear: nn.Module) -> None:
        self.linear, self.readers = linear, 0

    def multiply(self, x: Tensor) -> Tensor:
        """Call the linear."""
        return cast("Tensor", self.linear(x))


class LinearRows(nn.Module):
    """A linear without its own weight: rows of stored weights, in the order of `parts`."""

    def __init__(self, parts: Sequence[tuple[StoredLinear, slice]]) -> None:
        super().__init__()
        numbered = []
        for stored, rows in parts:
            numbered.append((stored, stored.readers, rows))
            stored.readers += 1
        self.parts = tuple(
            numbered
        )  # torch registers no submodules from a tuple: the weights have one name

    def forward(self, x: Tensor) -> Tensor:
        """Multiply activations `[..., k]` with the rows: `[..., n]`."""
        found = [stored.product(x, index)[..., rows] for stored, index, rows in self.parts]
        return found[0] if len(found) == 1 else torch.cat(found, -1)


#: The linears of a rule at one place: stored name -> path, and path of the model's linear -> its
#: rows.
_Place = tuple[dict[str, str], dict[str, tuple[Rows, ...]]]


def follow_storage(
    names: StateNames, src: Checkpoint, merged: Sequence[Merged]
) -> dict[str, StoredLinear]:
    """Replace linears that transformers makes of rows of stored matrices; return path -> new linear
    in the model.

    `merged` comes from the match of `names` with `src`. A rule of transformers is followed wherever
    it applies, or nowhere. It must have a linear in the language model. Biases must be split or
    stacked as their weights.
    """
    found: dict[str, StoredLinear] = {}
    model, decoder = names.module, language_model(names.module)[0] if merged else ""
    for patterns in dict.fromkeys(each.patterns for each in merged):
        places = _places(names, src, [each for each in merged if each.patterns == patterns])
        if any(path.startswith(decoder) for _, made in places for path in made):
            for stored, made in places:
                found |= _replace(model, src, stored, made)
    return found


def _places(names: StateNames, src: Checkpoint, uses: Sequence[Merged]) -> list[_Place]:
    """Return the places where a rule splits or stacks linears; none if it does something else
    anywhere.
    """
    model, places = names.module, list[_Place]()
    rows: dict[str, tuple[Rows, ...]] = {}
    for use in uses:
        found = rows_of(use, src.true_shape) if _are_linears(model, use.states) else None
        if found is None:
            return []
        rows |= found
    biases = {
        state: tuple(each.rows for each in found)
        for state, found in rows.items()
        if state.endswith(".bias")
    }
    for use in uses:
        if use.states[0].endswith(".bias"):
            continue
        linears = [model.get_submodule(_owner(state)) for state in use.states]
        for state, linear in zip(use.states, linears, strict=True):
            bias = biases.pop(f"{_owner(state)}.bias", None)
            if (bias is None) != (linear.bias is None) or bias not in (
                None,
                tuple(each.rows for each in rows[state]),
            ):
                return []
        stored = {name: _owner(names.state_of(name)) for name in use.names}
        same = len({(linear.bias is None, size_of(linear)[1]) for linear in linears}) == 1
        if not same or not all(
            name.endswith(".weight") and is_free(model, path) for name, path in stored.items()
        ):
            return []
        places.append((stored, {_owner(state): rows[state] for state in use.states}))
    return places if not biases else []


def _replace(
    model: PreTrainedModel,
    src: Checkpoint,
    stored: Mapping[str, str],
    made: Mapping[str, tuple[Rows, ...]],
) -> dict[str, StoredLinear]:
    like = model.get_submodule(next(iter(made)))
    weight, has_bias = like.get_parameter("weight"), like.bias is not None
    held: dict[str, StoredLinear] = {}
    for name, path in stored.items():
        n, k = src.true_shape(name)[0], weight.shape[1]
        linear = nn.Linear(k, n, has_bias, device=weight.device, dtype=weight.dtype)
        add_module(model, path, linear)
        held[name] = StoredLinear(linear)
    for path, rows in made.items():
        model.set_submodule(path, LinearRows([(held[each.name], each.rows) for each in rows]))
    return {stored[name]: linear for name, linear in held.items()}


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _are_linears(model: PreTrainedModel, states: Sequence[str]) -> bool:
    """Return True if states are weights or biases of linears `[n, k]` that share them with no other
    module.
    """
    tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    for state in states:
        try:
            module = model.get_submodule(_owner(state))
        except AttributeError:  # a rule may name more than this model has
            return False
        if not is_linear(module) or is_transposed(module) or state in tied:
            return False
    return True
