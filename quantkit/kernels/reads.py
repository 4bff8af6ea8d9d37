"""A record of the weights that launches have read, so that a later launch may fetch them early.

A launch on Hopper may fetch weights while the work before it in the stream still runs, unless that work may write them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

from torch import Tensor


class Reads:
    """The tensors that launches have read, with their states then; it keeps no tensor alive."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[weakref.ref[Tensor], tuple[int, int]]] = {}  # by id

    def valid(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if launches have read these very tensors, and torch has written to none of them since.

        torch counts a write in place in the tensor's version. `.data = ` and `module.to` change the address instead. A
        write through `.data` itself is not seen (docs/kernels.md).
        """
        for tensor in tensors:  # in each launch, so without a call for each tensor
            before = self.seen.get(id(tensor))
            if before is None or before[0]() is not tensor or before[1] != (tensor._version, tensor.data_ptr()):
                return False
        return True

    def remember(self, tensors: Sequence[Tensor]) -> None:
        """Record that a launch has read these tensors. Inference tensors have no version, so they are left out."""
        for tensor in tensors:
            state = _state(tensor)
            if state is not None:
                key = id(tensor)
                self.seen[key] = weakref.ref(tensor, partial(self._forget, key)), state

    def _forget(self, key: int, dead: object) -> None:
        if key in self.seen and self.seen[key][0] is dead:  # else the id already belongs to another tensor
            del self.seen[key]


def _state(tensor: Tensor) -> tuple[int, int] | None:
    """Read the version and address: every write changes one of them. None for inference tensors."""
    return None if tensor.is_inference() else (tensor._version, tensor.data_ptr())


#: The reads of this process.
READS = Reads()
