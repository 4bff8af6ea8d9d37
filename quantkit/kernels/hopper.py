"""Launch of the kernels for Hopper, in the frame kernels/hopper_matmul.cuh; `hopper_tiles` chooses their tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.kernels import loader
from quantkit.kernels.contract import ACTIVATIONS, TYPES, Weight, check, check_same_dtype
from quantkit.kernels.hopper_tiles import MAX_CLUSTER, HopperTile, HopperTiles, choose_tile, launch_sizes
from quantkit.kernels.reads import READS
from quantkit.kernels.tensormap import tensor_map
from quantkit.kernels.workspace import workspace


@dataclass(frozen=True, eq=False)
class HopperKernel:
    """The kernels of kernels/`source`.cu for one group size or format, which is the template argument `variant`.

    `tensor_maps(tile, words, scales, n, k)` makes the descriptors of the weight's tensors.
    """

    source: str
    variant: str
    choice: HopperTiles
    tensor_maps: Callable[[HopperTile, Sequence[Tensor], Tensor, int, int], list[bytes]]

    def instance(self, dtype: torch.dtype, tile: HopperTile) -> str:
        """Build the C++ name of the instance for activations of a dtype; all clusters above two share one."""
        sizes = f"{tile.tokens}, {tile.words}, {tile.warpgroups}, {tile.stages}"
        cluster = MAX_CLUSTER if tile.cluster > 2 else tile.cluster
        return f"{self.source}<{TYPES[dtype]}, {sizes}, {self.variant}, {str(tile.shared).lower()}, {cluster}>"

    @functools.cached_property
    def instances_by_dtype(self) -> dict[torch.dtype, tuple[str, ...]]:
        """dtype of the activations -> the instances of all tiles, which are compiled together."""
        return {
            dtype: tuple(self.instance(dtype, tile) for tile in self.choice.tiles_for(dtype)) for dtype in ACTIVATIONS
        }

    @property
    def instances(self) -> tuple[str, ...]:
        return sum(self.instances_by_dtype.values(), ())

    def multiply(
        self,
        weight: Weight,
        x: Tensor,
        tensors: Mapping[str, Tensor],
        bias: Tensor | None,
        out: Tensor | None,
        tile: HopperTile | None = None,
    ) -> Tensor:
        """Check the operands and launch; returns `[m, n]` in the dtype of `x`. `tile` overrides the choice.

        KernelError for operands that cannot be multiplied. `workspace` explains the limits on streams and CUDA graphs.
        The launch may fetch weights while the one before it still runs, if they were read before and not written since.
        """
        out = check(weight, x, tensors, bias, out)
        check_same_dtype(weight.layout, x, out)
        (m, k), n, sms = x.shape, weight.n, multiprocessors(x.device)
        tile = tile or choose_tile(self.choice, x.dtype, m, n, k, sms)
        *words, scales = packed = [tensors[suffix] for suffix in weight.tensors]
        maps = self.tensor_maps(tile, words, scales, n, k)
        sums, counters = workspace(self.source, x.device, 2 * sms * 256 * 128, 4 * sms)
        x_map = tensor_map(x, (m, k), (tile.tokens, 64), 2, swizzled=True)
        instance, together = self.instance(x.dtype, tile), self.instances_by_dtype[x.dtype]
        listed = together if instance in together else (instance,)  # a benchmark may try other tiles
        function = loader.load(self.source, listed, x.device).functions[instance]
        arguments = [x_map, *maps, scales, bias, out, sums, counters, m, n, k]
        read = packed if bias is None else [*packed, bias]
        blocks, threads, shared = launch_sizes(self.choice, tile, m, n, k, sms)
        early = READS.valid(read)
        state = loader.launch(function, (blocks,), (threads,), arguments, shared, cluster=tile.cluster, early=early)
        if not state.graph:  # a captured launch has not read anything yet
            READS.remember(read)
        return out


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
