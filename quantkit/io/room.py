"""Memory for tensors of many megabytes, in huge pages where the system has them.

A weight's memory is asked for, filled once and given back. In pages of 4 KiB, the system takes ten times as long to
hand it out as a core takes to fill it, and two threads that ask at once wait for each other. Where weights follow each
other, what one gave back is kept for the next, since huge pages too are found and cleared each time.
"""

from __future__ import annotations

import gc
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from math import prod
from threading import Lock

import torch
from torch import Tensor

#: Below this, the allocator reuses what it has.
LARGE = 4 * 2**20
#: The same where weights follow each other: what one thread takes and another gives back leaves gaps in the allocator's
#: memory that small tensors, which stay, keep open, some more with each weight.
SMALL = 2**17
#: How much may be kept with what is in use, as a multiple of the most that was: at no moment are all sizes in use.
SPARE = 1.25
#: The largest block whose return teaches the C library to keep smaller ones.
_LESSON = 31 * 2**20
#: What memory of its own comes in multiples of: a huge page, and sizes that differ by little are one.
_PAGE = 2 * 2**20


@dataclass
class _Kept:
    """Memory that was given back, the bytes of it and of what is in use, and the most that were in use at once."""

    blocks: list[mmap.mmap] = field(default_factory=list)
    total: int = 0
    most: int = 0


_kept: _Kept | None = None
_lock = Lock()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return a tensor as `torch.empty` does; on a CPU, a large one lies in huge pages of its own."""
    count = prod(shape)
    size = count * dtype.itemsize
    least = LARGE if _kept is None else SMALL
    if size < least or torch.device(device).type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    _keep_small()
    size += -size % (_PAGE if size >= LARGE else least)
    try:
        memory = _kept_one(size) or mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        return torch.empty(shape, dtype=dtype)  # whose error names the bytes
    with suppress(OSError):  # a system without them has the constant all the same
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)  # lives as long as the tensor
    weakref.finalize(view, _given_back, memory, _kept).atexit = False
    return torch.frombuffer(view, dtype=dtype, count=count).view(shape)


def raw(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8 `[bytes]` on the CPU, in the order of its elements."""
    tensor = tensor if tensor.is_cpu and not tensor.requires_grad else tensor.detach().cpu()
    return tensor.reshape(-1).view(torch.uint8)


def aligned(tensor: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a tensor contiguous, and so that integers of `dtype` can be seen in it: copied if it lies between them."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.storage_offset() * tensor.itemsize % dtype.itemsize else tensor


@contextmanager
def kept() -> Iterator[None]:
    """Inside, memory of some size that is given back is kept for the next tensors, up to SPARE times what was in use.

    And Python does not look through all that was there before, again and again, for what nobody refers to any more.
    """
    global _kept
    if _kept is not None:
        yield
        return
    _kept = mine = _Kept()
    if ours := not gc.get_freeze_count():  # else what was frozen by a program that calls us would not stay so
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()
        _kept = None
        mine.blocks.clear()  # what is still in use knows it, and may live on


def _anew() -> None:
    """Begin a process that was copied of one whose threads may be in the midst of this module."""
    global _kept, _lock
    _kept, _lock = None, Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_anew)


def _kept_one(size: int) -> mmap.mmap | None:
    """Return a kept block of `size` bytes, at most a quarter more; if there is none, let others go for a new one."""
    with _lock:
        if (kept := _kept) is None:
            return None
        fitting = min((block for block in kept.blocks if size <= len(block) <= 1.25 * size), key=len, default=None)
        if fitting is not None:
            kept.blocks.remove(fitting)
        else:
            kept.total += size
        kept.most = max(kept.most, kept.total - sum(map(len, kept.blocks)))
        while kept.blocks and kept.total > SPARE * kept.most:
            kept.total -= len(kept.blocks.pop(0))
        return fitting


def _given_back(memory: mmap.mmap, kept: _Kept | None) -> None:
    if kept is not None and kept is _kept:  # without the lock: this may run anywhere, in the midst of the above too
        kept.blocks.append(memory)


@cache
def _keep_small() -> None:
    """Let the allocator keep what it is given back, up to some 30 MiB at a time, for the next who asks.

    The GNU C library begins by returning every block of 128 KiB to the system, and what a piece of a weight needs in
    passing would be handed out in pages of 4 KiB again and again; it stops that for sizes that it has once seen freed.
    """
    torch.empty(_LESSON, dtype=torch.uint8)
