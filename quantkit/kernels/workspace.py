"""Workspaces: memory in which the blocks of a launch exchange sums. Every launch leaves its
counters at zero.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from quantkit.errors import KernelError
from quantkit.kernels.driver import StreamState

#: Captures whose streams are remembered; more are not under way at the same time.
CAPTURES = 16
#: Float32 sums and int32 counters.
Workspace = tuple[Tensor, Tensor]


@dataclass
class Workspaces:
    """The workspaces of one source on one device.

    `streams` has one for each stream. In `captures` each stream of a CUDA graph has one of
    `graphs`, the first the first. So branches of a graph may overlap, and all graphs share the
    memory.
    """

    streams: dict[int, Workspace] = field(default_factory=dict)
    captures: dict[int, dict[int, Workspace]] = field(default_factory=dict)
    graphs: list[Workspace] = field(default_factory=list)


WORKSPACES: dict[tuple[str, torch.device], Workspaces] = {}
_LOCK = Lock()


def workspace(
    source: str, device: torch.device, state: StreamState, sums: int, counters: int
) -> Workspace:
    """Return float32 `[sums]` and int32 `[counters]` for the current stream of a CUDA device, made
    on first use.

    Each stream has its own workspace, and so has each stream that is captured into one CUDA graph.
    So they may overlap. But two graphs must not be replayed at the same time, because graphs share
    workspaces. None can be made during a capture: KernelError if `source` is captured on more
    streams at once than it was launched on before.
    """
    found = WORKSPACES.get((source, device))
    if found is not None:
        own = found.captures.get(state.graph, {}) if state.graph else found.streams
        if state.stream in own:
            return own[state.stream]
    with _LOCK:
        found = WORKSPACES.setdefault((source, device), Workspaces())
        if not state.graph:
            found.graphs.append(allocate(device, sums, counters))
            return found.streams.setdefault(state.stream, allocate(device, sums, counters))
        own = found.captures.setdefault(state.graph, {})
        if len(own) == len(found.graphs):
            raise KernelError(
                f"{source} is captured on {len(own) + 1} streams of {device} at once, and was "
                f"launched on {len(own)}",
                "call it once on each stream before the capture",
            )
        if len(found.captures) > CAPTURES:
            del found.captures[next(iter(found.captures))]
        return own.setdefault(state.stream, found.graphs[len(own)])


def allocate(device: torch.device, sums: int, counters: int) -> Workspace:
    """Allocate a workspace in another thread.

    In the thread that warms up a compiled model, torch would take the memory from the pool of a
    CUDA graph, where no allocation may outlive the warm-up.
    """

    def make() -> Workspace:
        found = (
            torch.empty(sums, dtype=torch.float32, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )
        torch.cuda.current_stream(device).synchronize()  # every stream sees the zeros from now on
        return found

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
