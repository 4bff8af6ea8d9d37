"""Launch of the kernels for Hopper, in the frame kernels/hopper_matmul.cuh; `hopper_tiles` chooses
their tiles.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from quantkit.kernels import driver, loader
from quantkit.kernels.contract import TYPES, Weight
from quantkit.kernels.driver import Function
from quantkit.kernels.hopper_tiles import (
    MAX_CLUSTER,
    HopperTile,
    HopperTiles,
    ceil,
    choose_tile,
    launch_sizes,
    representative,
)
from quantkit.kernels.portable import Instances, multiprocessors
from quantkit.kernels.tensormap import SIZE, tensor_map
from quantkit.kernels.workspace import workspace

#: Most tokens of one launch. With more, every row of tiles would read the activations from memory
#: again.
MAX_TOKENS = 2048
#: The number of the weight's tensor maps -> kinds of all arguments: maps, pointers, sizes (see
#: `driver`).
KINDS: dict[int, tuple[int | str, ...]] = {
    maps: (SIZE,) * (1 + maps) + ("Q",) * 5 + ("i4x",) * 3 for maps in (2, 3)
}


class Reads:
    """The tensors that launches have read, with their states then; it keeps no tensor alive.

    A launch may fetch weights while the work before it in the stream still runs, unless that work
    may write them.
    """

    def __init__(self) -> None:
        self.seen: dict[int, tuple[weakref.ref[Tensor], tuple[int, int]]] = {}  # by id

    def valid(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if launches have read these very tensors, and torch has written to none of
        them since.

        torch counts a write in place in the tensor's version. `.data = ` and `module.to` change the
        address instead. A write through `.data` itself is not seen (docs/kernels.md).
        """
        for tensor in tensors:  # in each launch, so without a call for each tensor
            before = self.seen.get(id(tensor))
            if (
                before is None
                or before[0]() is not tensor
                or before[1] != (tensor._version, tensor.data_ptr())
            ):
                return False
        return True

    def remember(self, tensors: Sequence[Tensor]) -> None:
        """Record that a launch has read these tensors. Inference tensors have no version, so they
        are left out.
        """
        for tensor in tensors:
            if not tensor.is_inference():
                state, forget = (
                    (tensor._version, tensor.data_ptr()),
                    functools.partial(self._forget, id(tensor)),
                )
                self.seen[id(tensor)] = weakref.ref(tensor, forget), state

    def _forget(self, key: int, dead: object) -> None:
        if (
            key in self.seen and self.seen[key][0] is dead
        ):  # else the id already belongs to another tensor
            del self.seen[key]


#: The reads of this process.
READS = Reads()


