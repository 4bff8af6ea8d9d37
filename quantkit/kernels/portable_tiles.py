"""Tiles of the portable kernels: the cheapest for a number of tokens, and the split of a product
among blocks.

A product is cut into tiles of outputs, and each tile along k into units. Every block takes the same
number of whole tiles, then of consecutive units of the rest. So all multiprocessors finish together
for every shape. `portable` launches the kernels. Not in here: anything that needs a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

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
        return -(-m // self.m) * -(-n // self.n) * -(-k // self.k)

    def estimate(self, m: int, n: int, k: int, sms: int) -> float:
        """Predict the microseconds of a product `[m, k] x [k, n]` on `sms` multiprocessors."""
        rounds, per_block, _ = split(self, m, n, k, sms * self.blocks)
        depth = -(-k // self.k)
        return (
            (rounds * depth + per_block) * self.unit_us
            + self.end_us
            + depth / per_block * self.part_us
        )


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
        by_rows: dict[int, PortableTile] = {}
        for tile in sorted(
            self.tiles_for(torch.bfloat16), key=lambda tile: tile.cost, reverse=True
        ):
            by_rows[tile.m] = tile
        return replace(self, tiles=tuple(by_rows[rows] for rows in sorted(by_rows)))

    def shared_bytes(self, tile: PortableTile) -> int:
        """Compute the shared memory of a block: the stages, reused later for padded sums of some
        tokens.
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
        """Count the float32 sums and int32 counters of a launch: per block parts of two tiles, and
        one counter.
        """
        sums = max(2 * sms * tile.blocks * tile.m * tile.n for tile in self.tiles)
        return sums, sms * max(tile.blocks for tile in self.tiles)


def split(tile: PortableTile, m: int, n: int, k: int, resident: int) -> tuple[int, int, int]:
    """Compute the whole tiles of each block, its units of the others, and the number of blocks, at
    most `resident`.

    The remaining units are one to two tiles for each block, if any tile is whole, so few blocks
    share a tile.
    """
    depth = -(-k // tile.k)
    tiles = tile.units(m, n, k) // depth
    rounds = max(tiles // resident - 1, 0)
    units = (tiles - rounds * resident) * depth
    per_block = -(-units // resident)
    return rounds, per_block, resident if rounds else -(-units // per_block)
