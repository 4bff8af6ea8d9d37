"""Tensors that a block passes to later blocks beside its hidden state, stored between runs of the
model.

A block passes tensors on in two ways. It returns them after its hidden state, or it puts them into
a mapping that the model hands to all its blocks. Here they are a list of tensors and a `Form`,
which JSON can hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, Setting, Words

#: The way out for a model that does not run block by block.
USE_RTN = Words("use", Setting("method", "rtn"))

#: `returned`: None, or one entry for each value that a block returns after its hidden state.
#: `left`: name of the argument that is a mapping -> its new entries.
Form = dict[str, Any]


class State(NamedTuple):
    """Hold the input of a block for one document: the hidden state `[t, h]` or `[t, streams, h]`,
    and other tensors.
    """

    hidden: Tensor
    passed: tuple[Tensor, ...] = ()


class Passed(NamedTuple):
    """Hold the tensors as Python values: `hidden` by token, `returned` after it, and the entries
    `left` in mappings.
    """

    hidden: Tensor
    returned: list[Any] | None
    left: dict[str, dict[Any, Any]]


class Needed(Exception):
    """Record that the model uses a block's return value `number`, counted after the
    hidden state.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Unused(Tensor):
    """Stand for a returned tensor that nothing has used so far. Any operation on it
    raises Needed.
    """

    number: int

    @classmethod
    def of(cls, number: int) -> Unused:
        """Return the placeholder of the value `number`."""
        made = torch.empty(0).as_subclass(cls)
        made.number = number
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Needed(next(x.number for x in tensors_in((args, kwargs)) if isinstance(x, Unused)))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments of a call."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(inner)


def pack(passed: Passed, unused: frozenset[int]) -> tuple[State, Form]:
    """Split a block's outputs into tensors and their form, without the returned values that are
    `unused`.

    CheckpointError for a value of an unsupported type.
    """
    found: list[Tensor] = []
    returned: list[Any] | None = None
    if passed.returned is not None:
        returned = [
            {"unused": i} if i in unused else _flatten(value, found)
            for i, value in enumerate(passed.returned)
        ]
    left = {name: _flatten(entries, found) for name, entries in passed.left.items()}
    return State(passed.hidden, tuple(found)), {"returned": returned, "left": left}


def unpack(state: State, form: Form, device: torch.device) -> Passed:
    """Undo `pack` with copies on `device`, which the model may change in place."""
    tensors = [tensor.to(device, copy=True) for tensor in state.passed]
    returned, left = form["returned"], form["left"]
    return Passed(
        state.hidden.to(device, copy=True),
        None if returned is None else [_unflatten(each, tensors) for each in returned],
        {name: _unflatten(each, tensors) for name, each in left.items()},
    )


def _flatten(value: Any, found: list[Tensor]) -> dict[str, Any]:
    """Return the form of a value, and add its tensors to `found`."""
    if isinstance(value, Tensor):
        found.append(value)
        return {"tensor": len(found) - 1}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_flatten(each, found) for each in value]}
    if type(value) is dict:
        return {"dict": [[key, _flatten(each, found)] for key, each in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    kind = type(value).__name__
    raise CheckpointError(
        f"passes on a value of type {kind}, and only tensors can be stored between blocks", USE_RTN
    )


def _unflatten(form: Mapping[str, Any], tensors: Sequence[Tensor]) -> Any:
    ((kind, inner),) = form.items()
    if kind == "unused":
        return Unused.of(inner)
    if kind == "tensor":
        return tensors[inner]
    if kind == "value":
        return inner
    if kind == "dict":
        return {key: _unflatten(each, tensors) for key, each in inner}
    values = [_unflatten(each, tensors) for each in inner]
    return tuple(values) if kind == "tuple" else values
