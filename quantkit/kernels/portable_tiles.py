"""Tiles of the portable kernels: the cheapest for a number of tokens, and the split of a product among blocks.

A product is cut into tiles of outputs, and each tile along k into units. Every block takes the same number of
consecutive units, so all multiprocessors finish together, whatever the shape. `portable` launches the kernels. Not in
here: anything that needs a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

THREADS = 256
#: The number of a warp's fragments with sums in shared memory at the same time.
FRAGMENTS_AT_ONCE = 4
#: Bytes of shared memory that CUDA reserves in each block.
RESERVED = 1024


@dataclass(frozen=True)
class PortableTile:
    """The template arguments of an instance: eight warps, `wn` by `wm` by `wk` of them along n, m and k.

    A warp multiplies 64 rows of the weight by `fragments` of 8 tokens each, and 64 of k in each stage. `stages` are in
    shared memory at a time, and a multiprocessor has the registers for `blocks` blocks. `cost` is measured, in
    microseconds, with as many tokens as the tile holds.
    """

    fragments: int
    wn: int
    wm: int
    wk: int
    stages: int
    blocks: int
    cost: float

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

    def units(self, m: int, n: int, k: int) -> int:
        """Count the units of a product."""
        return -(-m // self.m) * -(-n // self.n) * -(-k // self.k)


@dataclass(frozen=True, eq=False)
class PortableTiles:
    """The tiles of a layout or format. A stage takes `bytes_per_weight` of shared memory, scales included."""

    tiles: tuple[PortableTile, ...]
    bytes_per_weight: float

    def shared_bytes(self, tile: PortableTile) -> int:
        """Compute the shared memory of a block: the stages, reused later for padded sums of some tokens."""
        stage = int(tile.n * tile.k * self.bytes_per_weight) + 2 * tile.m * tile.k
        tokens = tile.m * min(tile.fragments, FRAGMENTS_AT_ONCE) // tile.fragments
        return max(tile.stages * stage, 4 * tile.wk * tokens * (tile.n + 4))

    def choose(self, m: int) -> PortableTile:
        """Choose the tile that costs least for m tokens; units divide well for any n, k and device."""
        return min(self.tiles, key=lambda tile: -(-m // tile.m) * tile.cost)

    def workspace_size(self, sms: int) -> tuple[int, int]:
        """Count the float32 sums and int32 counters of a launch: per block parts of two tiles, and one counter."""
        sums = max(2 * sms * tile.blocks * tile.m * tile.n for tile in self.tiles)
        return sums, sms * max(tile.blocks for tile in self.tiles)


def split(tile: PortableTile, m: int, n: int, k: int, resident: int) -> tuple[int, int]:
    """Compute the units of each block, and the number of blocks, at most `resident`."""
    units = tile.units(m, n, k)
    per_block = -(-units // resident)
    return per_block, -(-units // per_block)
