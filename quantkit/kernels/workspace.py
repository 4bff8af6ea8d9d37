"""Workspaces: memory in which the blocks of a launch exchange sums. Every launch leaves its counters at zero."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from quantkit.errors import KernelError
from quantkit.kernels.driver import stream_state

#: (source, device, stream or None for all CUDA graphs) -> float32 sums, int32 counters.
WORKSPACES: dict[tuple[str, torch.device, int | None], tuple[Tensor, Tensor]] = {}


def workspace(source: str, device: torch.device, sums: int, counters: int) -> tuple[Tensor, Tensor]:
    """Return float32 `[sums]` and int32 `[counters]` for the current stream of a CUDA device, made on first use.

    Each stream has its own workspace, so streams may overlap. All CUDA graphs of a device share one, so two graphs must
    not be replayed at the same time. A workspace cannot be made during a capture: KernelError if the first launch of
    `source` is captured.
    """
    state = stream_state(device)
    found = WORKSPACES.get((source, device, None if state.graph else state.stream))
    if found is not None:
        return found
    if state.graph:
        raise KernelError(f"the first launch of {source} on {device} is captured", "call it once before the capture")
    for owner in (None, state.stream):
        if (source, device, owner) not in WORKSPACES:
            WORKSPACES[source, device, owner] = _allocate(device, sums, counters)
    return WORKSPACES[source, device, state.stream]


def _allocate(device: torch.device, sums: int, counters: int) -> tuple[Tensor, Tensor]:
    """Allocate a workspace in another thread.

    In the thread that warms up a compiled model, torch would take the memory from the pool of a CUDA graph, where no
    allocation may outlive the warm-up.
    """

    def make() -> tuple[Tensor, Tensor]:
        found = (
            torch.empty(sums, dtype=torch.float32, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )
        torch.cuda.current_stream(device).synchronize()  # every stream sees the zeros from now on
        return found

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
