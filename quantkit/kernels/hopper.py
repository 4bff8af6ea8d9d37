"""Launch of the kernels for Hopper, in the frame kernels/hopper_matmul.cuh: their tiles, and how one is chosen.

A weight is cut into tiles of columns by tokens. Without clusters, every block takes whole tiles in rounds, and the
steps along k of the remaining tiles are split evenly among all blocks. With clusters, each tile belongs to one cluster
of two to eight blocks. `HopperKernel.estimate` predicts the time of each choice.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quantkit.errors import KernelError
from quantkit.kernels import loader
from quantkit.kernels.contract import ACTIVATIONS, TYPES, Weight, check, check_same_dtype
from quantkit.kernels.tensormap import tensor_map
from quantkit.kernels.workspace import workspace

#: As in the source: k in a stage, threads of a warpgroup, blocks of the largest cluster.
K_STEP, WARPGROUP, MAX_CLUSTER = 128, 128, 8

# The model of the device, fitted to the sweeps benchmarks/gpu/*_tiles.csv (an H200).
#: Microseconds of a launch.
LAUNCH_US = 1.5
#: TFLOP/s of all multiprocessors together.
SUSTAINED_TFLOPS = 700.0
#: Share of the shorter of two overlapping phases that still adds to the time.
NOT_HIDDEN = 0.1
#: Columns of a tile -> GB/s at which weights are read.
BANDWIDTH = {256: 4200.0, 128: 4100.0, 64: 3000.0}
#: Share of the resident blocks that clusters of three to eight can use, since each needs one part of the device
#: (benchmarks/gpu/resident_clusters.csv).
CLUSTERED = 0.84

#: id of a tensor that a launch has read -> the tensor, and its version and address then.
_READ: dict[int, tuple[weakref.ref[Tensor], tuple[int, int]]] = {}


@dataclass(frozen=True)
class HopperTile:
    """The template arguments of an instance, and its measured times.

    A warpgroup has `words` products side by side, of 64 columns each. The `warpgroups` take stages in turn or, if
    `shared`, all of them take every stage. `cluster` is the number of blocks that share a tile, 0 without clusters. In
    lists of tiles MAX_CLUSTER stands for as many as fit. `step_us` is the time of a step along k, and `end_us` of all
    that follows the last one. `split_us` is added for a tile that several blocks share without a cluster.
    """

    tokens: int
    words: int
    warpgroups: int
    stages: int
    shared: bool = False
    cluster: int = 0
    step_us: float = 0.0
    end_us: float = 0.0
    split_us: float = 0.0

    @property
    def columns(self) -> int:
        return 64 * self.words * (self.warpgroups if self.shared else 1)

    @property
    def owners(self) -> int:
        """Warpgroups that hold final sums."""
        return self.warpgroups if self.shared else 1

    @property
    def holds_group_sums(self) -> bool:
        """Whether threads have registers for the sums of one group beside the sums of all groups."""
        return self.words * self.tokens <= 128

    @property
    def resident(self) -> int:
        """Blocks that run on a multiprocessor at the same time."""
        return 2 if self.warpgroups == 1 else 1


def rare_tiles(tiles: Iterable[HopperTile]) -> tuple[HopperTile, ...]:
    """Select one plain tile per token count: enough for rarely used formats and group sizes, and quick to compile."""
    return tuple(tile for tile in tiles if tile.words == 2 and not tile.cluster and not tile.shared)


@dataclass(frozen=True, eq=False)
class HopperKernel:
    """The kernels of kernels/`source`.cu for one group size or format, which is the template argument `variant`.

    `tensor_maps(tile, words, scales, n, k)` makes the descriptors of the weight's tensors. A stage takes
    `stage_bytes_per_weight` of shared memory for each weight, rounded up to `stage_alignment`. The estimate assumes
    that `read_bytes_per_weight` come from memory. Tiles of `several_tokens` or more are also tried where m tokens need
    several of them. `scaled_by_group`: scales change along k. `sparse`: two of each four weights along k are stored,
    and no tile may reach beyond the weight, because zeros are not valid metadata.
    """

    source: str
    variant: str
    tiles: tuple[HopperTile, ...]
    tensor_maps: Callable[[HopperTile, Sequence[Tensor], Tensor, int, int], list[bytes]]
    stage_bytes_per_weight: float
    read_bytes_per_weight: float
    several_tokens: int
    stage_alignment: int = 1
    scaled_by_group: bool = False
    sparse: bool = False
    bandwidth: Mapping[int, float] = field(default_factory=lambda: BANDWIDTH)
    sustained_tflops: float = SUSTAINED_TFLOPS

    def tiles_for(self, dtype: torch.dtype) -> tuple[HopperTile, ...]:
        """List the tiles that exist for activations of a dtype.

        Where warpgroups share a stage, float16 scales are multiplied into the weights. bfloat16 would round the
        product, so there a thread needs registers for the sums of a group.
        """
        if dtype == torch.float16 or not self.scaled_by_group:
            return self.tiles
        return tuple(tile for tile in self.tiles if not tile.shared or tile.holds_group_sums)

    def instance(self, dtype: torch.dtype, tile: HopperTile) -> str:
        """Build the C++ name of the instance for activations of a dtype; all clusters above two share one."""
        sizes = f"{tile.tokens}, {tile.words}, {tile.warpgroups}, {tile.stages}"
        cluster = MAX_CLUSTER if tile.cluster > 2 else tile.cluster
        return f"{self.source}<{TYPES[dtype]}, {sizes}, {self.variant}, {str(tile.shared).lower()}, {cluster}>"

    @functools.cached_property
    def instances_by_dtype(self) -> dict[torch.dtype, tuple[str, ...]]:
        """dtype of the activations -> the instances of all tiles, which are compiled together."""
        return {dtype: tuple(self.instance(dtype, tile) for tile in self.tiles_for(dtype)) for dtype in ACTIVATIONS}

    @property
    def instances(self) -> tuple[str, ...]:
        return sum(self.instances_by_dtype.values(), ())

    def stage_bytes(self, tile: HopperTile) -> int:
        """Compute the shared memory of one stage of the weight: codes, scales and metadata."""
        needed = int(tile.columns * K_STEP * self.stage_bytes_per_weight)
        return ceil(needed, self.stage_alignment) * self.stage_alignment

    def shared_bytes(self, tile: HopperTile) -> int:
        """Compute the shared memory of a block, as `Frame` in kernels/hopper_matmul.cuh lays it out."""
        sums = tile.words * tile.tokens // 2
        handed_over = 0 if tile.shared else (tile.warpgroups - 1) * WARPGROUP * tile.words * tile.tokens * 2
        out = 4 * tile.owners * (16 if tile.words == 1 and tile.tokens > 8 else 8) * tile.words * 32
        unit = 2 * tile.words if self.sparse else 4 if sums >= 32 else 2
        places = max(MAX_CLUSTER if tile.cluster > 2 else 2, 2 * sums // unit)
        few_sums = tile.cluster > 0 and sums * tile.owners <= 32  # neighbours' sums have memory beside the stages
        neighbours = 512 * tile.owners * unit * places if few_sums else 0
        stages = tile.stages * (tile.tokens * 2 * K_STEP + self.stage_bytes(tile) + 16)
        return 1024 + stages + handed_over + out + neighbours + 16

    def estimate(self, tile: HopperTile, m: int, n: int, k: int, sms: int) -> float:
        """Predict the microseconds of a product `[m, k] x [k, n]` on `sms` multiprocessors."""
        tiles = ceil(m, tile.tokens) * ceil(n, tile.columns)
        if tile.cluster:
            rounds = ceil(tiles * tile.cluster, sms * tile.resident)
            steps = rounds * (ceil(ceil(k, K_STEP), tile.cluster) * tile.step_us + tile.end_us)
        else:
            steps = _time_in_rounds(tile, tiles, k, grid_size(tile, m, n, k, sms))
        read = n * k * self.read_bytes_per_weight / self.bandwidth[tile.columns] / 1e3
        multiply = 2 * tiles * tile.tokens * tile.columns * k / self.sustained_tflops / 1e6
        bound = max(read, multiply)
        return LAUNCH_US + max(steps, bound) + NOT_HIDDEN * min(steps, bound)

    def candidates(self, dtype: torch.dtype, m: int, n: int, k: int, sms: int) -> list[HopperTile]:
        """List the tiles that a product `[m, k] x [k, n]` may be launched on, with their clusters in a size that fits.

        These are the tiles of the fewest tokens that hold all m, and those of `several_tokens` or more that m fills.
        """
        tiles = self.tiles_for(dtype)
        least = min((tile.tokens for tile in tiles if tile.tokens >= m), default=max(tile.tokens for tile in tiles))
        some = [tile for tile in tiles if tile.tokens == least or self.several_tokens <= tile.tokens < m]
        return fit_clusters([tile for tile in some if not self.sparse or n % tile.columns == 0], m, n, k, sms)

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
        tile = tile or choose_tile(self, x.dtype, m, n, k, sms)
        *words, scales = packed = [tensors[suffix] for suffix in weight.tensors]
        maps = self.tensor_maps(tile, words, scales, n, k)
        sums, counters = workspace(self.source, x.device, 2 * sms * 256 * 128, 4 * sms)
        x_map = tensor_map(x, (m, k), (tile.tokens, 64), 2, swizzled=True)
        instance, together = self.instance(x.dtype, tile), self.instances_by_dtype[x.dtype]
        listed = together if instance in together else (instance,)  # a benchmark may try other tiles
        function = loader.load(self.source, listed, x.device).functions[instance]
        arguments = [x_map, *maps, scales, bias, out, sums, counters, m, n, k]
        read = packed if bias is None else [*packed, bias]
        grid, threads, shared = _launch_sizes(self, tile, m, n, k, sms)
        early = _was_read_before(read)
        state = loader.launch(function, grid, threads, arguments, shared, cluster=tile.cluster, early=early)
        if not state.graph:  # a captured launch has not read anything yet
            _remember(read)
        return out


@functools.lru_cache(maxsize=4096)
def choose_tile(kernel: HopperKernel, dtype: torch.dtype, m: int, n: int, k: int, sms: int) -> HopperTile:
    """Choose the candidate with the least estimate for a product `[m, k] x [k, n]`; of equals the first."""
    return min(kernel.candidates(dtype, m, n, k, sms), key=lambda tile: kernel.estimate(tile, m, n, k, sms))


def fit_clusters(tiles: Iterable[HopperTile], m: int, n: int, k: int, sms: int) -> list[HopperTile]:
    """Select the tiles that a product may use, and replace MAX_CLUSTER by the largest size that fits.

    Each block of a cluster needs a step along k. Large clusters must all be resident at once: others would wait for
    these to end, which about doubles the time.
    """
    found, steps = [], ceil(k, K_STEP)
    for tile in tiles:
        if tile.cluster == MAX_CLUSTER:
            blocks_per_tile = CLUSTERED * sms * tile.resident / (ceil(m, tile.tokens) * ceil(n, tile.columns))
            tile = replace(tile, cluster=min(MAX_CLUSTER, steps, int(blocks_per_tile)))
            if tile.cluster < 3:
                continue
        if tile.cluster <= steps:
            found.append(tile)
    return found


def grid_size(tile: HopperTile, m: int, n: int, k: int, sms: int) -> int:
    """Compute the number of blocks: clusters, or as many blocks as there are tiles or resident blocks.

    Fewer tiles than resident blocks are split among all of these, unless a share would take as long as a tile.
    """
    tiles = ceil(m, tile.tokens) * ceil(n, tile.columns)
    if tile.cluster:
        return tiles * tile.cluster
    most = min(sms * tile.resident, tiles * ceil(k, K_STEP))
    return most if tiles >= most else min(tiles, most, key=lambda grid: _time_in_rounds(tile, tiles, k, grid))


def ceil(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _time_in_rounds(tile: HopperTile, tiles: int, k: int, grid: int) -> float:
    """Predict the microseconds of rounds of whole tiles, then of even shares of the remaining steps."""
    steps = ceil(k, K_STEP)
    rounds, left = divmod(tiles, grid)
    share = ceil(left * steps, grid) * tile.step_us + tile.end_us + tile.split_us if left else 0.0
    return rounds * (steps * tile.step_us + tile.end_us) + share


@functools.lru_cache(maxsize=4096)
def _launch_sizes(
    kernel: HopperKernel, tile: HopperTile, m: int, n: int, k: int, sms: int
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Compute the grid, the threads of a block, and its bytes of shared memory.

    KernelError if a block of a cluster has no step along k: it would end while its neighbours still write to it.
    """
    if tile.cluster > ceil(k, K_STEP):
        raise KernelError(
            f"a cluster of {tile.cluster} blocks has no {K_STEP} of k for each where k = {k}",
            "use a tile of `fit_clusters`",
        )
    return (grid_size(tile, m, n, k, sms),), (WARPGROUP * (tile.warpgroups + 1),), kernel.shared_bytes(tile)


def _was_read_before(tensors: Sequence[Tensor]) -> bool:
    """Return True if a launch has read these very tensors, and torch has written to none of them since.

    torch counts a write in place in the tensor's version. `.data = ` and `module.to` change the address instead. A
    write through `.data` itself is not seen (docs/kernels.md).
    """
    for tensor in tensors:
        before = _READ.get(id(tensor))
        if before is None or before[0]() is not tensor or before[1] != _state(tensor):
            return False
    return True


def _remember(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        before, state = _READ.get(id(tensor)), _state(tensor)
        if state is not None and (before is None or before[0]() is not tensor or before[1] != state):
            _READ[id(tensor)] = weakref.ref(tensor, functools.partial(_forget, id(tensor))), state


def _state(tensor: Tensor) -> tuple[int, int] | None:
    """Read the version and address, one of which changes with every write; None for inference tensors without one."""
    return None if tensor.is_inference() else (tensor._version, tensor.data_ptr())


def _forget(key: int, dead: object) -> None:
    if key in _READ and _READ[key][0] is dead:  # else the id already belongs to another tensor
        del _READ[key]
