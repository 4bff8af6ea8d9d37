"""QUICK's kernel for Hopper: its tiles on paper, and on such a GPU every token count, tile, group and odd shape."""

from __future__ import annotations

import itertools

import pytest
import torch

from quantkit.errors import KernelError
from quantkit.kernels import hopper as frame
from quantkit.kernels import proof
from quantkit.kernels import quick_hopper as hopper
from quantkit.tensor import Scheme
from tests.kernels import sweeps
from tests.kernels.operands import weight
from tests.kernels.test_marlin_hopper import H200, LAYERS, TYPES, gpu
from tests.kernels.test_naive import on_gpu, poisoned

__all__ = ["gpu"]

LABELS = ["int4:g128:asym", "int4:g128", "int4:g64:asym", "int4:g32:asym"]


def test_every_tile_fits_a_multiprocessor() -> None:
    for dtype, group_size in itertools.product(TYPES, hopper.GROUPS):
        found = hopper.tiles(dtype, group_size)
        assert {t.tokens for t in found} >= {8, 16, 32, 64}
        for tile in found:
            assert tile.resident * tile.bytes(hopper.room(tile, group_size)) <= 227 * 1024, tile
            assert tile.shared or tile.stages % tile.warpgroups == 0
            assert tile.columns in hopper.BANDWIDTH, "the halves of 128 columns come together"
            assert hopper.room(tile, group_size) % 1024 == 0, "the swizzle of each stage would be another"
    assert len(set(hopper.INSTANCES)) == len(hopper.INSTANCES)


def test_the_choice_is_a_tile_that_exists_and_has_a_step_for_each_of_its_blocks() -> None:
    for (n, k), m, dtype, group in itertools.product(
        [*LAYERS, (128, 32), (128, 128), (384, 448)], (1, 7, 8, 9, 64, 300, 4096), TYPES, hopper.GROUPS
    ):
        tile = hopper.choose_tile(m, n, k, H200, dtype, group)
        assert hopper.instance(tile, dtype, group) in hopper.INSTANCES
        assert tile.cluster <= -(-k // 128)


def test_the_choice_is_near_the_best_of_the_sweep() -> None:
    """With 1024 tokens clocks depend on what ran before, and on how tiles meet in the L2, which no figure knows."""
    behind = sweeps.behind("quick", lambda m, n, k: hopper.choose_tile(m, n, k, H200, torch.float16, 128))
    assert len(behind) == 9 * 7
    assert all(ratio < (1.05 if m < 1024 else 1.13) for (m, _, _), ratio in behind.items()), behind


def product(
    q, tensors, x: torch.Tensor, bias: torch.Tensor | None = None, tile: frame.Tile | None = None
) -> torch.Tensor:  # type: ignore[no-untyped-def]
    n, k = q.shape
    return hopper.matmul(x, tensors, q.scheme, n, k, bias, poisoned(x.shape[0], n, x.dtype), tile=tile)


def agrees(label: str, n: int, k: int, m: int, dtype: torch.dtype, tile: frame.Tile | None, bias: bool) -> None:
    """Compare with float32 in poisoned outputs, three times: nothing may be left out, and nothing may vary."""
    tensors, q = on_gpu("quick", weight(label, n, k, seed=m))
    w = q.dequantize()
    x = proof.activations(w, m, dtype)
    shift = torch.linspace(-3, 3, n).to(dtype).cuda() if bias else None
    reference = proof.reference(x, w) + (0 if shift is None else shift.float())
    found = [product(q, tensors, x, shift, tile) for _ in range(3)]
    assert proof.relative_error(found[0], reference.to(dtype)) < proof.BOUND, (label, n, k, m, dtype, tile)
    assert all(torch.equal(found[0], y) for y in found), (label, n, k, m, dtype, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("label", ["int4:g128:asym", "int4:g128"])
@pytest.mark.parametrize(("n", "k"), [(256, 512), (4096, 4096)])
def test_every_token_count_to_300(gpu: None, label: str, n: int, k: int) -> None:
    tensors, q = on_gpu("quick", weight(label, n, k))
    w = q.dequantize()
    for m in range(1, 301):
        x = proof.activations(w, m, TYPES[m % 2])
        y = product(q, tensors, x)
        assert proof.relative_error(y, proof.reference(x, w).to(x.dtype)) < proof.BOUND, m


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("n", "k"), [(128, 256), (384, 1152), (1024, 2048)])
@pytest.mark.parametrize("label", LABELS)
def test_every_tile_on_odd_shapes(gpu: None, label: str, n: int, k: int, dtype: torch.dtype) -> None:
    for tile in hopper.tiles(dtype, Scheme.parse(label).group_size or 0):
        for m in (1, tile.tokens - 1, tile.tokens + 1, 2 * tile.tokens + 3):
            agrees(label, n, k, m, dtype, tile, bias=m % 2 == 0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("label", "k"), [("int4:g32:asym", 32), ("int4:g32:asym", 160), ("int4:g64:asym", 64), ("int4:g64", 448)]
)
def test_ends_of_k_that_fill_no_step(gpu: None, label: str, k: int) -> None:
    for m, dtype in itertools.product((1, 20, 150), TYPES):
        agrees(label, 384, k, m, dtype, None, bias=True)


@pytest.mark.gpu
@pytest.mark.parametrize("label", LABELS)
def test_unit_vectors_give_back_every_weight(gpu: None, label: str) -> None:
    n, k = 384, 768
    tensors, q = on_gpu("quick", weight(label, n, k))
    for dtype in TYPES:
        for tile in hopper.tiles(dtype, q.scheme.group_size or 0):
            y = product(q, tensors, torch.eye(k, dtype=dtype, device="cuda"), tile=tile)
            assert torch.equal(y.t(), q.dequantize().to(dtype)), (dtype, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 20, 130, 300])
def test_a_launch_that_begins_early_reads_what_the_one_before_wrote(gpu: None, m: int) -> None:
    n = 2048
    layers = [on_gpu("quick", weight("int4:g128:asym", n, n, seed=i)) for i in range(3)]
    x = torch.randn(m, n, device="cuda", generator=torch.Generator("cuda").manual_seed(m)).half()

    def chain(wait: bool) -> list[torch.Tensor]:
        found, y = [], x
        for i in range(24):
            tensors, q = layers[i % 3]
            y = hopper.matmul(y, tensors, q.scheme, n, n)
            if wait:
                torch.cuda.synchronize()
            y = y / y.abs().max()
            found.append(y)
        return found

    slow = chain(wait=True)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(chain(wait=False), slow, strict=True))


@pytest.mark.gpu
def test_groups_that_no_step_is_whole_ones_of_are_an_error(gpu: None) -> None:
    tensors, q = on_gpu("quick", weight("int4:g256:asym", 256, 512))
    x = torch.ones(2, 512, dtype=torch.float16, device="cuda")
    with pytest.raises(KernelError, match="groups of 128, 64 or 32, not 256"):
        hopper.matmul(x, tensors, q.scheme, 256, 512)
