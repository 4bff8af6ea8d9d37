"""A call of a block made again with another hidden state, without the model's code before it.

Several passes over the same documents repeat masks and rotary tables. The first pass records them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.models.passing import Passed, tensors_in

#: The most bytes of arguments of calls that are kept for one block: none where a CPU computes, and hides no time.
CALLS_BYTES = {"cpu": 0, "cuda": 2**28}
#: Stands for the hidden state among the arguments of a call.
_HIDDEN = object()


class Call(NamedTuple):
    """Hold the arguments of a call of a block, and the shape of its hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: torch.Size
    nbytes: int
    versions: list[int]

    def is_unchanged(self) -> bool:
        """Return True if no tensor among the arguments was written to since."""
        return [tensor._version for tensor in tensors_in((self.args, self.kwargs))] == self.versions

    def on(self, hidden: Tensor) -> tuple[list[Any], dict[str, Any]]:
        """Give the arguments with a hidden state in its place."""
        hidden = hidden.reshape(self.shape)
        args = [hidden if value is _HIDDEN else value for value in self.args]
        return args, {name: hidden if value is _HIDDEN else value for name, value in self.kwargs.items()}


class Replay:
    """Record calls of one block by key. All their arguments take at most `most` bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: dict[Hashable, Call] = {}

    def find(self, key: Hashable) -> Call | None:
        """Look up a recorded call; None if there is none."""
        return self._calls.get(key)

    def clear(self) -> None:
        """Forget all calls, because another block follows."""
        self._calls.clear()

    @contextmanager
    def recording(
        self,
        key: Hashable,
        passed: Passed,
        version: int,
        entering: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Iterator[None]:
        """Record the call made inside, if it can be made again.

        `version` is the hidden state's version before the pass. A call that a watcher ends counts too. A call that
        changes its arguments in place does not.
        """
        call = None if key in self._calls else self._call(passed, version, entering, args, kwargs)
        try:
            yield
        finally:
            if call is not None and call.is_unchanged():
                self._calls[key] = call

    def _call(
        self, passed: Passed, version: int, entering: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | None:
        """Describe a call; None if it cannot be made again with another hidden state.

        It can if the block gets the stored hidden state unchanged, and all else is a plain value or a separate tensor.
        """
        hidden = passed.hidden
        entered = entering.ndim == 3 and entering.is_contiguous() and entering._version == version
        if not entered or entering.data_ptr() != hidden.data_ptr() or entering.numel() != hidden.numel():
            return None
        if passed.returned or passed.left:
            return None
        kept = tuple(_HIDDEN if value is entering else value for value in args)
        named = {name: _HIDDEN if value is entering else value for name, value in kwargs.items()}
        if not all(map(_is_plain, (*kept, *named.values()))):
            return None
        tensors = list(tensors_in((kept, named)))
        nbytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        most = self._most - sum(call.nbytes for call in self._calls.values())
        storage = entering.untyped_storage().data_ptr()
        if nbytes > most or any(tensor.untyped_storage().data_ptr() == storage for tensor in tensors):
            return None
        return Call(kept, named, entering.shape, nbytes, [tensor._version for tensor in tensors])


def _is_plain(value: Any) -> bool:
    """Return True for a tensor, or a value that no call can change."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return value is _HIDDEN or value is None or type(value) in (Tensor, bool, int, float, str, torch.dtype)
