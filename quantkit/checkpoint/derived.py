"""Tensors that are computed from the stored ones of a checkpoint, and take their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

#: Read a tensor by name, or only a slice of it along the first dimension.
Read = Callable[[str, int | None], Tensor]


class Derived(NamedTuple):
    """Describe a tensor that is computed from the tensors `inputs`, which it replaces (`Checkpoint.derive`).

    `compute(read, index)` returns the tensor, or with an index its slice along the first dimension. `read` gives the
    inputs as they were before; with an index it reads only the bytes of that slice.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    inputs: tuple[str, ...]
    compute: Callable[[Read, int | None], Tensor]
