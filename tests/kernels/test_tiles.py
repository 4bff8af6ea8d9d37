"""The tiles of kernels without a GPU: each fits, blocks do each step once, and the choice is near the best."""

from __future__ import annotations

import csv
import ctypes
import itertools
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import KernelError
from quantkit.kernels import LAUNCHERS, tiles
from quantkit.kernels.hopper import MAX_TOKENS, token_parts
from quantkit.kernels.portable import PortableKernel
from quantkit.kernels.tiles import K_STEP, MAX_CLUSTER, HopperTile, ceil, choose_tile
from tests.kernels import sources, sweeps
from tests.kernels.fake_driver import FakeDriver
from tests.kernels.hopper_cases import ALL, CASES
from tests.kernels.on_cpu import library
from tests.kernels.operands import packed, weight
from tests.kernels.products import TYPES
from tests.kernels.sources import instances_of
from tests.kernels.sweeps import FOLDER, H200

# Tiles of the kernels for Hopper.

LAYERS = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (57344, 8192), (73728, 18432)]
#: layout -> shapes that do not fill their tiles.
SMALL = {
    "marlin": [(64, 16), (64, 128), (320, 448)],
    "marlin24": [(128, 128), (384, 256)],
    "quick": [(128, 32), (128, 128), (384, 448)],
    "tcfpx": [(64, 64), (64, 128), (320, 448)],
}


#: Lists the work of each block in order: rows [block, tile, begin, end, does it end the tile, does it begin it, the
#: block that ends it, the block that begins it]. The last two are only computed for shared tiles.
WALK = """
#include "schedule.cuh"
extern "C" int walk(int tiles, int k_steps, int blocks, int *rows) {
    const int rounds = tiles / blocks, units = tiles % blocks * k_steps;
    const Deal deal = {units / blocks, units % blocks};
    int count = 0;
    for (int b = 0; b < blocks; b++)
        for (Walk w(deal.first(b), deal.first(b + 1), k_steps, b, blocks, rounds); w.has_work(); w.next(), count++) {
            const int at = (w.tile - rounds * blocks) * k_steps, whole = at < 0;
            const int to = whole ? b : deal.owner(at + k_steps - 1), from = whole ? b : deal.owner(at);
            const int row[] = {b, w.tile, w.begin, w.end, w.ends_tile(), w.begins_tile(), to, from};
            for (int i : row) *rows++ = i;
        }
    return count;
}
extern "C" void squares(int m_tiles, int n_tiles, int *places) {
    for (int tile = 0; tile < m_tiles * n_tiles; tile++, places += 2)
        Squares{m_tiles, n_tiles}.find(tile, places[0], places[1]);
}
"""


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 40), st.integers(1, 70), st.integers(1, 300))
def test_blocks_do_each_step_once_and_never_wait_in_a_circle(walk: Any, tiles: int, k_steps: int, blocks: int) -> None:
    """A launch of experts has as many blocks as are resident, even if there are fewer steps, or none."""
    rows = (ctypes.c_int * (8 * (tiles + 2 * blocks)))()
    count = walk.walk(tiles, k_steps, blocks, rows)
    work = [rows[8 * i : 8 * i + 8] for i in range(count)]
    done = sorted((tile, step) for _, tile, begin, end, *_ in work for step in range(begin, end))
    assert done == [(tile, step) for tile in range(tiles) for step in range(k_steps)]
    leaves = [(block, tile) for block, tile, _, _, ends, *_ in work if not ends]
    for block, tile, begin, end, ends, begins, to, source in work:
        assert 0 <= begin < end <= k_steps
        assert (to == block) == bool(ends) and (source == block) == bool(begins)
        if not ends:  # leaves its sums: before all else that it does, so that it has waited for nobody
            assert next(row for row in work if row[0] == block)[1] == tile
        elif not begins:  # waits for the blocks from `source` on, each of which leaves sums of this tile
            assert all((other, tile) in leaves for other in range(source, block))
    assert len({block for block, _ in leaves}) == len(leaves), "a block has one place to leave sums in"
    shares = [sum(end - begin for other, _, begin, end, *_ in work if other == block) for block in range(blocks)]
    assert max(shares) - min(shares) <= 1, "some blocks have more to do than others"


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(1, 40))
def test_every_tile_of_experts_is_taken_once_and_neighbours_share_weights(
    walk: Any, m_tiles: int, n_tiles: int
) -> None:
    places = (ctypes.c_int * (2 * m_tiles * n_tiles))()
    walk.squares(m_tiles, n_tiles, places)
    found = list(zip(places[::2], places[1::2], strict=True))
    assert sorted(found) == list(itertools.product(range(m_tiles), range(n_tiles)))
    for first in range(0, len(found), 8 * n_tiles):  # a square's activations stay in the cache
        assert len({m for m, _ in found[first : first + 8 * n_tiles]}) <= 8


