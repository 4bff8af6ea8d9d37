"""Call a block by itself where batches of one shape repeat, because the model would give it the
same arguments.

In each pass a model computes masks and rotary tables anew, passes its other blocks, and waits for
the GPU: for a small block that takes longer than the block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from quantkit.models.interception import HIDDEN, Given
from quantkit.models.passing import tensors_in

#: The pass of a shape before which its arguments are compared, and the number of shapes whose
#: arguments are kept.
REPEATED, KEPT = 5, 8
#: The most bytes of arguments that are kept, as a multiple of the hidden state.
LARGEST = 2


class Repeated:
    """The arguments of the block that runs, for some shapes of batches."""

    def __init__(self) -> None:
        self._index: int | None = None
        self._passes: Counter[Hashable] = Counter()
        self._kept: dict[Hashable, tuple[Given, list[tuple[Tensor, int]]]] = {}

    def get(self, index: int, shape: Hashable, compare: Callable[[], Given | None]) -> Given | None:
        """Return the arguments of block `index` for batches of a shape, if they are kept.

        `compare` is called once, in the last of the first `REPEATED` passes. It returns what may be
        kept.
        """
        if index != self._index:
            self._index = index
            self._passes.clear()
            self._kept.clear()
        if shape in self._kept:
            given, versions = self._kept[shape]
            if all(tensor._version == version for tensor, version in versions):
                return given
            del self._kept[shape]  # the block changes them in place
        self._passes[shape] += 1
        if (
            self._passes[shape] == REPEATED
            and len(self._kept) < KEPT
            and (found := compare()) is not None
        ):
            self._kept[shape] = found, [(tensor, tensor._version) for tensor in _tensors(found)]
            return found
        return None


def independent(given: Given | None, other: Given | None, hidden: Tensor) -> bool:
    """Tell whether a block's arguments were the same for other tokens and another hidden state, and
    may be kept.
    """
    return (
        given is not None
        and other is not None
        and given.is_stored
        and _same(given.args, other.args)
        and given.kwargs.keys() == other.kwargs.keys()
        and all(_same(value, other.kwargs[name]) for name, value in given.kwargs.items())
        and sum(tensor.nbytes for tensor in _tensors(given)) <= LARGEST * hidden.nbytes
    )


def _tensors(given: Given) -> list[Tensor]:
    return list(tensors_in((given.args, given.kwargs)))


def _same(a: Any, b: Any) -> bool:
    """Compare two arguments. Objects that the block might change, such as mappings, count as
    different.
    """
    if isinstance(a, Tensor):
        is_alike = isinstance(b, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)
        return is_alike and not a.requires_grad and torch.equal(a, b)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, bool | int | float | str):
        return type(a) is type(b) and bool(a == b)
    return (a is None or a is HIDDEN) and a is b
