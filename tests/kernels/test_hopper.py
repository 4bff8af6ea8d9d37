"""The Hopper kernels: their schedule and tiles without a GPU; on one every token count, tile, odd shape and weight."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import KernelError
from quantkit.kernels import LAUNCHERS, hopper, loader, proof
from quantkit.kernels.hopper import K_STEP, MAX_CLUSTER, HopperKernel, HopperTile, ceil
from tests.kernels.on_cpu import library
from tests.kernels.operands import weight
from tests.kernels.test_naive import on_gpu, poisoned

H200 = 132
LAYERS = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (57344, 8192), (73728, 18432)]
TYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """The schemes and shapes of a layout: the first two schemes are tested most.

    `odd` are shapes that do not fill their tiles, `units` is the shape for unit vectors.
    """

    layout: str
    labels: tuple[str, ...]
    odd: tuple[tuple[int, int], ...]
    units: tuple[int, int]

    def kernel(self, label: str) -> HopperKernel:
        found = LAUNCHERS[self.layout].kernels(Scheme.parse(label), 4096, 4096).hopper
        assert found is not None
        return found

    def tiles(self, label: str, n: int, k: int, dtype: torch.dtype) -> list[HopperTile]:
        """List the tiles that exist for a scheme and may be used for a weight `[n, k]`, clusters in three sizes."""
        kernel = self.kernel(label)
        return [
            replace(tile, cluster=size)
            for tile in kernel.tiles_for(dtype)
            for size in ((3, 5, 8) if tile.cluster == MAX_CLUSTER else (tile.cluster,))
            if size <= ceil(k, K_STEP) and (not kernel.sparse or n % tile.columns == 0)
        ]


CASES = {
    "marlin": Case(
        "marlin",
        ("int4:g128", "int4:channel", "int4:g64", "int4:g32"),
        ((64, 256), (320, 1152), (1024, 2048)),
        (320, 384),
    ),
    "marlin24": Case(
        "marlin24", ("int4:g128:24", "int4:channel:24"), ((128, 256), (768, 1152), (1024, 2048)), (768, 768)
    ),
    "quick": Case(
        "quick",
        ("int4:g128:asym", "int4:g128", "int4:g64:asym", "int4:g32:asym"),
        ((128, 256), (384, 1152), (1024, 2048)),
        (384, 768),
    ),
    "tcfpx": Case(
        "tcfpx",
        ("fp6:channel", "fp5:channel", "fp6-e2m3:channel", "fp5-e2m2:channel"),
        ((64, 192), (320, 64), (320, 1152)),
        (320, 320),
    ),
}
ALL = [(layout, label) for layout, case in CASES.items() for label in case.labels]
FIRST = [(layout, label) for layout, case in CASES.items() for label in case.labels[:2]]
RARE = [(layout, label) for layout, label in ALL if (layout, label) not in FIRST]


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
"""


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 300))
def test_blocks_do_each_step_once_and_never_wait_in_a_circle(walk: Any, tiles: int, k_steps: int, blocks: int) -> None:
    blocks = min(blocks, tiles * k_steps)
    rows = (ctypes.c_int * (8 * (tiles + 2 * blocks)))()
    count = walk(tiles, k_steps, blocks, rows)
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


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return library(tmp_path_factory.mktemp("walk"), WALK).walk


@pytest.fixture
def gpu() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU, and torch sees none")
    problem = loader.toolchain()["problem"]
    if problem is not None:
        pytest.skip(f"needs CuPy: {problem}: {loader.install()}")


def product(
    layout: str,
    tensors: dict[str, Tensor],
    q: QuantizedTensor,
    x: Tensor,
    bias: Tensor | None = None,
    tile: HopperTile | None = None,
) -> Tensor:
    """Multiply into an output that was filled with NaN."""
    n, k = q.shape
    return LAUNCHERS[layout].matmul(x, tensors, q.scheme, n, k, bias, poisoned(x.shape[0], n, x.dtype), tile=tile)


def agrees(
    layout: str, label: str, n: int, k: int, m: int, dtype: torch.dtype, tile: HopperTile | None, bias: bool
) -> None:
    """Compare with float32 three times; no output may be missing, and no bit may vary."""
    tensors, q = on_gpu(layout, weight(label, n, k, seed=m))
    w = q.dequantize()
    x = proof.activations(w, m, dtype)
    shift = torch.linspace(-3, 3, n).to(dtype).cuda() if bias else None
    reference = proof.reference(x, w) + (0 if shift is None else shift.float())
    found = [product(layout, tensors, q, x, shift, tile) for _ in range(3)]
    assert proof.mismatch(found[0], reference.to(dtype)) is None, (label, n, k, m, dtype, tile)
    assert all(torch.equal(found[0], y) for y in found), (label, n, k, m, dtype, tile)