@pytest.fixture(scope="module")
def walk() -> Any:
    return library(WALK)


@pytest.mark.parametrize(("layout", "label"), ALL)
def test_every_tile_fits_a_multiprocessor(layout: str, label: str) -> None:
    kernel = CASES[layout].kernel(label)
    for dtype in TYPES:
        found = CASES[layout].tiles(label, 4096, 4096, dtype)
        assert {tile.tokens for tile in found} >= {8, 32, 64}
        for tile in found:
            assert tile.resident * (kernel.choice.shared_bytes(tile) + 1024) <= 228 * 1024, tile
            assert tile.shared or tile.stages % tile.warpgroups == 0
            assert tile.columns in kernel.choice.bandwidth
    assert len(set(instances_of(kernel))) == len(instances_of(kernel))


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(list(CASES)),
    st.integers(1, 2048),
    st.integers(1, 600),
    st.integers(1, 600),
    st.sampled_from([16, 78, 114, 132, 144]),
)
def test_no_cluster_has_an_idle_block_or_waits_for_another_cluster(
    layout: str, m: int, wide: int, deep: int, sms: int
) -> None:
    """A block without a step of its own would miss the cluster's barrier; blocks that are not resident run later."""
    case, n, k = CASES[layout], 128 * wide, 32 * deep
    found = case.kernel(case.labels[0]).choice.candidates(torch.float16, m, n, k, sms)
    assert any(tile.cluster == 0 for tile in found), "no tile can be launched"
    for tile in found:
        assert tile.cluster in (0, *range(2, MAX_CLUSTER + 1)) and tile.cluster <= ceil(k, K_STEP), tile
        if tile.cluster > 2:
            assert tiles.grid_size(tile, m, n, k, sms) <= tiles.CLUSTERED * sms * tile.resident, tile


def test_a_cluster_with_an_idle_block_is_not_launched() -> None:
    kernel = CASES["tcfpx"].kernel("fp6:channel")
    tile = next(tile for tile in kernel.choice.tiles if tile.cluster == MAX_CLUSTER)
    with pytest.raises(KernelError, match=r"cluster of 8 .* k = 320"):
        tiles.launch_sizes(kernel.choice, tile, 1, 320, 320, 132)


def chosen(layout: str, label: str, dtype: torch.dtype, m: int, n: int, k: int) -> HopperTile:
    return choose_tile(CASES[layout].kernel(label).choice, dtype, m, n, k, H200)


@pytest.mark.parametrize(("layout", "label"), ALL)
def test_the_chosen_tile_exists_and_its_grid_covers_the_product(layout: str, label: str) -> None:
    kernel = CASES[layout].kernel(label)
    for (n, k), m, dtype in itertools.product([*LAYERS, *SMALL[layout]], (1, 7, 8, 9, 64, 300, 4096), TYPES):
        tile = chosen(layout, label, dtype, m, n, k)
        assert kernel.instance(dtype, tile) in kernel.instances_by_dtype[dtype], "it would be compiled in a capture"
        grid = tiles.grid_size(tile, m, n, k, H200)
        whole = ceil(m, tile.tokens) * ceil(n, tile.columns)
        assert grid == whole * tile.cluster if tile.cluster else 1 <= grid <= max(whole, H200 * tile.resident)
        assert tile.cluster <= ceil(k, K_STEP), "a block of a cluster without a step would miss the barrier"
        assert n % tile.columns == 0 or not kernel.choice.sparse, "zeros beyond a weight are not valid metadata"


@pytest.mark.parametrize(("layout", "label"), ALL)
def test_many_tokens_have_the_tile_and_the_grid_of_their_representative(layout: str, label: str) -> None:
    choice = CASES[layout].kernel(label).choice
    for (n, k), dtype in itertools.product([LAYERS[1], LAYERS[2], *SMALL[layout]], TYPES):
        for m in (257, 300, 320, 321, 383, 1000, 4097, 65535):
            other = tiles.representative(m)
            tile = chosen(layout, label, dtype, m, n, k)
            assert chosen(layout, label, dtype, other, n, k) == tile
            sizes = [tiles.launch_sizes(choice, tile, tokens, n, k, H200) for tokens in (m, other)]
            assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("layout", "label"),
    [
        ("marlin", "int4:g128"),
        ("marlin24", "int4:g128:24"),
        ("quick", "int4:g128:asym"),
        *(("tcfpx", label) for label in ("fp6:channel", "fp5:channel")),
    ],
)
def test_the_choice_is_near_the_best_of_the_sweep(layout: str, label: str) -> None:
    """The sweep has the time of every tile on an H200, for each shape and token count; none chosen may be slow."""
    behind = sweeps.behind(layout, label, lambda m, n, k: chosen(layout, label, torch.float16, m, n, k))
    assert len(behind) == 9 * 8
    assert max(behind.values()) < 1.05 and sum(behind.values()) / len(behind) < 1.01, behind


