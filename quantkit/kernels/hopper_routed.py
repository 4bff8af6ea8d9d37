"""Launch of the Hopper kernels for experts with many rows, in the frame
kernels/hopper_routed.cuh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.kernels import driver, expert_steps
from quantkit.kernels.contract import TYPES, Weight
from quantkit.kernels.driver import Function
from quantkit.kernels.hopper import HopperKernel, weight_maps, workspace_size
from quantkit.kernels.hopper_tiles import K_STEP, WARPGROUP, HopperTile
from quantkit.kernels.portable import multiprocessors
from quantkit.kernels.routing import Routing
from quantkit.kernels.tensormap import SIZE, tensor_map
from quantkit.kernels.workspace import workspace

#: Rows of a tile -> its cost beside `PortableTile.cost`, about the same in all layouts
#: (benchmarks/gpu/experts.csv). With fewer rows, products are bound by memory, and the portable
#: kernels do as well.
ROWS = {64: 36.0, 128: 48.0}


@dataclass(frozen=True, eq=False)
class RoutedHopper(HopperKernel):
    """The kernels for weights `[n, k]` of several experts: n must be a multiple of `n_unit`, and k
    of 128.

    `stride(n, k)` is from one expert to the next in the tensor maps of their stack
    (kernels/hopper_matmul.cuh). If `halves`, bfloat16 activations are multiplied as float16 numbers
    (kernels/hopper_routed.cuh).
    """

    stride: Callable[[int, int], int]
    n_unit: int
    halves: bool

    @classmethod
    def of(
        cls,
        kernel: HopperKernel,
        stride: Callable[[int, int], int] = lambda n, k: k // K_STEP,
        n_unit: int = 1,
    ) -> RoutedHopper:
        """Select the widest tiles of a layout whose warpgroups share stages."""
        tiles: dict[int, HopperTile] = {}
        for tile in sorted(kernel.choice.tiles, key=lambda tile: (tile.columns, -tile.cluster)):
            if tile.shared and tile.tokens in ROWS:
                tiles[tile.tokens] = replace(tile, cluster=0)
        choice = replace(kernel.choice, tiles=tuple(tiles.values()), scaled_by_group=False)
        halves = kernel.choice.scaled_by_group
        return cls(
            kernel.source, kernel.variant, choice, kernel.tensor_maps, stride, n_unit, halves
        )

    @property
    def function(self) -> str:
        return self.source.replace("_hopper", "_routed_hopper")

    def takes(self, n: int, k: int) -> bool:
        """Return True for widths whose experts are at whole places of the tensor maps."""
        return n % self.n_unit == 0 and k % K_STEP == 0

    def operands(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the operands of products for activations of a dtype."""
        return torch.float16 if self.halves else dtype

    def instance(self, dtype: torch.dtype, tile: HopperTile) -> str:
        """Build the C++ name of the instance for activations of a dtype."""
        sizes = f"{tile.tokens}, {tile.words}, {tile.warpgroups}, {tile.stages}"
        return (
            f"{self.function}<{TYPES[self.operands(dtype)]}, {sizes}, {self.variant}, true, "
            f"{TYPES[dtype]}>"
        )

    def tile(self, rows: int) -> HopperTile:
        """Find the tile of `rows` rows."""
        return next(tile for tile in self.choice.tiles if tile.tokens == rows)

    def launch_routed(
        self,
        weight: Weight,
        x: Tensor,
        packed: Sequence[Tensor],
        routing: Routing,
        y: Tensor,
        choices: int,
        weights: Tensor | None,
    ) -> None:
        """Write row r // `choices` of `x` times the weight of r's expert and `weights[r]` into row
        r of `y`.
        """
        n, k, device = weight.n, weight.k, x.device
        gathered, powers = expert_steps.gather_rows(x, routing, choices, y, self.operands(x.dtype))
        plan = _planned(self, device, x.dtype, routing.tile)
        maps = weight_maps(self, plan.tile, n, k, routing.experts)(
            tuple([tensor.data_ptr() for tensor in packed])
        )
        x_map = tensor_map(
            gathered.data_ptr(), tuple(gathered.shape), (plan.tile.tokens, 64), 2, True
        )
        state = driver.stream_state(device)
        sums, counters = workspace(self.source, device, state, *plan.workspace)
        pointers = [tensor.data_ptr() for tensor in (packed[-1], y, sums, counters, routing.list)]
        pointers += [0 if one is None else one.data_ptr() for one in (weights, powers)]
        sizes = (routing.max_tiles, self.stride(n, k), n, k)
        kinds = (SIZE,) * (1 + len(maps)) + ("Q",) * len(pointers) + ("i4x",) * len(sizes)
        arguments = driver.written_arguments(kinds, (x_map, *maps, *pointers, *sizes))
        driver.launch(
            plan.function, plan.grid, plan.block, arguments, plan.shared, device, state, early=True
        )


@dataclass(frozen=True)
class _Plan:
    """The parts of a launch that do not depend on addresses."""

    tile: HopperTile
    function: Function
    grid: tuple[int]
    block: tuple[int]
    shared: int
    workspace: tuple[int, int]


@functools.lru_cache(maxsize=4096)
def _planned(kernel: RoutedHopper, device: torch.device, dtype: torch.dtype, rows: int) -> _Plan:
    sms, _ = multiprocessors(device)
    tile = kernel.tile(rows)
    function = kernel.load(dtype, device)[kernel.instance(dtype, tile)]
    block = (WARPGROUP * (tile.warpgroups + 1),)
    return _Plan(
        tile,
        function,
        (sms * tile.resident,),
        block,
        kernel.choice.shared_bytes(tile),
        workspace_size(sms),
    )
