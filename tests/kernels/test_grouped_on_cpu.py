"""The grouped kernels without a GPU: the sources run by a C++ compiler, and what Python chooses."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import KernelError
from quantkit.kernels import LAUNCHERS, grouped, routing
from quantkit.kernels.contract import TYPES as TYPE_NAMES
from quantkit.kernels.grouped import GroupedKernel, expected_tiles
from quantkit.kernels.proof import relative_error
from quantkit.kernels.routing import Routing
from quantkit.kernels.tiles import PortableTile, split
from tests.kernels import emulation
from tests.kernels.experts import CASES, FIRST, TAKEN, Experts, expected_list, experts, inputs, listed, shuffled
from tests.kernels.fake_driver import FakeDriver
from tests.kernels.products import TYPES
from tests.kernels.sources import SOURCES, instances_of

GUARD = -7


def route(ids: Tensor, count: int, tile: int) -> Routing:
    """Sort rows by the kernel, on the CPU."""
    rows = ids.numel()
    found = torch.full((routing.list_size(rows, count, tile) + 8,), GUARD, dtype=torch.int32)
    most = routing.most_tiles(rows, count, tile)
    instance = routing.INSTANCES[ids.dtype]
    emulation.launch(
        "routing", routing.SOURCES["routing"], instance, (1, 1), routing.SORTERS, [ids, found, rows, count, tile, most]
    )
    assert (found[-8:] == GUARD).all(), "nothing is written past the end"
    return Routing(found, *ids.shape, count, tile, most)


def multiply(
    one: Experts,
    tile: PortableTile,
    x: Tensor,
    found: Routing,
    gather: bool,
    weights: Tensor | None,
    orders: tuple[bool, ...] = (False, True),
    **how: int,
) -> Tensor:
    """Multiply by the kernel, on the CPU, into a poisoned output; blocks run forwards and, in `orders`, backwards."""
    kernel, weight = one.kernel.kernel, one.kernel.weight
    blocks, whole = how.get("blocks", 7), how.get("whole", 1 << 30)
    products = []
    for backwards in orders:
        y = torch.full((found.rows, weight.n), float("nan"), dtype=x.dtype)
        parts = torch.full((2 * blocks * tile.m * tile.n,), float("nan"))
        arrived = torch.zeros(blocks, dtype=torch.int32)
        sizes = [found.max_tiles, found.topk if gather else 1, whole, weight.n, weight.k, *weight.group_argument]
        args = [*one.tensors, x, y, parts, arrived, found.list, weights, *sizes]
        emulation.launch(
            kernel.source,
            instances_of(kernel),
            kernel.instance(x.dtype, tile),
            (blocks, 1),
            256,
            args,
            backwards=backwards,
            late=not backwards,
        )
        assert not arrived.any(), "counters are zero for the next launch"
        products.append(y)
    same = (torch.equal(y.view(torch.int16), products[0].view(torch.int16)) for y in products)
    assert all(same), "the order of blocks does not matter"
    return products[0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_are_sorted_by_expert_in_their_order(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    for (m, topk), count, tile in itertools.product([(1, 8), (33, 2), (1025, 1), (700, 3)], [1, 8, 128, 512], [8, 64]):
        ids = torch.randint(-2, count + 2, (m, topk), generator=random).to(dtype)
        assert listed(route(ids, count, tile)) == expected_list(ids, count, tile), (m, topk, count, tile)


def test_a_number_of_64_bits_is_not_cut_to_an_expert() -> None:
    ids = torch.tensor([[1 << 32], [(1 << 32) + 1], [-(1 << 40)], [1]])
    assert listed(route(ids, 4, 8)) == ([1], [3] + [-1] * 7, [0, 1, 2])


def test_the_list_has_room_for_every_distribution() -> None:
    """Of all ways to put up to 9 rows on up to 4 experts or none."""
    for rows, count, tile in itertools.product(range(1, 10), range(1, 5), (1, 2, 4)):
        most, size = routing.most_tiles(rows, count, tile), routing.list_size(rows, count, tile)
        needed = []
        for counts in itertools.product(range(rows + 1), repeat=count):
            if sum(counts) <= rows:
                tiles = sum(-(-one // tile) for one in counts)
                assert tiles <= most
                needed.append(2 + most + tiles * tile + rows - sum(counts))
        assert max(needed) <= size


@pytest.mark.parametrize("number", [i for i, (*_, k) in enumerate(CASES) if k < 1152])
def test_every_tile_gathers_multiplies_and_scatters(number: int) -> None:
    """Each tile of a layout meets both dtypes in different cases of the layout; its blocks run in one order."""
    layout, label, n, k = CASES[number]
    one = experts(layout, label, n, k, 4)
    for i, tile in enumerate(one.kernel.kernel.choice.tiles):
        dtype = TYPES[(number + i) % 2]
        gather = i % 2 == 0
        ids = shuffled({0: 1, -1: 2, 1: tile.m + 3, 3: 7 + tile.m % 2}, topk=1)
        ids = torch.cat([ids, ids[:1]]) if ids.numel() % 2 else ids
        ids = ids.view(-1, 2)
        weights = None if i % 3 == 1 else torch.linspace(-2, 2, ids.numel())
        x = inputs(one.dense, len(ids) if gather else ids.numel(), dtype)
        found = route(ids, 4, tile.m)
        order = (False, True) if i == 0 else (i % 2 == number % 2,)
        y = multiply(one, tile, x, found, gather, weights, order, blocks=5 + i, whole=1 if i == 2 else 1 << 30)
        wanted = one.product(x, ids, gather, weights)
        assert relative_error(y, wanted.to(dtype)) < 1e-5, tile
        assert (y[ids.reshape(-1) < 0] == 0).all()


@pytest.mark.parametrize(("layout", "label", "n", "k"), FIRST)
def test_any_number_of_blocks_and_rows_gives_the_same_products(layout: str, label: str, n: int, k: int) -> None:
    """Also more blocks than units, and no row with an expert."""
    one = experts(layout, label, n, k, 4)
    tile = one.kernel.kernel.choice.tiles[0]
    for rows, blocks in ((1, 1), (1, 40), (9, 3), (9, 64), (0, 4)):
        ids = shuffled({2: rows, -1: 3})
        x = inputs(one.dense, len(ids), torch.float16)
        y = multiply(one, tile, x, route(ids, 4, tile.m), True, None, blocks=blocks)
        wanted = one.product(x, ids, True, None).half()
        assert relative_error(y, wanted) < 1e-5, (rows, blocks)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_steps_beside_the_products_round_once(dtype: torch.dtype) -> None:
    rows, choices, n = 39, 3, 8 * 300
    h = (torch.randn(rows, 2 * n, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    h[0, :4] = torch.tensor([-60000.0, 60000.0, 0.0, -0.0])
    for name, out, sizes in (
        ("silu_multiply", torch.full((rows + 1, n), float("nan"), dtype=dtype), [n // 8]),
        ("sum_choices", torch.full((rows // choices + 1, 2 * n), float("nan"), dtype=dtype), [2 * n // 8, choices]),
    ):
        instance = f"{name}<{TYPE_NAMES[dtype]}>"
        grid = len(out) - 1, -(-sizes[0] // routing.THREADS)
        instances = routing.SOURCES["expert_steps"]
        emulation.launch("expert_steps", instances, instance, grid, routing.THREADS, [h, out, *sizes])
        gate, up = h.float().chunk(2, 1)
        wanted = torch.nn.functional.silu(gate) * up
        if name == "sum_choices":
            wanted = (h.view(-1, choices, 2 * n)[:, 0].float() + h.view(-1, choices, 2 * n)[:, 1].float()) + h.view(
                -1, choices, 2 * n
            )[:, 2].float()
        assert torch.isnan(out[-1]).all(), "nothing is written past the end"
        torch.testing.assert_close(out[:-1], wanted.to(dtype), rtol=2**-7 if dtype == TYPES[1] else 2**-10, atol=1e-7)


@pytest.mark.parametrize("choices", [1, 2])
def test_rows_are_gathered_for_the_copy_engine_and_only_those_without_an_expert_are_cleared(choices: int) -> None:
    """Whatever the routed kernel does not write must stay, and no place without a row may be read from past the end."""
    ids, k, n, tile = shuffled({0: 3, 2: 9, -1: 4, 3: 6}, topk=2).int(), 16, 24, 8
    found = route(ids, 4, tile)
    x = torch.arange(ids.numel() // choices * k).view(-1, k).half()
    gathered = torch.full((found.max_tiles * tile, k), -1.0).half()
    y = torch.full((ids.numel(), n), float("nan")).half()
    sizes = [found.max_tiles, tile, choices, k // 8, n // 8]
    grid = -(-(routing.list_size(ids.numel(), 4, tile) - 2 - found.max_tiles) // 8), 1
    instances = routing.SOURCES["expert_steps"]
    args = [x, found.list, gathered, None, y, *sizes]
    emulation.launch("expert_steps", instances, "gather_rows<half, half>", grid, routing.THREADS, args)
    _, numbers, absent = expected_list(ids, 4, tile)
    wanted = torch.full_like(gathered, -1.0)
    for place, row in enumerate(numbers):
        if row >= 0:
            wanted[place] = x[row // choices]
    assert torch.equal(gathered, wanted)
    assert (y[absent] == 0).all() and y.isnan().sum() == (len(y) - len(absent)) * n and len(absent) == 4


def test_gathered_bfloat16_rows_lose_nothing_as_float16() -> None:
    """Also rows of zeros, of very small and of very large numbers: float16 has 30 binades, bfloat16 254."""
    ids, k, tile = torch.zeros(8, 1).int(), 64, 8
    found = route(ids, 1, tile)
    powers = torch.tensor([0.0, -126.0, -100.0, -3.0, 0.0, 14.0, 60.0, 127.0]).exp2()[:, None]
    x = (torch.rand(8, k, generator=torch.Generator().manual_seed(0)) + 1) * powers
    x[0], x[:, 1::2] = 0, -x[:, 1::2]
    x[:, 5] *= 2.0**-14  # the smallest of a row, beside the largest
    x = x.bfloat16()
    gathered, factors, y = torch.ones(tile, k).half(), torch.ones(tile), torch.zeros(8, 8).bfloat16()
    sizes = [found.max_tiles, tile, 1, k // 8, 1]
    instances = routing.SOURCES["expert_steps"]
    args = [x, found.list, gathered, factors, y, *sizes]
    emulation.launch("expert_steps", instances, "gather_rows<bfloat, half>", (1, 1), routing.THREADS, args)
    assert gathered[2:].abs().amax(1).min() >= 2.0**14
    assert torch.equal(gathered.double() * factors.double()[:, None], x.double())


def test_the_plain_kernels_of_the_frame_multiply_as_before() -> None:
    """Each tile meets both dtypes in different layouts, and so one tile of tokens that is not full, or a second one."""
    for number, (layout, label, n, _) in enumerate(FIRST):
        k = 256  # which several blocks share
        one = experts(layout, label, n, k, 1)
        kernel = LAUNCHERS[layout].kernels(Scheme.parse(label), n, k).portable
        scaled = set(kernel.choice.tiles) - set(kernel.choice.tiles_for(torch.bfloat16))
        dtypes = [torch.float16 if t in scaled else TYPES[(number + i) % 2] for i, t in enumerate(kernel.choice.tiles)]
        instances = tuple(map(kernel.instance, dtypes, kernel.choice.tiles))  # compiling takes longer than running
        for i, (dtype, tile) in enumerate(zip(dtypes, kernel.choice.tiles, strict=True)):
            m = tile.m + 3 if (number // 2 + i) % 2 else tile.m - 3
            rounds, per, blocks = split(tile, m, n, k, 2 if tile.n < n else 5)
            x = inputs(one.dense, m, dtype)
            bias = torch.linspace(-1, 1, n).to(dtype)
            y = torch.full((m, n), float("nan"), dtype=dtype)
            parts, arrived = torch.full((2 * blocks * tile.m * tile.n,), float("nan")), torch.zeros(blocks).int()
            args = [*one.tensors, x, bias, y, parts, arrived, m, n, k, per, rounds, *one.kernel.weight.group_argument]
            emulation.launch(kernel.source, instances, instances[i], (blocks, 1), 256, args)
            wanted = x.float() @ one.dense[0].t() + bias.float()
            rounded = kernel.choice.grouped and tile.scales_weights
            assert relative_error(y, wanted.to(dtype)) < (3e-4 if rounded else 1e-5), (layout, tile)


@pytest.mark.parametrize(("layout", "label"), [("marlin", "int4:g128"), ("tcfpx", "fp6:channel")])
def test_few_rows_of_an_expert_get_small_tiles_and_many_get_large_ones(layout: str, label: str) -> None:
    tiles = LAUNCHERS[layout].kernels(Scheme.parse(label), 256, 1152).routed.choice.tiles
    costs = tuple((tile.m, tile.cost) for tile in tiles)
    sizes = [grouped.choose(costs, mean) for mean in (1 / 16, 1, 4, 20, 60, 255.9, 256, 4096)]
    assert sizes == sorted(sizes) and sizes[:3] == [8, 8, 8] and sizes[-1] >= 64
    assert len({tile.m for tile in tiles}) == len(tiles), "the rows of a tile name it"


def test_the_expected_number_of_tiles_is_that_of_random_rows() -> None:
    random = torch.Generator().manual_seed(0)
    for mean, rows in ((0.25, 8), (4.0, 8), (17.0, 16), (200.0, 64)):
        drawn = torch.poisson(torch.full((200_000,), mean), generator=random)
        assert expected_tiles(mean, rows) == pytest.approx(float((drawn / rows).ceil().mean()), rel=0.02)
    assert expected_tiles(grouped.MANY_ROWS, 64) == pytest.approx(expected_tiles(255.999, 64), rel=0.01)


@pytest.mark.parametrize(
    ("layout", "label", "count", "says"),
    [
        ("exllama", "int4:g128", 4, "no kernel of quantkit's own multiplies exllama"),
        ("marlin", "int4:g16", 4, "groups of 128, 64, 32 or none"),
        ("marlin", "int4:g128", 513, "1 to 512 experts, not 513"),
        ("tcfpx", "int4:channel", 4, "takes fp6 and fp5"),
    ],
)
def test_experts_without_a_kernel_are_one_error(layout: str, label: str, count: int, says: str) -> None:
    with pytest.raises(KernelError, match=says) as caught:
        GroupedKernel.of(layout, Scheme.parse(label), count, 128, 256)
    assert "\n" not in str(caught.value)


def test_a_launch_checks_its_operands_and_starts_early_only_on_hopper(
    fake_gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, ids = experts("marlin", "int4:g128", 192, 384, 4), shuffled({0: 3, 1: 5, -1: 4}, topk=2)
    tile = one.kernel.tile(*ids.shape)
    found = Routing(torch.zeros(100).int(), *ids.shape, 4, tile, routing.most_tiles(ids.numel(), 4, tile))
    x, y = torch.ones(len(ids), 384).half(), torch.empty(ids.numel(), 192).half()
    monkeypatch.setattr(routing, "starts_early", lambda device: True)
    one.kernel.launch(one.tensors, x, found, y, gather=True)
    assert fake_gpu.early == [True]
    wide, short = torch.ones(ids.numel(), 384).half(), torch.ones(3)
    for says, changed in {
        "x must be float16 or bfloat16, not float32": {"x": x.float(), "y": y.float()},
        "y must be bfloat16, not float16": {"x": x.bfloat16()},
        r"x must have shape \[6, 384\], not \[12, 384\]": {"x": wide},
        r"x must have shape \[12, 384\], not \[6, 384\]": {"gather": False},
        "there are 4": {"routing": Routing(found.list, *ids.shape, 5, tile, found.max_tiles)},
        "12 weights of rows, not 3": {"weights": short},
        "weights of rows must be float32": {"weights": torch.ones(12).half()},
        "y must be contiguous": {"y": torch.empty(192, ids.numel()).half().t()},
        "must have shape": {"tensors": [part[:3].clone() for part in one.tensors]},
        "tiles of 8, 16, 32, 64 rows, not of 24": {"routing": Routing(found.list, *ids.shape, 4, 24, 1)},
    }.items():
        with pytest.raises(KernelError, match=says) as caught:
            one.kernel.launch(**{"tensors": one.tensors, "x": x, "routing": found, "y": y, "gather": True, **changed})
        assert "\n" not in str(caught.value)
    assert fake_gpu.early == [True]


def test_steps_of_experts_refuse_operands_before_a_launch() -> None:
    h, a = torch.ones(3, 32).half(), torch.empty(3, 16).half()
    for says, given, out in (
        ("result must be float16 or bfloat16, not float32", h, a.float()),
        ("input must be float16, not bfloat16", h.bfloat16(), a),
        (r"input must have shape \[3, 32\], not \[3, 16\]", a.clone(), a),
        ("input must be contiguous", torch.ones(32, 3).half().t(), a),
        (r"cannot make \[3, 4\] of \[3, 8\]", h[:, :8].clone(), a[:, :4].clone()),
        ("result must be on a CUDA device, not on cpu", h, a),
    ):
        with pytest.raises(KernelError, match=says):
            routing.silu_multiply(given, out)


def test_bad_numbers_of_experts_are_refused_before_a_launch() -> None:
    for says, ids, count in (
        ("int32 or int64, not float32", torch.zeros(2, 2), 4),
        ("contiguous", torch.zeros(2, 2, 2).int(), 4),
        ("contiguous", torch.zeros(0, 2).int(), 4),
        ("contiguous", torch.zeros(4, 2).int()[:, :1], 4),
        ("1 to 512 experts, not 0", torch.zeros(2, 2).int(), 0),
        ("on a CUDA device", torch.zeros(2, 2).int(), 4),
    ):
        with pytest.raises(KernelError, match=says):
            routing.route(ids, count, 8)


def test_every_layout_of_experts_is_tested() -> None:
    functions = {instance.split("<")[0] for instance in sum(SOURCES.values(), ()) if "_routed<" in instance}
    assert functions == {f"{layout}_routed" for layout in TAKEN}
