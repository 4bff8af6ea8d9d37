"""The tiles of the portable kernels, and the split of their work among blocks, without a GPU."""

from __future__ import annotations

import itertools

import pytest

from quantkit.kernels import SOURCES, marlin, marlin24, portable_tiles, quick, tcfpx
from quantkit.kernels.portable import PortableInstances
from quantkit.kernels.portable_tiles import PortableTile
from tests.kernels.products import TYPES

KERNELS = [
    *(marlin.PORTABLE, marlin24.PORTABLE, quick.PORTABLE, *tcfpx.PORTABLE.values()),
    *(marlin.ROUTED, marlin24.ROUTED, quick.ROUTED, *tcfpx.ROUTED.values()),
]
TILES = [(kernel, tile) for kernel in KERNELS for tile in kernel.choice.tiles]
SHAPES = [(64, 16), (64, 128), (320, 448), (4096, 4096), (57344, 8192), (18432, 73728)]
#: Shared memory of a block on sm_86 and sm_89, the smallest of all, and of a multiprocessor of sm_90, the largest.
SHARED, MULTIPROCESSOR = 99 * 1024, 228 * 1024


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.instances[0])
def test_every_tile_fits_into_every_gpu(kernel: PortableInstances) -> None:
    for tile in kernel.choice.tiles:
        assert tile.wn * tile.wm * tile.wk == portable_tiles.THREADS // 32
        used = kernel.choice.shared_bytes(tile) + (8 * tile.m if kernel.function else 0)  # and numbers of rows
        assert used <= SHARED, tile
        assert tile.blocks * (used + portable_tiles.RESERVED) <= MULTIPROCESSOR, tile
    assert len(set(kernel.instances)) == len(TYPES) * len(kernel.choice.tiles)


def test_every_instance_is_compiled() -> None:
    listed = [instance for name, instances in SOURCES.items() if name.endswith("_portable") for instance in instances]
    assert sorted(listed) == sorted(instance for kernel in KERNELS for instance in kernel.instances)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.instances[0])
def test_every_tile_is_the_cheapest_for_some_token_count(kernel: PortableInstances) -> None:
    for tile in kernel.choice.tiles:
        assert kernel.choice.choose(tile.m) == tile, "others do the same for less"
        assert kernel.choice.choose(1000 * tile.m).cost / kernel.choice.choose(1000 * tile.m).m <= tile.cost / tile.m
    assert kernel.choice.choose(1) == kernel.choice.tiles[0], "the least that holds one"


@pytest.mark.parametrize(("kernel", "tile"), TILES)
def test_blocks_have_each_unit_once_and_memory_for_their_parts(kernel: PortableInstances, tile: PortableTile) -> None:
    for m, (n, k), sms in itertools.product((1, 7, 64, 300, 1 << 14), SHAPES, (1, 46, 108, 132)):
        units = tile.units(m, n, k)
        per, blocks = portable_tiles.split(tile, m, n, k, sms * tile.blocks)
        assert per * (blocks - 1) < units <= per * blocks
        assert units + per < 2**32, "the kernel counts units in 32 bits"
        sums, counters = kernel.choice.workspace_size(sms)
        assert 2 * blocks * tile.m * tile.n <= sums and blocks <= counters


def test_kernels_of_a_function_have_the_same_workspace() -> None:
    names = [kernel.function or kernel.source for kernel in KERNELS]
    sizes = {(name, kernel.choice.workspace_size(132)) for name, kernel in zip(names, KERNELS, strict=True)}
    assert len(sizes) == len(set(names)), "it is kept by this name"


def test_parts_of_two_tiles_never_share_a_place() -> None:
    """In the source, block b has place 2b for the tile it starts in, and 2b + 1 for one that begins in it."""
    for depth, tiles, per in itertools.product(range(1, 8), range(1, 8), range(1, 17)):
        places, counters = [], []
        for first in range(0, depth * tiles, depth):
            start, last = first // per, (first + depth - 1) // per
            if start < last:
                counters.append(start)
                places += [2 * block + (first > block * per) for block in range(start, last + 1)]
        assert len(set(places)) == len(places) and len(set(counters)) == len(counters)
