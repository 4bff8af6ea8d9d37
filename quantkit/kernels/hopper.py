"""Launch of the kernels for Hopper: for one weight in the frame kernels/hopper_matmul.cuh, for
experts with many rows in the frame kernels/hopper_routed.cuh.
"""

from __future__ import annotations

import ctypes
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.errors import KernelError
from quantkit.kernels import driver, loader
from quantkit.kernels.contract import TYPES, Weight
from quantkit.kernels.portable import Instances, multiprocessors
from quantkit.kernels.routing import Routing, gather_rows
from quantkit.kernels.tiles import (
    K_STEP,
    MAX_CLUSTER,
    WARPGROUP,
    HopperTile,
    HopperTiles,
    ceil,
    choose_tile,
    launch_sizes,
    representative,
)

#: Most tokens of one launch. With more, every row of tiles would read the activations from memory
#: again.
MAX_TOKENS = 2048
#: Rows of a tile of experts -> its cost beside `PortableTile.cost`, about the same in all layouts
#: (benchmarks/gpu/experts.csv). With fewer rows, products are bound by memory, and the portable
#: kernels do as well.
ROWS = {64: 36.0, 128: 48.0}
#: Bytes of an element -> CU_TENSOR_MAP_DATA_TYPE_FLOAT16 (all 2-byte types have the same zero),
#: ..._UINT64.
DATA_TYPES = {2: 6, 8: 4}
#: CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B.
PLAIN, SWIZZLED = 0, 3
#: Bytes of a tensor map, and its alignment.
MAP_BYTES, ALIGNMENT = 128, 64


@functools.lru_cache(maxsize=4096)
def tensor_map(
    pointer: int, shape: tuple[int, ...], box: tuple[int, ...], item: int, swizzled: bool = False
) -> bytes:
    """Encode the tensor map of a contiguous matrix of `shape`, `item` bytes for an element: the
    descriptor for copies of one `box` by Hopper's copy engine (TMA).

    `pointer` is its address on a GPU. Elements of a box outside the matrix arrive as zeros. The
    descriptor is passed to a kernel by value, and is valid as long as the matrix keeps its address.
    KernelError if the driver refuses it.
    """
    rank = len(shape)
    strides = [
        math.prod(shape[i:]) * item for i in range(rank - 1, 0, -1)
    ]  # the driver counts from the last dimension
    buffer = ctypes.create_string_buffer(MAP_BYTES + ALIGNMENT)
    address = (ctypes.addressof(buffer) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    failed = driver.library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(address),
        DATA_TYPES[item],
        rank,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # not interleaved
        SWIZZLED if swizzled else PLAIN,
        3,  # the L2 cache fetches 256 bytes
        0,  # zeros outside
    )
    if failed:
        raise KernelError(
            f"the driver makes no tensor map of {shape} in boxes of {box}: error {failed}"
        )
    return ctypes.string_at(address, MAP_BYTES)


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
        plan, maps, box = _planned(self, device, x.dtype, representative(m), n, k, tile)
        x_map = tensor_map(x.data_ptr(), (m, k), box, 2, True)
        weight_map = maps(tuple([tensor.data_ptr() for tensor in packed]))
        read = packed if bias is None else [*packed, bias]
        early = READS.valid(read)
        state = driver.submit(
            plan, device, (x_map, *weight_map), (packed[-1], bias, out), (), (m,), early
        )
        if not (early or state.graph):  # a captured launch has not read anything yet
            READS.remember(read)


@functools.lru_cache(maxsize=4096)
def token_parts(m: int) -> tuple[tuple[int, int], ...]:
    """Divide m tokens into as few launches as `MAX_TOKENS` allows, nearly equal and of whole tiles:
    first and end.
    """
    size = ceil(ceil(m, ceil(m, MAX_TOKENS)), 256) * 256
    return tuple((start, min(start + size, m)) for start in range(0, m, size))


@functools.lru_cache(maxsize=4096)
def _planned(
    kernel: HopperKernel,
    device: torch.device,
    dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    tile: HopperTile | None,
) -> tuple[driver.Plan, Callable[[tuple[int, ...]], list[bytes]], tuple[int, int]]:
    """Plan a launch; returns the makers of the weight's tensor maps and the box of that of the
    activations too.
    """
    sms, _ = multiprocessors(device)
    tile = tile or choose_tile(kernel.choice, dtype, m, n, k, sms)
    instance, together = kernel.instance(dtype, tile), kernel.instances_by_dtype[dtype]
    listed = together if instance in together else (instance,)  # a benchmark may try other tiles
    function = loader.load(kernel.source, listed, device)[instance]
    blocks, threads, shared = launch_sizes(kernel.choice, tile, m, n, k, sms)
    plan = driver.Plan(
        function,
        (blocks,),
        (threads,),
        shared,
        (kernel.source, *workspace_size(sms)),
        (n, k),
        tile.cluster,
    )
    return plan, weight_maps(kernel, tile, n, k, 1), (tile.tokens, 64)


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
        widening = sorted(kernel.choice.tiles, key=lambda tile: (tile.columns, -tile.cluster))
        tiles = {
            tile.tokens: replace(tile, cluster=0)
            for tile in widening
            if tile.shared and tile.tokens in ROWS
        }
        return cls(
            kernel.source,
            kernel.variant,
            replace(kernel.choice, tiles=tuple(tiles.values()), scaled_by_group=False),
            kernel.tensor_maps,
            stride,
            n_unit,
            halves=kernel.choice.scaled_by_group,
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
        gathered, powers = gather_rows(x, routing, choices, y, self.operands(x.dtype))
        plan, tile = _planned_routed(self, device, x.dtype, routing.tile, n, k)
        x_map = tensor_map(gathered.data_ptr(), tuple(gathered.shape), (tile.tokens, 64), 2, True)
        maps = weight_maps(self, tile, n, k, routing.experts)
        weight_map = maps(tuple([tensor.data_ptr() for tensor in packed]))
        driver.submit(
            plan,
            device,
            (x_map, *weight_map),
            before=(packed[-1], y),
            behind=(routing.list, weights, powers),
            sizes=(routing.max_tiles,),
        )


@functools.lru_cache(maxsize=4096)
def _planned_routed(
    kernel: RoutedHopper, device: torch.device, dtype: torch.dtype, rows: int, n: int, k: int
) -> tuple[driver.Plan, HopperTile]:
    sms, _ = multiprocessors(device)
    tile = next(tile for tile in kernel.choice.tiles if tile.tokens == rows)
    function = kernel.load(dtype, device)[kernel.instance(dtype, tile)]
    plan = driver.Plan(
        function,
        (sms * tile.resident,),
        (WARPGROUP * (tile.warpgroups + 1),),
        kernel.choice.shared_bytes(tile),
        (kernel.source, *workspace_size(sms)),
        (kernel.stride(n, k), n, k),
        early=True,
    )
    return plan, tile