@pytest.mark.parametrize(("layout", "label"), ALL)
def test_every_tile_fits_a_multiprocessor(layout: str, label: str) -> None:
    kernel = CASES[layout].kernel(label)
    for dtype in TYPES:
        found = CASES[layout].tiles(label, 4096, 4096, dtype)
        assert {tile.tokens for tile in found} >= {8, 32, 64}
        for tile in found:
            assert tile.resident * (kernel.shared_bytes(tile) + 1024) <= 228 * 1024, tile
            assert tile.shared or tile.stages % tile.warpgroups == 0
            assert tile.columns in kernel.bandwidth
    assert len(set(kernel.instances)) == len(kernel.instances)


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
    found = case.kernel(case.labels[0]).candidates(torch.float16, m, n, k, sms)
    assert any(tile.cluster == 0 for tile in found), "no tile can be launched"
    for tile in found:
        assert tile.cluster in (0, *range(2, MAX_CLUSTER + 1)) and tile.cluster <= ceil(k, K_STEP), tile
        if tile.cluster > 2:
            assert hopper.grid_size(tile, m, n, k, sms) <= hopper.CLUSTERED * sms * tile.resident, tile


def test_a_cluster_with_an_idle_block_is_not_launched() -> None:
    kernel = CASES["tcfpx"].kernel("fp6:channel")
    tile = next(tile for tile in kernel.tiles if tile.cluster == MAX_CLUSTER)
    with pytest.raises(KernelError, match=r"cluster of 8 .* k = 320"):
        hopper._launch_sizes(kernel, tile, 1, 320, 320, 132)


def every_count(layout: str, label: str, n: int, k: int, counts: Iterable[int], bias: bool) -> None:
    """Compare with float32 for some numbers of tokens, in both dtypes."""
    tensors, q = on_gpu(layout, weight(label, n, k))
    w = q.dequantize()
    for m, dtype in itertools.product(counts, TYPES):
        x = proof.activations(w, m, dtype)
        shift = torch.linspace(-3, 3, n).to(dtype).cuda() if bias else None
        reference = proof.reference(x, w) + (0 if shift is None else shift.float())
        y = product(layout, tensors, q, x, shift)
        assert proof.mismatch(y, reference.to(dtype)) is None, (m, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "label"), FIRST)
