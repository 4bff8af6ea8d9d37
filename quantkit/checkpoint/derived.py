"""Tensors that are computed from a checkpoint's stored tensors and replace them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

#: Read a tensor by name, or only an entry or a range of its first dimension.
Read = Callable[[str, "int | slice | None"], Tensor]
Compute = Callable[[Read, "int | slice | None"], Tensor]


class Derived(NamedTuple):
    """Describe a tensor that is computed from the tensors `inputs`, which it replaces (`Checkpoint.derive`).

    `compute(read, index)` returns the tensor, or an entry or a range of its first dimension. `read` gives the stored
    inputs; with an index it reads only the bytes of that part. `restore` undoes it for a tensor that is written dense;
    without it, a dense tensor is written as it was computed.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    inputs: tuple[str, ...]
    compute: Compute
    restore: Callable[[Tensor], Tensor] | None = None
