"""Where blocks of a launch leave sums for each other; it stays, since every launch leaves its counters at zero."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from quantkit.errors import KernelError
from quantkit.kernels.driver import place

#: (source, device, stream or None for all CUDA graphs) -> float32 sums, int32 counters.
_ROOMS: dict[tuple[str, torch.device, int | None], tuple[Tensor, Tensor]] = {}


def workspace(source: str, device: torch.device, sums: int, counters: int) -> tuple[Tensor, Tensor]:
    """Return float32 `[sums]` and int32 `[counters]`, zero between launches, for the current stream of a CUDA device.

    Each stream has its own, so that streams may overlap. Captured launches have one for all CUDA graphs of a device:
    graphs must not be replayed beside each other. It cannot be made during a capture, so KernelError if nothing was
    launched before.
    """
    at = place(device)
    found = _ROOMS.get((source, device, None if at.graph else at.stream))
    if found is not None:
        return found
    if at.graph:
        raise KernelError(f"the first launch of {source} on {device} is captured: call it once before the capture")
    for owner in (None, at.stream):
        if (source, device, owner) not in _ROOMS:
            _ROOMS[source, device, owner] = _room(device, sums, counters)
    return _ROOMS[source, device, at.stream]


def _room(device: torch.device, sums: int, counters: int) -> tuple[Tensor, Tensor]:
    """Return new memory that stays, made by another thread.

    What the thread of a compiled model allocates while it warms up goes into the pool of its CUDA graph, where torch
    allows nothing to stay.
    """

    def make() -> tuple[Tensor, Tensor]:
        found = (
            torch.empty(sums, dtype=torch.float32, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )
        torch.cuda.current_stream(device).synchronize()  # zero for every stream from now on
        return found

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
