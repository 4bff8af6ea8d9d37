"""Launch of the kernels for sm_80 and newer: one source per layout in the frame
kernels/portable.cuh.

Blocks that share a tile write float32 partial sums to a workspace, and the last of them adds these
in order of k. Runs on one device return the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.kernels import driver, loader
from quantkit.kernels.contract import ACTIVATIONS, TYPES, Weight
from quantkit.kernels.tiles import RESERVED, THREADS, PortableTile, PortableTiles, split

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

    def load(self, dtype: torch.dtype, device: torch.device) -> dict[str, driver.Function]:
        """Compile and load the instances of all tiles for activations of a dtype; returns the
        functions by instance.
        """
        return loader.load(self.source, self.instances_by_dtype[dtype], device)


@dataclass(frozen=True, eq=False)
class PortableKernel(Instances):
    """The kernels of a function of kernels/`source`.cu (None: it has the source's name), for one
    format, which is the template argument `variant`.

    A function of its own multiplies with the weights of several experts, and `grouped` launches it.
    """

    source: str
    choice: PortableTiles
    variant: str = ""
    function: str | None = None

    def instance(self, dtype: torch.dtype, tile: PortableTile) -> str:
        """Build the C++ name of the instance for activations of a dtype."""
        arguments = ", ".join(filter(None, (TYPES[dtype], self.variant, tile.arguments)))
        return f"{self.function or self.source}<{arguments}>"

    def launch(
        self,
        weight: Weight,
        x: Tensor,
        packed: Sequence[Tensor],
        bias: Tensor | None,
        out: Tensor,
        tile: PortableTile | None = None,
    ) -> None:
        """Write the product with one weight into `out`, for operands that are checked, `packed` in
        the order of `weight.tensors`.
        """
        m, k = x.shape
        if m > MAX_TOKENS:
            for start in range(0, m, MAX_TOKENS):
                rows = slice(start, start + MAX_TOKENS)
                self.launch(weight, x[rows], packed, bias, out[rows], tile)
            return
        plan = _planned(self, x.device, x.dtype, (m, weight.n, k), weight.group, tile)
        driver.submit(plan, x.device, (), (*packed, x, bias, out))


@functools.lru_cache(maxsize=4096)
def _planned(
    kernel: PortableKernel,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    group: int | None,
    tile: PortableTile | None,
) -> driver.Plan:
    sms, shared_memory = multiprocessors(device)
    tile = tile or kernel.choice.choose(dtype, *shape, sms)
    shared = kernel.choice.shared_bytes(tile)
    resident = sms * min(tile.blocks, shared_memory // (shared + RESERVED))
    rounds, units, blocks = split(tile, *shape, resident)
    function = kernel.load(dtype, device)[kernel.instance(dtype, tile)]
    sizes = (*shape, units, rounds) if group is None else (*shape, units, rounds, group)
    return driver.Plan(
        function,
        (blocks,),
        (THREADS,),
        shared,
        (kernel.source, *kernel.choice.workspace_size(sms)),
        sizes,
    )


@functools.cache
def multiprocessors(device: torch.device) -> tuple[int, int]:
    """Ask for the number of multiprocessors, and the bytes of shared memory of each."""
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.shared_memory_per_multiprocessor
