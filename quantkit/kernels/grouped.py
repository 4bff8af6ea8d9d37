"""Products of rows with the weights of several experts in one launch, in the frame
kernels/routed.cuh.

`route` sorts the rows of a mixture of experts. Both products of the experts use its list, and the
launches never wait for the host. Rows of one expert share tiles, so a weight is read once if the
expert's rows fit into one tile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import KernelError
from quantkit.kernels import LAUNCHERS, driver, loader, routing as steps, unusable, weight_of
from quantkit.kernels.contract import (
    ACTIVATIONS,
    Weight,
    check_addresses,
    check_operand,
)
from quantkit.kernels.hopper import ROWS, RoutedHopper
from quantkit.kernels.portable import PortableKernel, multiprocessors
from quantkit.kernels.tiles import RESERVED, THREADS, ceil

#: Mean rows of an expert from which on nearly all of its tiles are full.
MANY_ROWS = 256.0


@dataclass(frozen=True, eq=False)
class GroupedKernel:
    """Products with the packed weights `[n, k]` of some experts, stacked: `weight` has their shapes
    `[experts, ...]`.

    On Hopper, tiles of many rows have kernels of their own: `hopper`. `checked` has the addresses
    of tensors that were compared with `weight`.
    """

    weight: Weight
    kernel: PortableKernel
    experts: int
    hopper: RoutedHopper | None = None
    checked: set[tuple[int, ...]] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        layout: str,
        scheme: Scheme,
        experts: int,
        n: int,
        k: int,
        device: torch.device | None = None,
    ) -> GroupedKernel:
        """Find the kernel of a layout; KernelError in one line if there is none for these weights
        or on `device`.
        """
        weight = weight_of(layout, scheme, n, k)
        kernels = LAUNCHERS[layout].kernels(scheme, n, k)
        if not 1 <= experts <= steps.MAX_EXPERTS:
            raise KernelError(f"the kernels take 1 to {steps.MAX_EXPERTS} experts, not {experts}")
        problem = None if device is None else unusable(device)
        if problem is not None:
            raise KernelError(problem)
        hopper = kernels.routed_hopper if device is not None and loader.is_hopper(device) else None
        return cls(
            weight.stacked(experts),
            kernels.routed,
            experts,
            hopper if hopper is not None and hopper.takes(n, k) else None,
        )

    @functools.cached_property
    def costs(self) -> tuple[tuple[int, float], ...]:
        """The rows of each tile, and the predicted microseconds of a large weight with as many."""
        found = {tile.m: tile.cost for tile in self.kernel.choice.tiles}
        return tuple((found if self.hopper is None else found | ROWS).items())

    def load(self, dtype: torch.dtype, device: torch.device) -> None:
        """Compile and load all kernels that a layer of experts needs, for a dtype; not in a
        capture.
        """
        steps.load(device)
        for kernel in self.kernels:
            kernel.load(dtype, device)

    @property
    def kernels(self) -> tuple[PortableKernel | RoutedHopper, ...]:
        return (self.kernel,) if self.hopper is None else (self.kernel, self.hopper)

    def tile(self, m: int, topk: int) -> int:
        """Choose the rows of a tile for `route`, for m tokens with `topk` experts each."""
        return choose(self.costs, m * topk / self.experts)

    def launch(
        self,
        tensors: Sequence[Tensor],
        x: Tensor,
        routing: steps.Routing,
        y: Tensor,
        *,
        gather: bool,
        weights: Tensor | None = None,
    ) -> None:
        """Write `[rows, n]` into `y`: row r of `x` (with `gather` row r // topk), times the weight
        of r's expert.

        `tensors` are the layout's tensors, stacked. Row r is multiplied by `weights[r]` (float32,
        one for each row) before it is rounded. Rows without an expert become zeros. Sums are
        float32, in the same order in every run. KernelError for operands that cannot be multiplied;
        `workspace` explains the limits on streams and CUDA graphs.
        """
        self._check(tensors, x, routing, y, gather, weights)
        n, k, device = self.weight.n, self.weight.k, x.device
        choices = routing.topk if gather else 1
        if self.hopper is not None and routing.tile in ROWS:
            self.hopper.launch_routed(self.weight, x, tensors, routing, y, choices, weights)
            return
        plan = _planned(
            self.kernel, device, x.dtype, routing.tile, routing.max_tiles, n, k, self.weight.group
        )
        behind, sizes = (routing.list, weights), (routing.max_tiles, choices)
        driver.submit(plan, device, (), (*tensors, x, y), behind, sizes)

    def _check(
        self,
        tensors: Sequence[Tensor],
        x: Tensor,
        routing: steps.Routing,
        y: Tensor,
        gather: bool,
        weights: Tensor | None,
    ) -> None:
        name, n, k, device = self.weight.layout, self.weight.n, self.weight.k, x.device
        check_operand(name, "x", x, ACTIVATIONS, (routing.m if gather else routing.rows, k), device)
        check_operand(name, "y", y, (x.dtype,), (routing.rows, n), device)
        if weights is not None:
            check_operand(
                name,
                "weights of rows",
                weights,
                (torch.float32,),
                tuple(weights.shape),
                device,
                alignment=4,
            )
            if weights.numel() != routing.rows:
                raise KernelError(
                    f"the {name} kernel takes {routing.rows} weights of rows, not {weights.numel()}"
                )
        if routing.experts != self.experts or routing.list.device != device:
            raise KernelError(
                f"rows were sorted for {routing.experts} experts on {routing.list.device}, and "
                f"there are {self.experts} on {device}"
            )
        if tuple([tensor.data_ptr() for tensor in tensors]) not in self.checked:
            check_addresses(self.weight, tensors, device, self.checked)


#: Most steps along k of a tile that one block may do by itself, because sharing it would take
#: longer.
SHORT = 8


@functools.lru_cache(maxsize=4096)
def _planned(
    kernel: PortableKernel,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    max_tiles: int,
    n: int,
    k: int,
    group: int | None,
) -> driver.Plan:
    sms, shared_memory = multiprocessors(device)
    tile = next((tile for tile in kernel.choice.tiles if tile.m == rows), None)
    if tile is None:
        sizes = ", ".join(str(tile.m) for tile in kernel.choice.tiles)
        raise KernelError(f"the kernel of experts takes tiles of {sizes} rows, not of {rows}")
    units = max_tiles * tile.units(1, n, k)
    if units >= 1 << 31:
        raise KernelError(
            f"the kernel of experts takes fewer rows than {max_tiles} tiles of {rows}",
            "split the tokens",
        )
    shared = kernel.choice.shared_bytes(tile)
    held = shared + RESERVED + 8 * tile.m  # the numbers of rows are in shared memory, too
    blocks = min(units, sms * min(tile.blocks, shared_memory // held))
    # The least number of tiles that are not shared by blocks.
    whole = 2 * sms // 3 if ceil(k, tile.k) <= SHORT else 1 << 30
    return driver.Plan(
        kernel.load(dtype, device)[kernel.instance(dtype, tile)],
        (blocks,),
        (THREADS,),
        shared,
        (kernel.function or kernel.source, *kernel.choice.workspace_size(sms)),
        (whole, n, k) if group is None else (whole, n, k, group),
        early=steps.starts_early(device),
    )


@functools.lru_cache(maxsize=4096)
def choose(costs: tuple[tuple[int, float], ...], mean: float) -> int:
    """Choose the rows of the tile that costs least if rows are on experts at random, `mean` on
    each; `costs` are those of `GroupedKernel`.
    """
    return min(costs, key=lambda each: expected_tiles(mean, each[0]) * each[1])[0]


def expected_tiles(mean: float, rows: int) -> float:
    """Compute the mean number of tiles of `rows` rows of an expert, whose number of rows is Poisson
    distributed.
    """
    if mean >= MANY_ROWS:
        return mean / rows + 0.5
    probability, expected = math.exp(-mean), 0.0
    for count in range(1, int(mean + 10 * math.sqrt(mean)) + 10):
        probability *= mean / count
        expected += probability * ceil(count, rows)
    return expected