@pytest.mark.parametrize(("n", "k"), [(256, 512), (4096, 4096)])
def test_every_token_count_to_300(gpu: None, layout: str, label: str, n: int, k: int) -> None:
    every_count(layout, label, n, k, range(1, 301), bias=False)


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "label"), RARE)
def test_token_counts_of_schemes_that_have_few_tiles(gpu: None, layout: str, label: str) -> None:
    """Their largest tile has 64 tokens, so more tokens take several tiles."""
    counts = (*range(1, 71), *range(127, 131), *range(255, 259))
    every_count(layout, label, *CASES[layout].units, counts, bias=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", range(3))
@pytest.mark.parametrize(("layout", "label"), ALL)
def test_every_tile_on_odd_shapes(gpu: None, layout: str, label: str, shape: int, dtype: torch.dtype) -> None:
    n, k = CASES[layout].odd[shape]
    for tile in CASES[layout].tiles(label, n, k, dtype):
        for m in (1, tile.tokens - 1, tile.tokens + 1, 2 * tile.tokens + 3):
            agrees(layout, label, n, k, m, dtype, tile, bias=m % 2 == 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", CASES)
def test_rounds_of_whole_tiles_with_shared_remaining_tiles(gpu: None, layout: str, dtype: torch.dtype) -> None:
    """With more tiles than blocks, each block takes one or two whole tiles, and the remaining steps are dealt out."""
    label, sms = CASES[layout].labels[0], hopper.multiprocessors(torch.device("cuda", torch.cuda.current_device()))
    for tile in CASES[layout].tiles(label, 256, 384, dtype):
        resident = sms * tile.resident
        for whole in () if tile.cluster else (resident + 5, 2 * resident + 1):
            m = ceil(whole, 256 // tile.columns) * tile.tokens - 3
            agrees(layout, label, 256, 384, m, dtype, tile, bias=False)


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "label"), ALL)
def test_unit_vectors_give_back_every_weight(gpu: None, layout: str, label: str) -> None:
    n, k = CASES[layout].units
    tensors, q = on_gpu(layout, weight(label, n, k))
    for dtype in TYPES:
        for tile in CASES[layout].tiles(label, n, k, dtype):
            y = product(layout, tensors, q, torch.eye(k, dtype=dtype, device="cuda"), tile=tile)
            assert torch.equal(y.t(), q.dequantize().to(dtype)), (dtype, tile)


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "label"), ALL)
def test_the_largest_activations_do_not_overflow(gpu: None, layout: str, label: str) -> None:
    """Sums are scaled in float32: in float16 they would be infinite before the scale brings them back."""
    n, k = 256, 1024
    q = weight(label, n, k)
    q.scales.fill_(0.001)
    tensors, q = on_gpu(layout, q)
    w = q.dequantize()
    for dtype in TYPES:
        for tile in CASES[layout].tiles(label, n, k, dtype):
            x = torch.full((tile.tokens, k), 65504.0, device="cuda").to(dtype)
            x[:, ::2] *= -1
            reference = proof.reference(x, w)
            assert reference.abs().max() < 60000
            y = product(layout, tensors, q, x, tile=tile)
            assert proof.mismatch(y, reference.to(dtype)) is None, (dtype, tile)


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "label"), ALL)
def test_scales_up_to_float16s_end_give_back_every_weight(gpu: None, layout: str, label: str) -> None:
    """Some tiles multiply the scale into the weight, which must fit float16: 8 x 8188, with zero points 15 x 4364."""
    n, k = CASES[layout].units
    q = weight(label, n, k)
    q.scales.fill_(8188 if q.zeros is None else 4364)
    q.scales[1::2].neg_()
    tensors, q = on_gpu(layout, q)
    for dtype in TYPES:
        x = 2.0**-10 * torch.eye(k, dtype=dtype, device="cuda")
        for tile in CASES[layout].tiles(label, n, k, dtype):
            y = product(layout, tensors, q, x, tile=tile)
            assert torch.equal(y.t(), (q.dequantize() * 2.0**-10).to(dtype)), (dtype, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", CASES)
def test_concurrent_streams_do_not_share_a_workspace(gpu: None, layout: str) -> None:
    """Blocks of two grids run at the same time, and the blocks of each grid exchange sums."""
    case, turns = CASES[layout], 20
    layers = [on_gpu(layout, weight(case.labels[0], n, k)) for n, k in ((1024, 2048), (768, 3072))]
    streams = [torch.cuda.Stream() for _ in layers]
    for tile in case.tiles(case.labels[0], 256, 2048, torch.float16):
        given = [proof.activations(q.dequantize(), tile.tokens + 1, torch.float16) for _, q in layers]
        expected = [product(layout, *layer, x, tile=tile) for layer, x in zip(layers, given, strict=True)]
        found = [torch.full((turns, *y.shape), float("nan"), dtype=y.dtype, device="cuda") for y in expected]
        torch.cuda.synchronize()
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10_000_000)  # until all are launched
        for turn, i in itertools.product(range(turns), range(len(layers))):
            (tensors, q), y = layers[i], found[i][turn]
            with torch.cuda.stream(streams[i]):
                LAUNCHERS[layout].matmul(given[i], tensors, q.scheme, *q.shape, out=y, tile=tile)
        torch.cuda.synchronize()
        assert all(torch.equal(y, one.expand_as(y)) for y, one in zip(found, expected, strict=True)), tile


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 20, 130, 300])
@pytest.mark.parametrize("layout", CASES)
def test_a_launch_that_begins_early_reads_what_the_one_before_wrote(gpu: None, layout: str, m: int) -> None:
    """The activations of each product are the output of the one before; none may be read or overwritten too soon."""
    n = 2048
    layers = [on_gpu(layout, weight(CASES[layout].labels[0], n, n, seed=i)) for i in range(3)]
    x = torch.randn(m, n, device="cuda", generator=torch.Generator("cuda").manual_seed(m)).half()

    def chain(wait: bool) -> list[Tensor]:
        found, y = [], x
        for i in range(24):
            tensors, q = layers[i % 3]
            y = LAUNCHERS[layout].matmul(y, tensors, q.scheme, n, n)
            if wait:
                torch.cuda.synchronize()
            y = y / y.abs().max() if i % 2 else y  # now and then another program's kernel in between
            found.append(y)
        return found

    slow = chain(wait=True)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(chain(wait=False), slow, strict=True))