@pytest.mark.parametrize(
    ("layout", "label", "n", "k", "fits"),
    [
        ("marlin24", "int4:channel:24", 256, 128, True),
        ("marlin24", "int4:channel:24", 256, 160, False),
        ("marlin24", "int4:channel:24", 192, 128, False),
        ("quick", "int4:g128:asym", 256, 768, True),
        ("quick", "int4:g32", 256, 768, True),
        ("quick", "int4:g256:asym", 256, 768, False),
        ("quick", "int4:g96", 256, 768, False),
    ],
)
def test_weights_that_fill_no_tile_or_stage_go_to_the_portable_kernel(
    layout: str, label: str, n: int, k: int, fits: bool
) -> None:
    assert (LAUNCHERS[layout].kernels(Scheme.parse(label), n, k).hopper is not None) is fits


@pytest.mark.parametrize("m", [2049, 4096, 4097, 65_536, 100_001])
def test_many_tokens_are_divided_into_launches_of_nearly_equal_size(m: int, fake_gpu: FakeDriver) -> None:
    found = token_parts(m)
    sizes = [end - start for start, end in found]
    assert [start for start, _ in found] == [0, *(end for _, end in found[:-1])] and found[-1][1] == m
    assert max(sizes) <= MAX_TOKENS and len(found) <= -(-m // MAX_TOKENS)
    assert min(sizes) > max(sizes) // 4, "a small rest would cost as much as a part"
    assert all(size % 256 == 0 for size in sizes[:-1])
    q, out = weight("int4:g128", 64, 128), torch.empty(m, 64).half()
    kernel, described = CASES["marlin"].kernel("int4:g128"), LAUNCHERS["marlin"].weight(q.scheme, 64, 128)
    kernel.launch(described, torch.zeros(m, 128).half(), [*packed("marlin", q).values()], None, out)
    assert len(fake_gpu.grids) == len(found) and fake_gpu.argument(5) == out[found[-1][0]].data_ptr()


# Tiles of portable kernels.

EVERY = [kernel for kernel in sources.KERNELS if isinstance(kernel, PortableKernel)]
KERNELS = sorted(EVERY, key=lambda kernel: kernel.function is not None)  # those of experts last
SHAPES = [(64, 16), (64, 128), (320, 448), (4096, 4096), (57344, 8192), (18432, 73728)]
#: Shared memory of a block on sm_86 and sm_89, the smallest of all, and of a multiprocessor of sm_90, the largest.
SHARED, MULTIPROCESSOR = 99 * 1024, 228 * 1024


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: instances_of(kernel)[0])
def test_every_tile_fits_into_every_gpu(kernel: PortableKernel) -> None:
    for tile in kernel.choice.tiles:
        assert tile.wn * tile.wm * tile.wk == tiles.THREADS // 32
        used = kernel.choice.shared_bytes(tile) + (8 * tile.m if kernel.function else 0)  # and numbers of rows
        assert used <= SHARED, tile
        assert tile.blocks * (used + tiles.RESERVED) <= MULTIPROCESSOR, tile
    assert len(set(instances_of(kernel))) == sum(len(kernel.choice.tiles_for(dtype)) for dtype in TYPES)


def test_every_instance_is_compiled() -> None:
    all_sources = sources.SOURCES.items()
    listed = [instance for name, instances in all_sources if name.endswith("_portable") for instance in instances]
    assert sorted(listed) == sorted(instance for kernel in KERNELS for instance in instances_of(kernel))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: instances_of(kernel)[0])
def test_blocks_have_each_unit_once_and_memory_for_their_parts(kernel: PortableKernel) -> None:
    tokens = (1, 7, 64, 300, 1 << 14)
    for tile, m, (n, k), sms in itertools.product(kernel.choice.tiles, tokens, SHAPES, (1, 46, 108, 132)):
        resident, depth = sms * tile.blocks, -(-k // tile.k)
        rounds, per, blocks = tiles.split(tile, m, n, k, resident)
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


#: The first portable kernel of each source.
SWEPT = {kernel.source: kernel for kernel in reversed(KERNELS) if kernel.function is None}.values()


@pytest.mark.parametrize("kernel", SWEPT, ids=lambda kernel: instances_of(kernel)[0])
def test_the_choice_of_a_portable_tile_is_near_the_best_of_the_sweep(kernel: PortableKernel) -> None:
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
