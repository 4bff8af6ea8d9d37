"""Tiles of the kernels: tables of measured times, and models of a device by which the fastest tile
for a product is chosen.

A product is cut into tiles of rows of the weight by tokens, and each tile along k. All
multiprocessors should finish together for every shape. Not in here: anything that needs a GPU.
"""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch

from quantkit.core.threads import grouped
from quantkit.errors import KernelError

Tile = TypeVar("Tile")


def read_tiles(name: str, make: Callable[..., Tile]) -> dict[str, tuple[Tile, ...]]:
    """Read the tiles of each kernel from a table beside this file, whose columns are arguments of
    `make`.
    """
    with Path(__file__).with_name(name).open(newline="") as file:
        rows = [(row.pop("kernel"), row) for row in csv.DictReader(file)]
    found = grouped(
        (kernel, make(**{key: json.loads(value) for key, value in row.items()}))
        for kernel, row in rows
    )
    return {kernel: tuple(tiles) for kernel, tiles in found.items()}


def ceil(a: int, b: int) -> int:
    """Divide and round up."""
    return -(-a // b)


# Portable kernels. Every block takes the same number of whole tiles, then of consecutive units of
# the rest.

#: Threads of a block.
THREADS = 256
#: The number of a warp's fragments with sums in shared memory at the same time.
FRAGMENTS_AT_ONCE = 4
#: Bytes of shared memory that CUDA reserves in each block.
RESERVED = 1024
#: Fragments of all blocks of a multiprocessor whose sums leave no registers for the sums of a
#: group.
SCALED_WEIGHTS = 8


@dataclass(frozen=True)
class PortableTile:
    """The template arguments of an instance: eight warps, `wn` by `wm` by `wk` of them along n, m
    and k.

    A warp multiplies 64 rows of the weight by `fragments` of 8 tokens each, and 64 of k in each
    stage. `stages` are in shared memory at a time, and a multiprocessor has the registers for
    `blocks` blocks. Times in microseconds, fitted to measurements: of a unit with all blocks at
    work, of the rest of a launch, and of adding another block's sums.
    """

    fragments: int
    wn: int
    wm: int
    wk: int
    stages: int
    blocks: int
    unit_us: float
    end_us: float
    part_us: float

    @property
    def n(self) -> int:
        """Rows of the weight in a tile."""
        return 64 * self.wn

    @property
    def m(self) -> int:
        """Tokens per tile."""
        return 8 * self.fragments * self.wm

    @property
    def k(self) -> int:
        """Weights along k in a unit."""
        return 64 * self.wk

    @property
    def arguments(self) -> str:
        """The template arguments as text."""
        return f"{self.fragments}, {self.wn}, {self.wm}, {self.wk}, {self.stages}, {self.blocks}"

    @property
    def scales_weights(self) -> bool:
        """Whether scales of groups are multiplied into float16 weights, and not into
        float32 sums.
        """
        return self.fragments * self.blocks == SCALED_WEIGHTS

    @property
    def cost(self) -> float:
        """Predict the microseconds of as many tokens as the tile holds, with a weight of 28672 x
        4096 on an H100.
        """
        return self.estimate(self.m, 28672, 4096, 132)

    def units(self, m: int, n: int, k: int) -> int:
        """Count the units of a product."""
        return ceil(m, self.m) * ceil(n, self.n) * ceil(k, self.k)

    def estimate(self, m: int, n: int, k: int, sms: int) -> float:
        """Predict the microseconds of a product `[m, k] x [k, n]` on `sms` multiprocessors."""
        rounds, per_block, _ = split(self, m, n, k, sms * self.blocks)
        depth = ceil(k, self.k)
        return (
            (rounds * depth + per_block) * self.unit_us
            + self.end_us
            + depth / per_block * self.part_us
        )


#: Times are fitted to a sweep on an H100.
PORTABLE_TILES = read_tiles("portable_tiles.csv", PortableTile)


@dataclass(frozen=True, eq=False)
class PortableTiles:
    """The tiles of a layout or format. A stage takes `bytes_per_weight` of shared memory, scales
    included.

    `grouped`: scales change along k.
    """

    tiles: tuple[PortableTile, ...]
    bytes_per_weight: float
    grouped: bool = True

    def tiles_for(self, dtype: torch.dtype) -> tuple[PortableTile, ...]:
        """List the tiles that exist for activations of a dtype: bfloat16 would round scaled
        weights.
        """
        if dtype == torch.float16 or not self.grouped:
            return self.tiles
        return tuple(tile for tile in self.tiles if not tile.scales_weights)

    def of_experts(self) -> PortableTiles:
        """Select the cheapest tile for each number of rows, among the tiles for all dtypes."""
        falling = sorted(self.tiles_for(torch.bfloat16), key=lambda tile: tile.cost, reverse=True)
        by_rows = {tile.m: tile for tile in falling}
        return replace(self, tiles=tuple(by_rows[rows] for rows in sorted(by_rows)))

    def shared_bytes(self, tile: PortableTile) -> int:
        """Compute the shared memory of a block: of the stages, or if larger of the padded sums that
        reuse it.
        """
        stage = int(tile.n * tile.k * self.bytes_per_weight) + 2 * tile.m * tile.k
        tokens = tile.m * min(tile.fragments, FRAGMENTS_AT_ONCE) // tile.fragments
        return max(tile.stages * stage, 4 * tile.wk * tokens * (tile.n + 4))

    def choose(self, dtype: torch.dtype, m: int, n: int, k: int, sms: int) -> PortableTile:
        """Choose the tile with the least estimate for a product `[m, k] x [k, n]`; of equals the
        first.
        """
        return min(self.tiles_for(dtype), key=lambda tile: tile.estimate(m, n, k, sms))

    def workspace_size(self, sms: int) -> tuple[int, int]:
        """Count the float32 sums and int32 counters of a launch: for each block, parts of two tiles
        and a counter.
        """
        sums = max(2 * sms * tile.blocks * tile.m * tile.n for tile in self.tiles)
        return sums, sms * max(tile.blocks for tile in self.tiles)


def split(tile: PortableTile, m: int, n: int, k: int, resident: int) -> tuple[int, int, int]:
    """Compute the whole tiles of each block, its units of the others, and the number of blocks, at
    most `resident`.

    The remaining units are one to two tiles for each block, if any tile is whole, so few blocks
    share a tile.
    """
    depth = ceil(k, tile.k)
    tiles = tile.units(m, n, k) // depth
    rounds = max(tiles // resident - 1, 0)
    units = (tiles - rounds * resident) * depth
    per_block = ceil(units, resident)
    return rounds, per_block, resident if rounds else ceil(units, per_block)


# Hopper kernels. Without clusters, every block takes whole tiles in rounds, and all share the steps
# along k of the remaining tiles. With clusters, each tile belongs to one of two to eight blocks.

#: As in the source: BK, threads of a warpgroup, blocks of the largest cluster.
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
#: Clusters of three to eight blocks can use this share of the resident blocks: each must fit one
#: part of the device (benchmarks/gpu/resident_clusters.csv).
CLUSTERED = 0.84


@dataclass(frozen=True)
class HopperTile:
    """The template arguments of an instance, and its measured times.

    A warpgroup has `words` products side by side, of 64 columns each. The `warpgroups` take stages
    in turn or, if `shared`, all of them take every stage. `cluster` is the number of blocks that
    share a tile, 0 without clusters. In lists of tiles MAX_CLUSTER stands for as many as fit.
    `step_us` is the time of a step along k, and `end_us` of all that follows the last one.
    `split_us` is added for a tile that several blocks share without a cluster.
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
    def resident(self) -> int:
        """Blocks that run on a multiprocessor at the same time."""
        return 2 if self.warpgroups == 1 else 1


#: Times are fitted to the sweeps benchmarks/gpu/*_tiles.csv.
HOPPER_TILES = read_tiles("hopper_tiles.csv", HopperTile)


def rare_tiles(tiles: Iterable[HopperTile]) -> tuple[HopperTile, ...]:
    """Select one plain tile per token count: enough for rarely used formats and group sizes, and
    quick to compile.
    """
    return tuple(tile for tile in tiles if tile.words == 2 and not tile.cluster and not tile.shared)


@dataclass(frozen=True, eq=False)
class HopperTiles:
    """The tiles of one group size or format, and the inputs of the choice of a tile.

    A stage takes `stage_bytes_per_weight` of shared memory for each weight, rounded up to
    `stage_alignment`. The estimate assumes that `read_bytes_per_weight` come from memory. Tiles of
    `several_tokens` or more are also tried where m tokens need several of them. `scaled_by_group`:
    scales change along k. `sparse`: two of each four weights along k are stored. No tile may then
    reach beyond the weight, because zeros are not valid metadata.
    """

    tiles: tuple[HopperTile, ...]
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

        Where warpgroups share a stage, float16 scales are multiplied into the weights. bfloat16
        would round the product, so there a thread needs registers for the sums of a group.
        """
        if dtype == torch.float16 or not self.scaled_by_group:
            return self.tiles
        return tuple(
            tile for tile in self.tiles if not tile.shared or tile.words * tile.tokens <= 128
        )

    def shared_bytes(self, tile: HopperTile) -> int:
        """Compute the shared memory of a block, as `Frame` in kernels/hopper_matmul.cuh lays it
        out.
        """
        sums = tile.words * tile.tokens // 2
        handed_over = (
            0 if tile.shared else (tile.warpgroups - 1) * WARPGROUP * tile.words * tile.tokens * 2
        )
        out = 4 * tile.owners * (16 if tile.words == 1 and tile.tokens > 8 else 8) * tile.words * 32
        unit = 2 * tile.words if self.sparse else 4 if sums >= 32 else 2
        places = max(MAX_CLUSTER if tile.cluster > 2 else 2, 2 * sums // unit)
        few_sums = (
            tile.cluster > 0 and sums * tile.owners <= 32
        )  # neighbours' sums have memory beside the stages
        neighbours = 512 * tile.owners * unit * places if few_sums else 0
        weights = int(tile.columns * K_STEP * self.stage_bytes_per_weight)
        weights = ceil(weights, self.stage_alignment) * self.stage_alignment
        stages = tile.stages * (tile.tokens * 2 * K_STEP + weights + 16)
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
        """List the tiles that a product `[m, k] x [k, n]` may be launched on, with their clusters
        in a size that fits.

        These are the smallest tiles that hold all m tokens, and tiles of `several_tokens` or more
        that m fills.
        """
        tiles = self.tiles_for(dtype)
        least = min(
            (tile.tokens for tile in tiles if tile.tokens >= m),
            default=max(tile.tokens for tile in tiles),
        )
        some = [
            tile for tile in tiles if tile.tokens == least or self.several_tokens <= tile.tokens < m
        ]
        return fit_clusters(
            [tile for tile in some if not self.sparse or n % tile.columns == 0], m, n, k, sms
        )


@functools.lru_cache(maxsize=4096)
def choose_tile(
    choice: HopperTiles, dtype: torch.dtype, m: int, n: int, k: int, sms: int
) -> HopperTile:
    """Choose the candidate with the least estimate for a product `[m, k] x [k, n]`; of equals the
    first.
    """
    return min(
        choice.candidates(dtype, m, n, k, sms), key=lambda tile: choice.estimate(tile, m, n, k, sms)
    )


@functools.lru_cache(maxsize=4096)
def representative(m: int) -> int:
    """Return a number of tokens with the tile and the grid of m tokens, one for each 64 past the
    largest tile.

    There only the number of tiles counts, and the candidates have 64 tokens or more.
    """
    return m if m <= 256 else ceil(m, 64) * 64


def launch_sizes(
    choice: HopperTiles, tile: HopperTile, m: int, n: int, k: int, sms: int
) -> tuple[int, int, int]:
    """Compute the number of blocks, and the threads and the bytes of shared memory of each.

    KernelError if a block of a cluster has no step along k: it would end while its neighbours still
    write to it.
    """
    if tile.cluster > ceil(k, K_STEP):
        raise KernelError(
            f"a cluster of {tile.cluster} blocks has no {K_STEP} of k for each where k = {k}",
            "use a tile of `fit_clusters`",
        )
    return (
        grid_size(tile, m, n, k, sms),
        WARPGROUP * (tile.warpgroups + 1),
        choice.shared_bytes(tile),
    )


def fit_clusters(tiles: Iterable[HopperTile], m: int, n: int, k: int, sms: int) -> list[HopperTile]:
    """Select the tiles that a product may use, and replace MAX_CLUSTER by the largest size that
    fits.

    Each block of a cluster needs a step along k. Large clusters must all be resident at once. A
    second wave of clusters about doubles the time.
    """
    found, steps = [], ceil(k, K_STEP)
    for tile in tiles:
        if tile.cluster == MAX_CLUSTER:
            blocks_per_tile = (
                CLUSTERED * sms * tile.resident / (ceil(m, tile.tokens) * ceil(n, tile.columns))
            )
            tile = replace(tile, cluster=min(MAX_CLUSTER, steps, int(blocks_per_tile)))
            if tile.cluster < 3:
                continue
        if tile.cluster <= steps:
            found.append(tile)
    return found


def grid_size(tile: HopperTile, m: int, n: int, k: int, sms: int) -> int:
    """Compute the number of blocks: clusters, or as many blocks as there are tiles or resident
    blocks.

    Fewer tiles than resident blocks are split among all of these, unless a share would take as long
    as a tile.
    """
    tiles = ceil(m, tile.tokens) * ceil(n, tile.columns)
    if tile.cluster:
        return tiles * tile.cluster
    most = min(sms * tile.resident, tiles * ceil(k, K_STEP))
    return (
        most
        if tiles >= most
        else min(tiles, most, key=lambda grid: _time_in_rounds(tile, tiles, k, grid))
    )


def _time_in_rounds(tile: HopperTile, tiles: int, k: int, grid: int) -> float:
    """Predict the microseconds of rounds of whole tiles, then of even shares of the remaining
    steps.
    """
    steps = ceil(k, K_STEP)
    rounds, left = divmod(tiles, grid)
    share = ceil(left * steps, grid) * tile.step_us + tile.end_us + tile.split_us if left else 0.0
    return rounds * (steps * tile.step_us + tile.end_us) + share
