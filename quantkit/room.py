"""Memory for tensors of many megabytes, in huge pages where the system has them.

A weight's memory is asked for, filled once and given back. In pages of 4 KiB, the system takes ten times as long to
hand it out as a core takes to fill it, and two threads that ask at once wait for each other.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

#: Below this, the allocator reuses what it has.
LARGE = 4 * 2**20


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return a tensor as `torch.empty` does; on a CPU, a large one lies in huge pages of its own."""
    size = prod(shape) * dtype.itemsize
    if size < LARGE or torch.device(device).type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        return torch.empty(shape, dtype=dtype)  # whose error names the bytes
    with suppress(OSError):  # a system without them has the constant all the same
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