@dataclass(frozen=True, eq=False)
class HopperKernel(Instances):
    """The kernels of kernels/`source`.cu for one group size or format, which is the template
    argument `variant`.

    `tensor_maps(tile, words, scales, n, k, experts)` makes the descriptors of the packed tensors
    from addresses.
    """

    source: str
    variant: str
    choice: HopperTiles
    tensor_maps: Callable[[HopperTile, Sequence[int], int, int, int, int], list[bytes]]
    path: ClassVar[str] = "hopper"

    def instance(self, dtype: torch.dtype, tile: HopperTile) -> str:
        """Build the C++ name of the instance for activations of a dtype; all clusters above two
        share one.
        """
        sizes = f"{tile.tokens}, {tile.words}, {tile.warpgroups}, {tile.stages}"
        cluster = MAX_CLUSTER if tile.cluster > 2 else tile.cluster
        return (
            f"{self.source}<{TYPES[dtype]}, {sizes}, {self.variant}, {str(tile.shared).lower()}, "
            f"{cluster}>"
        )

    def launch(
        self,
        weight: Weight,
        x: Tensor,
        packed: Sequence[Tensor],
        bias: Tensor | None,
        out: Tensor,
        tile: HopperTile | None = None,
    ) -> None:
        """Write the product into `out`, for operands that are checked, `packed` in the order of
        `weight.tensors`.

        The launch may fetch weights during the preceding launch, if they were read before and not
        written since. Many tokens take several launches, unless a `tile` is given.
        """
        (m, k), n, device = x.shape, weight.n, x.device
        if m > MAX_TOKENS and tile is None:
            for start, end in token_parts(m):
                self.launch(weight, x[start:end], packed, bias, out[start:end])
            return
        plan = _planned(self, device, x.dtype, representative(m), n, k, tile)
        maps = plan.maps(tuple([tensor.data_ptr() for tensor in packed]))
        x_map = tensor_map(x.data_ptr(), (m, k), plan.box, 2, True)
        state = driver.stream_state(device)
        sums, counters = workspace(self.source, device, state, *plan.workspace)
        pointers = [tensor.data_ptr() for tensor in (packed[-1], out, sums, counters)]
        pointers.insert(1, 0 if bias is None else bias.data_ptr())
        arguments = driver.written_arguments(KINDS[len(maps)], (x_map, *maps, *pointers, m, n, k))
        read = packed if bias is None else [*packed, bias]
        early = READS.valid(read)
        function, grid, block, shared, cluster = plan.launch
        driver.launch(function, grid, block, arguments, shared, device, state, cluster, early)
        if not (early or state.graph):  # a captured launch has not read anything yet
            READS.remember(read)


@functools.lru_cache(maxsize=4096)
def token_parts(m: int) -> tuple[tuple[int, int], ...]:
    """Divide m tokens into as few launches as `MAX_TOKENS` allows, nearly equal and of whole tiles:
    first and end.
    """
    size = ceil(ceil(m, ceil(m, MAX_TOKENS)), 256) * 256
    return tuple((start, min(start + size, m)) for start in range(0, m, size))


class _Plan(NamedTuple):
    """The parts of a launch that do not depend on addresses.

    `launch` has function, grid, block, shared bytes and cluster. `maps` makes the weight's tensor
    maps from addresses. `box` is the box of the activations' map. `workspace` counts sums and
    counters.
    """

    launch: tuple[Function, tuple[int], tuple[int], int, int]
    maps: Callable[[tuple[int, ...]], list[bytes]]
    box: tuple[int, int]
    workspace: tuple[int, int]


@functools.lru_cache(maxsize=4096)
def _planned(
    kernel: HopperKernel,
    device: torch.device,
    dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    tile: HopperTile | None,
) -> _Plan:
    sms, _ = multiprocessors(device)
    tile = tile or choose_tile(kernel.choice, dtype, m, n, k, sms)
    instance, together = kernel.instance(dtype, tile), kernel.instances_by_dtype[dtype]
    listed = together if instance in together else (instance,)  # a benchmark may try other tiles
    function = loader.load(kernel.source, listed, device).functions[instance]
    blocks, threads, shared = launch_sizes(kernel.choice, tile, m, n, k, sms)
    launch = (function, (blocks,), (threads,), shared, tile.cluster)
    return _Plan(launch, weight_maps(kernel, tile, n, k, 1), (tile.tokens, 64), workspace_size(sms))


def workspace_size(sms: int) -> tuple[int, int]:
    """Count the float32 sums and int32 counters of a launch on `sms` multiprocessors."""
    return 2 * sms * 256 * 128, 4 * sms


@functools.cache
def weight_maps(
    kernel: HopperKernel, tile: HopperTile, n: int, k: int, experts: int
) -> Callable[[tuple[int, ...]], list[bytes]]:
    """Return a function from the addresses of packed tensors, scales last, to their tensor maps."""

    @functools.lru_cache(maxsize=1024)
    def maps(addresses: tuple[int, ...]) -> list[bytes]:
        *words, scales = addresses
        return kernel.tensor_maps(tile, words, scales, n, k, experts)

    return maps
