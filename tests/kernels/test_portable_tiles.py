"""The tiles of the portable kernels, and the split of their work among blocks, without a GPU."""

from __future__ import annotations

import csv
import itertools
from collections import defaultdict

import pytest
import torch

from quantkit.kernels import SOURCES, grouped, marlin, marlin24, portable_tiles, quick, tcfpx
from quantkit.kernels.portable import PortableInstances
from quantkit.kernels.portable_tiles import PortableTile
from tests.kernels.products import TYPES
from tests.kernels.sweeps import FOLDER

KERNELS = [
    *(marlin.PORTABLE, marlin24.PORTABLE, quick.PORTABLE, *tcfpx.PORTABLE.values()),
    *(marlin.ROUTED, marlin24.ROUTED, quick.ROUTED, *tcfpx.ROUTED.values()),
]
TILES = [(kernel, tile) for kernel in KERNELS for tile in kernel.choice.tiles]
LAYERS = [(4096, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (57344, 8192), (8192, 28672), (6144, 4096)]
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
    assert len(set(kernel.instances)) == sum(len(kernel.choice.tiles_for(dtype)) for dtype in TYPES)


def test_every_instance_is_compiled() -> None:
    listed = [instance for name, instances in SOURCES.items() if name.endswith("_portable") for instance in instances]
    assert sorted(listed) == sorted(instance for kernel in KERNELS for instance in kernel.instances)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.instances[0])
def test_every_tile_is_chosen_for_some_product(kernel: PortableInstances) -> None:
    """A tile that is never chosen is compiled for nothing; and a token never gets a tile of many."""
    choice = kernel.choice
    if kernel.function:
        chosen = {grouped.choose(choice.tiles, mean / 8) for mean in range(1, 4096)}
    else:
        tokens = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
        sizes = itertools.product(TYPES, tokens, LAYERS, (108, 132))
        chosen = {choice.choose(dtype, m, n, k, sms) for dtype, m, (n, k), sms in sizes}
        assert all(choice.choose(torch.float16, 1, n, k, 132).m <= 32 for n, k in LAYERS)
    assert chosen == set(choice.tiles)


@pytest.mark.parametrize(("kernel", "tile"), TILES)
def test_blocks_have_each_unit_once_and_memory_for_their_parts(kernel: PortableInstances, tile: PortableTile) -> None:
    for m, (n, k), sms in itertools.product((1, 7, 64, 300, 1 << 14), SHAPES, (1, 46, 108, 132)):
        resident, depth = sms * tile.blocks, -(-k // tile.k)
        rounds, per, blocks = portable_tiles.split(tile, m, n, k, resident)
        shared = tile.units(m, n, k) - rounds * blocks * depth
        assert 0 < shared <= per * blocks and blocks <= resident and (blocks == resident or not rounds)
        assert rounds or per * (blocks - 1) < shared, "no block is idle"
        assert not rounds or per >= depth, "few blocks share a tile"
        assert tile.units(m, n, k) + per < 2**32, "the kernel counts units in 32 bits"
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


@pytest.mark.parametrize("kernel", KERNELS[:4], ids=lambda kernel: kernel.instances[0])
def test_the_choice_is_near_the_best_of_the_sweep(kernel: PortableInstances) -> None:
    """The sweep has the time of most tiles on an H100, for some shapes and token counts."""
    times: dict[tuple[int, ...], dict[str, float]] = defaultdict(dict)
    with (FOLDER / "portable_tiles.csv").open() as file:
        for layout, scheme, n, k, m, *sizes, us in list(csv.reader(file))[1:]:
            if f"{layout}_portable" == kernel.source and scheme != "fp5:channel":
                times[int(m), int(n), int(k)][", ".join(sizes)] = float(us)
    behind = []
    for (m, n, k), found in times.items():
        chosen = kernel.choice.choose(torch.float16, m, n, k, 132).arguments
        behind += [found[chosen] / min(found.values())] if chosen in found else []
    assert len(behind) > 25 and max(behind) < 1.15 and sum(behind) / len(behind) < 1.02
