"""The grouped kernels on a GPU: rows of any number on any experts, in every tile, streams and graphs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from quantkit.kernels import proof
from quantkit.kernels.routing import Routing, route
from tests.kernels.experts import CASES, FIRST, Experts, expected_list, experts, inputs, listed, shuffled
from tests.kernels.products import TYPES, poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
#: Shapes of Qwen3-30B-A3B and Mixtral, with fewer experts, and one of many experts: n, k, experts, experts of a token.
REAL = [(1536, 2048, 16, 8), (2048, 768, 16, 8), (4096, 14336, 4, 2), (64, 128, 128, 8)]


def product(one: Experts, x: Tensor, found: Routing, gather: bool = True, weights: Tensor | None = None) -> Tensor:
    """Multiply into a poisoned output."""
    y = poisoned(found.rows, one.kernel.weight.n, x.dtype)
    one.kernel.launch(one.tensors, x, found, y, gather=gather, weights=weights)
    return y


def agrees(
    one: Experts, ids: Tensor, dtype: torch.dtype, tile: int | None = None, gather: bool = True, weighted: bool = False
) -> None:
    """Compare with float32; rows without an expert must be zeros."""
    ids, (m, topk) = ids.cuda(), ids.shape
    count = len(one.dense)
    found = route(ids, count, one.kernel.tile(m, topk) if tile is None else tile)
    x = inputs(one.dense, m if gather else m * topk, dtype)
    weights = torch.linspace(-2, 2, m * topk, device="cuda") if weighted else None
    y = product(one, x, found, gather, weights)
    wanted = one.product(x, ids, gather, weights).to(dtype)
    case = ids.shape, found.tile, dtype, gather, weighted
    assert (y[~((ids.reshape(-1) >= 0) & (ids.reshape(-1) < count))] == 0).all(), case
    assert proof.mismatch(y, wanted) is None, case


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_are_sorted_by_expert_in_their_order(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    shapes = [(1, 1), (1, 8), (16, 8), (33, 2), (1025, 1), (2048, 8), (9001, 3)]
    for (m, topk), count, tile in itertools.product(shapes, [1, 8, 128, 512], [8, 16, 32, 64]):
        ids = torch.randint(-2, count + 2, (m, topk), generator=random).to(dtype)
        if m * topk * count < 1 << 22:
            assert listed(route(ids.cuda(), count, tile)) == expected_list(ids, count, tile), (m, topk, count, tile)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("layout", "label", "n", "k"), FIRST)
def test_every_number_of_rows_of_an_expert_to_300(layout: str, label: str, n: int, k: int, dtype: torch.dtype) -> None:
    """Beside one expert with one row, one without rows, and rows without an expert."""
    one = experts(layout, label, n, k, 4, "cuda")
    for rows in range(301):
        agrees(one, shuffled({1: rows, 3: 1, -1: 2}), dtype, gather=rows % 2 == 0, weighted=rows % 3 == 0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("layout", "label", "n", "k"), CASES)
@pytest.mark.parametrize("portable", [True, False])
def test_every_tile_of_every_scheme(
    layout: str, label: str, n: int, k: int, dtype: torch.dtype, portable: bool
) -> None:
    one = experts(layout, label, n, k, 4, "cuda", portable)
    if one.kernel.hopper is None and not portable:
        pytest.skip("the portable kernels multiply here")
    for (rows, _), gather, weighted in itertools.product(one.kernel.costs, (True, False), (True, False)):
        for last in (1, rows - 1, rows, 2 * rows + 1):
            counts = {0: last, 2: rows + 1, -1: 3}
            counts[3] = sum(counts.values()) % 2
            agrees(one, shuffled(counts, topk=2), dtype, rows, gather, weighted)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("layout", "label"), [("marlin", "int4:g128"), ("tcfpx", "fp6:channel")])
@pytest.mark.parametrize(("n", "k", "count", "topk"), REAL)
def test_shapes_of_models(layout: str, label: str, n: int, k: int, count: int, topk: int, dtype: torch.dtype) -> None:
    one = experts(layout, label, n, k, count, "cuda")
    random = torch.Generator().manual_seed(n)
    for m, gather in itertools.product((1, 2, 16, 64, 700), (True, False)):
        for tile in [None, 64, one.kernel.costs[-1][0]] if m == 700 else [None]:
            drawn = torch.rand(m, count, generator=random).argsort(1)[:, :topk]
            agrees(one, drawn.contiguous(), dtype, tile, gather, weighted=not gather)


@pytest.mark.parametrize(("layout", "label", "n", "k"), FIRST)
def test_unit_vectors_give_back_every_weight_of_every_expert(layout: str, label: str, n: int, k: int) -> None:
    one = experts(layout, label, n, k, 4, "cuda")
    unit = torch.eye(k, dtype=torch.float16, device="cuda")
    for rows, _ in one.kernel.costs:
        ids = torch.arange(4, device="cuda").repeat(k, 1)
        y = product(one, unit, route(ids, 4, rows)).view(k, 4, n)
        assert torch.equal(y.permute(1, 2, 0), one.dense.half()), rows


@pytest.mark.parametrize(("layout", "label"), [("marlin", "int4:g128"), ("tcfpx", "fp6:channel")])
@pytest.mark.parametrize("m", [1, 16, 64, 700])
def test_fifty_runs_give_the_same_bits(layout: str, label: str, m: int) -> None:
    """Also while other work runs on a second stream."""
    one = experts(layout, label, 2048, 768, 16, "cuda")
    ids = torch.rand(m, 16, generator=torch.Generator().manual_seed(m)).argsort(1)[:, :8].contiguous().cuda()
    x, weights = inputs(one.dense, m, torch.bfloat16), torch.linspace(0, 1, m * 8, device="cuda")
    tile = one.kernel.tile(m, 8)
    first = product(one, x, route(ids, 16, tile), True, weights)
    side, noise = torch.cuda.Stream(), torch.ones(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    found = []
    for _ in range(50):
        with torch.cuda.stream(side):
            noise = (noise @ noise).clamp(max=1)
        found.append(product(one, x, route(ids, 16, tile), True, weights))
    torch.cuda.synchronize()
    assert all(torch.equal(y, first) for y in found)


@pytest.mark.parametrize("layout", ["marlin", "tcfpx"])
def test_launches_without_a_pause_do_not_disturb_each_other(layout: str) -> None:
    """Early starts: each launch reads what the one before it wrote, with nothing between them, many times."""
    label = "int4:g128" if layout == "marlin" else "fp6:channel"
    one = experts(layout, label, 768, 768, 4, "cuda")
    x = inputs(one.dense, 24, torch.bfloat16)
    ids = shuffled({0: 5, 1: 11, 3: 8}).cuda()

    def chain(calm: bool) -> Tensor:
        y = x
        for _ in range(6):
            found = route(ids, 4, one.kernel.tile(24, 1))
            after = torch.empty_like(x)
            one.kernel.launch(one.tensors, y, found, after, gather=True)
            y = after
            if calm:
                torch.cuda.synchronize()
        return y

    calm = chain(True)
    assert all(torch.equal(chain(False), calm) for _ in range(50))
