"""Launch of the kernels for sm_80 and newer: one source per layout in the frame
kernels/portable.cuh.

`portable_tiles` chooses the tile and splits the work. Blocks that share a tile write float32
partial sums to a workspace, and the last of them adds these in order of k. Runs on one device
return the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from quantkit.kernels import driver, loader
from quantkit.kernels.contract import ACTIVATIONS, TYPES, Weight
from quantkit.kernels.driver import Function
from quantkit.kernels.portable_tiles import RESERVED, THREADS, PortableTile, PortableTiles, split
from quantkit.kernels.workspace import workspace

#: Most tokens of one launch, because the kernels count units in 32 bits.
MAX_TOKENS = 1 << 14


class Instances:
    """The instances of kernels/`source`.cu for the tiles of a `choice`."""

    source: str
    choice: Any

    def instance(self, dtype: torch.dtype, tile: Any) -> str:
        """Build the C++ name of the instance for activations of a dtype."""
        raise NotImplementedError

    @functools.cached_property
    def instances_by_dtype(self) -> dict[torch.dtype, tuple[str, ...]]:
        """dtype of the activations -> the instances of all tiles, which are compiled together."""
        return {
            dtype: tuple(self.instance(dtype, tile) for tile in self.choice.tiles_for(dtype))
            for dtype in ACTIVATIONS
        }

    @property
    def instances(self) -> tuple[str, ...]:
        return sum(self.instances_by_dtype.values(), ())

    def load(self, dtype: torch.dtype, device: torch.device) -> dict[str, Function]:
        """Compile and load the instances of all tiles for activations of a dtype; returns the
        functions by instance.
        """
        return loader.load(self.source, self.instances_by_dtype[dtype], device).functions


@dataclass(frozen=True, eq=False)
class PortableInstances(Instances):
    """Instances of a function of kernels/`source`.cu (None: it has the source's name), for one
    format.

    The format is the template argument `variant`.
    """

    source: str
    choice: PortableTiles
    variant: str = ""
    function: str | None = None
    path: ClassVar[str] = "portable"

    def instance(self, dtype: torch.dtype, tile: PortableTile) -> str:
        """Build the C++ name of the instance for activations of a dtype."""
        arguments = ", ".join(filter(None, (TYPES[dtype], self.variant, tile.arguments)))
        return f"{self.function or self.source}<{arguments}>"


@dataclass(frozen=True, eq=False)
class PortableKernel(PortableInstances):
    """The kernels that multiply with one weight."""

    def launch(
        self,
        weight: Weight,
        x: Tensor,
        packed: Sequence[Tensor],
        bias: Tensor | None,
        out: Tensor,
        tile: PortableTile | None = None,
    ) -> None:
        """Write the product into `out`, for operands that are checked, `packed` in the order of
        `weight.tensors`.
        """
        (m, k), n, device = x.shape, weight.n, x.device
        if m > MAX_TOKENS:
            for start in range(0, m, MAX_TOKENS):
                rows = slice(start, start + MAX_TOKENS)
                self.launch(weight, x[rows], packed, bias, out[rows], tile)
            return
        plan = _planned(self, device, x.dtype, m, n, k, tile)
        state = driver.stream_state(device)
        sums, arrived = workspace(self.source, device, state, *plan.workspace)
        given = [*packed, x, bias, out, sums, arrived]
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in given]
        sizes = (m, n, k, plan.units, plan.rounds, *weight.group_argument)
        arguments = driver.written_arguments(
            ("Q",) * len(pointers) + ("i4x",) * len(sizes), (*pointers, *sizes)
        )
        driver.launch(plan.function, plan.grid, (THREADS,), arguments, plan.shared, device, state)


class _Plan(NamedTuple):
    """The parts of a launch that do not depend on addresses; `workspace` counts sums
    and counters.
    """

    function: Function
    grid: tuple[int]
    shared: int
    units: int
    rounds: int
    workspace: tuple[int, int]


@functools.lru_cache(maxsize=4096)
def _planned(
    kernel: PortableKernel,
    device: torch.device,
    dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    tile: PortableTile | None,
) -> _Plan:
    sms, shared_memory = multiprocessors(device)
    tile = tile or kernel.choice.choose(dtype, m, n, k, sms)
    shared = kernel.choice.shared_bytes(tile)
    rounds, units, blocks = split(
        tile, m, n, k, sms * min(tile.blocks, shared_memory // (shared + RESERVED))
    )
    function = kernel.load(dtype, device)[kernel.instance(dtype, tile)]
    return _Plan(function, (blocks,), shared, units, rounds, kernel.choice.workspace_size(sms))


@functools.cache
def multiprocessors(device: torch.device) -> tuple[int, int]:
    """Ask for the number of multiprocessors, and the bytes of shared memory of each."""
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.shared_memory_per_multiprocessor
