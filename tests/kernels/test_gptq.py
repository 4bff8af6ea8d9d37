"""The kernels of GPTQ against the same steps in torch on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.algorithms import coordinate_descent, rtn, scale_search
from quantkit.algorithms.gptq import quantize
from quantkit.algorithms.numerics import part_of, product, product_dtype, round_to_codes, terms
from quantkit.algorithms.options import Options
from quantkit.algorithms.scale_search import choose_scales, group_errors
from quantkit.algorithms.sweep import Pattern, round_block
from quantkit.core.formats import FORMATS, Format
from quantkit.core.quantized_tensor import Scheme
from quantkit.kernels.gptq import SEARCHED, Columns, runs_on, search_errors
from tests.algorithms.inputs import damped, gauss, hostile, loss
from tests.kernels import gptq_steps

pytestmark = pytest.mark.gpu

#: Share of codes that may differ, where a target lies between two values up to rounding errors.
TIES = 1e-4
HOSTILE = ("rank 1", "rank k/4", "duplicates", "massive channel", "dead channel")


def problem(n: int, b: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Make targets, weights `[b, n]` and a block of V `[b, b]` inside a larger matrix, signed and correlated."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(b, n, generator=generator)
    t = w + 0.1 * torch.randn(b, n, generator=generator)
    larger = torch.full((b + 3, b + 5), torch.nan)
    larger[:b, :b] = torch.eye(b) + 0.05 * torch.randn(b, b, generator=generator).triu(1)
    return t, w, larger[:b, :b]


def columns(n: int, b: int, asymmetric: bool) -> Columns:
    """Make scales of three groups, which columns use in no order."""
    generator = torch.Generator().manual_seed(1)
    scales = (0.1 + torch.rand(3, n, generator=generator) / 2).half().float()
    zeros = torch.randint(0, 16, (3, n), generator=generator).float() if asymmetric else None
    return Columns(scales, zeros, torch.randint(0, 3, (b,), generator=generator).int())


def moved(device: str, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.to(device) for x in tensors]


def check(fmt: Format | None, n: int, b: int, asymmetric: bool = False, pattern: Pattern | None = None) -> None:
    t, w, v = problem(n, b)
    given = None if fmt is None else columns(n, b, asymmetric)
    found = []
    for device in ("cpu", "cuda", "cuda"):
        values, errors = t.to(device, copy=True), torch.full_like(w, torch.nan, device=device)
        own = None if given is None else Columns(*moved(device, *given))
        marked = None if pattern is None else Pattern(*moved(device, pattern.mask.clone(), *pattern[1:]))
        round_block(values, errors, w.to(device), v.to(device), own, fmt, marked)
        found.append((values.cpu(), errors.cpu(), None if marked is None else marked.mask.cpu()))
    (values, errors, mask), first, second = found
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1]), "two launches differ"
    assert not torch.isnan(first[1]).any(), "an error was not written"
    # Rows in which a tie went the other way differ from there on, so rows are counted.
    equal = torch.isclose(values, first[0], atol=1e-4) if fmt is None else values == first[0]
    same = equal.all(0)
    if mask is not None and first[2] is not None:
        same &= (mask == first[2]).all(0)
    assert (~same).sum() <= max(1, TIES * b * n), f"{int((~same).sum())} of {n} rows differ"
    torch.testing.assert_close(first[1][:, same], errors[:, same], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [(4096, 128), (1000, 128), (33, 97), (1, 1), (64, 300), (31, 32)])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_rounds_as_in_torch(name: str, shape: tuple[int, int]) -> None:
    assert runs_on(torch.device("cuda", 0))
    check(FORMATS[name], *shape)


@pytest.mark.parametrize("shape", [(4096, 128), (33, 97), (64, 300)])
def test_zero_points(shape: tuple[int, int]) -> None:
    check(FORMATS["int4"], *shape, asymmetric=True)


@pytest.mark.parametrize("fmt", [FORMATS["int4"], FORMATS["fp6"], None])
@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("shape", [(1024, 128), (33, 100), (64, 260)])
def test_sparse_masks(fmt: Format | None, chosen: bool, shape: tuple[int, int]) -> None:
    n, b = shape
    generator = torch.Generator().manual_seed(2)
    quads = torch.rand(b // 4, 4, n, generator=generator)
    mask = (quads >= quads.sort(1).values[:, 2:3]).view(b, n)
    r = 0.5 + torch.rand(b, 1, generator=generator)
    ahead = r * (torch.eye(4).repeat(b // 4, 1) + 0.1 * torch.randn(b, 4, generator=generator))
    check(fmt, n, b, pattern=Pattern(mask, r, ahead) if chosen else Pattern(mask))


@pytest.mark.parametrize("case", gptq_steps.CASES, ids=str)
def test_descent_moves_codes_as_in_torch(case: tuple[str, int, int, str]) -> None:
    assert runs_on(torch.device("cuda", 0))
    name, n, b, kind = case
    given = gptq_steps.problem(name, n, b, kind)
    expected = gptq_steps.solved(name, given.on("cpu"))
    first, second = (gptq_steps.solved(name, given.on("cuda")) for _ in range(2))
    assert torch.equal(first.v, second.v) and torch.equal(first.e, second.e), "two launches differ"
    gptq_steps.same_rows(expected, first.on("cpu"))
    stayed = first.v.cpu() == given.v
    assert torch.equal(first.e.cpu()[stayed], given.e[stayed])


@pytest.mark.parametrize("case", gptq_steps.FOURS, ids=str)
def test_descent_over_fours_moves_masks_as_in_torch(case: tuple[str | None, int, int, str]) -> None:
    given = gptq_steps.fours(*case)
    expected = gptq_steps.solved_fours(case[0], given.on("cpu"))
    first, second = (gptq_steps.solved_fours(case[0], given.on("cuda")) for _ in range(2))
    assert torch.equal(first.v, second.v) and torch.equal(first.e, second.e), "two launches differ"
    gptq_steps.same_rows(expected, first.on("cpu"))


def test_descent_writes_nothing_outside_of_its_block() -> None:
    """The block lies inside larger tensors of NaN, and all around it stays NaN."""
    given = gptq_steps.problem("int4", 97, 61, "signed").on("cuda")
    larger = [torch.full((61 + 6, 97), torch.nan, device="cuda") for _ in range(3)]
    for outside, inner in zip(larger, given[:3], strict=True):
        outside[3:-3] = inner
    slope, e, v = (outside[3:-3] for outside in larger)
    gptq_steps.solved("int4", given._replace(slope=slope, e=e, v=v))
    expected = gptq_steps.solved("int4", gptq_steps.problem("int4", 97, 61, "signed").on("cuda"))
    assert torch.equal(v, expected.v) and torch.equal(e, expected.e)
    for outside in larger:
        assert outside[:3].isnan().all() and outside[-3:].isnan().all()


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("label", gptq_steps.TUNED)
def test_tuning_takes_the_steps_of_torch(label: str, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    gptq_steps.same_tuning(label, stored, "cuda", monkeypatch)


@pytest.mark.parametrize("label", ["int4:g32", "int4:g64:asym", "int4:g32:24", "fp6:channel", "fp5:channel"])
def test_passes_over_a_whole_weight_lower_its_loss_as_on_a_cpu(label: str) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4096, 576, generator=generator)
    x += torch.randn(4096, 1, generator=generator)
    h, weight = x.T @ x, torch.randn(301, x.shape[1], generator=generator)
    h[7] = h[:, 7] = 0
    options = [Options(descent=passes, signed=label == "int4:g32") for passes in (0, 3)]
    scheme = Scheme.parse(label)
    losses = {
        device: [float(quantize(weight.to(device), scheme, h.to(device), each).loss.sum()) for each in options]
        for device in ("cpu", "cuda")
    }
    assert losses["cuda"][1] < 0.998 * losses["cuda"][0]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=5e-3)


@pytest.mark.parametrize("rows", [1, 512])
def test_products_of_bfloat16_terms_are_those_of_float32(rows: int) -> None:
    assert product_dtype(torch.empty(0, device="cuda"), torch.float64) == torch.bfloat16
    generator = torch.Generator().manual_seed(6)
    a, b = torch.randn(rows, 1100, generator=generator), torch.randn(1100, 301, generator=generator).exp()
    exact = a.double() @ b.double()
    left, right = terms(a.cuda(), torch.bfloat16), terms(b.cuda(), torch.bfloat16)
    both = product(left, right, to=product(left, right), alpha=2)
    found = product(left, right)
    assert product(part_of(left, slice(None), slice(0)), part_of(right, slice(0)), to=found) is found
    for times, outputs in ((1, found), (3, both)):
        error = outputs.cpu().double() - times * exact
        assert outputs.dtype == torch.float32 and error.norm() < 2e-5 * times * exact.norm()
    assert len(terms(a.cuda().bfloat16(), torch.bfloat16)) == 1


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("label", ["int4:g64", "fp6:channel"])
def test_refining_by_bfloat16_terms_makes_no_row_worse(label: str, name: str) -> None:
    k, cpu = 1152, torch.device("cpu")  # two panels and a part of one
    options, scheme = Options(), Scheme.parse(label)
    w, h = gauss(301, k).float(), damped(hostile(name, k), options).float()
    before, _ = rtn.quantize(w.cuda(), scheme)
    step = {"descent": 3, "refit": True}
    after, changes, losses = coordinate_descent.refine(w.cuda(), before, h.cuda(), **step)
    again, *_ = coordinate_descent.refine(w.cuda(), before, h.cuda(), **step)
    assert torch.equal(after.codes, again.codes) and torch.equal(after.scales, again.scales), "two runs differ"
    assert changes["descent_changed"].sum() > w.numel() / 200
    found, exact = loss(w, after.to(cpu), h), loss(w, before.to(cpu), h)
    assert (found <= exact * (1 + 1e-4)).all()
    assert losses is not None and torch.allclose(losses.cpu(), found, rtol=1e-2)
    on_cpu, *_ = coordinate_descent.refine(w, before.to(cpu), h, **step)
    assert float(found.sum()) == pytest.approx(float(loss(w, on_cpu, h).sum()), rel=1e-2)


@pytest.mark.parametrize("size", SEARCHED)
@pytest.mark.parametrize(("name", "asymmetric"), [("int4", False), ("int4", True), ("fp6", False), ("fp5", False)])
@pytest.mark.parametrize(
    ("rows", "groups", "candidates"), [(1000, 1, 76), (300, 7, 76), (3, 2, 25), (1, 1, 1), (257, 3, 33)]
)
def test_errors_of_candidate_scales(
    rows: int, groups: int, candidates: int, name: str, asymmetric: bool, size: int
) -> None:
    generator, m = torch.Generator().manual_seed(4), rows * groups
    x = torch.randn(m, size, generator=generator)
    scales = (0.05 + torch.rand(candidates, m, generator=generator) / 2).half().float()
    zeros = torch.randint(0, 16, (candidates, m), generator=generator).float() if asymmetric else None
    r = torch.randn(groups, size, size, generator=generator).triu()
    delta = x / scales.unsqueeze(-1)
    round_to_codes(delta, FORMATS[name], None if zeros is None else zeros.unsqueeze(-1))
    error = (x - delta * scales.unsqueeze(-1)).double().view(-1, groups, 1, size)
    expected = ((error @ r.double()) ** 2).sum((-2, -1)).view(candidates, m)
    found = [search_errors(*moved("cuda", x, scales, zeros, r), FORMATS[name]) for _ in range(2)]
    assert torch.equal(*found), "two launches differ"
    errors = found[0].cpu().double()
    given_up = errors.isinf()  # worse than an earlier candidate, so that the sum was not completed
    least = expected.cummin(0).values
    assert (expected[given_up] > least[given_up]).all() and not given_up[0].any()
    torch.testing.assert_close(errors[~given_up], expected[~given_up], rtol=1e-4, atol=1e-5)


def test_a_candidate_that_is_not_a_number_stops_no_other() -> None:
    generator = torch.Generator().manual_seed(5)
    x, r = torch.randn(40, 128, generator=generator), torch.randn(1, 128, 128, generator=generator).triu()
    scales = (0.05 + torch.rand(30, 40, generator=generator) / 2).half().float()
    expected = search_errors(*moved("cuda", x, scales, None, r), FORMATS["int4"]).amin(0)
    more = torch.cat([torch.full((9, 40), torch.nan), scales])
    errors = search_errors(*moved("cuda", x, more, None, r), FORMATS["int4"])
    assert errors[:9].isnan().all() and torch.equal(errors[9:].amin(0), expected)


@pytest.mark.parametrize("label", ["int4:g128", "int4:g64:asym", "int4:g32"])
def test_scales_of_all_groups_at_once_are_those_of_each_group_in_torch(
    label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, scheme, n, k = torch.Generator().manual_seed(5), Scheme.parse(label), 3000, 1024
    x = torch.randn(2048, k, generator=generator) @ torch.randn(k, k, generator=generator)
    weight, h = torch.randn(n, k, generator=generator).cuda(), (x.T @ x).cuda()
    errors = group_errors(h, 1.01 * h.diagonal(), scheme.groups(k), "block", torch.float32)
    together = choose_scales(weight, scheme, "search", errors)
    parts = [choose_scales(rows, scheme, "search", errors).scales for rows in weight.split(700)]
    assert torch.equal(torch.cat(parts), together.scales), "a row's scales depend on the rows beside it"
    monkeypatch.setattr(scale_search.kernels, "runs_on", lambda device: False)
    alone = choose_scales(weight, scheme, "search", errors)
    assert (together.scales != alone.scales).float().mean() < 1e-3


def test_scales_of_wide_channels_are_those_of_a_cpu() -> None:
    generator, scheme, n, k = torch.Generator().manual_seed(6), Scheme.parse("fp6:channel"), 700, 4096 + 3 * 128 + 32
    weight, h = torch.randn(n, k, generator=generator), torch.eye(k) + 0.1
    found = []
    for device in ("cpu", "cuda"):
        errors = group_errors(h.to(device), 1.01 * h.diagonal().to(device), 1, "block", torch.float32)
        found.append(choose_scales(weight.to(device), scheme, "search", errors).scales.cpu())
    assert (found[0] != found[1]).float().mean() < 1e-2


@pytest.mark.parametrize("label", ["int4:g128", "int4:g32:asym", "fp6:channel", "int4:g128:24"])
@pytest.mark.parametrize("act_order", ["static", "off"])
def test_a_whole_weight_is_quantized_as_on_a_cpu(label: str, act_order: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2048, 512, generator=generator) @ torch.randn(512, 512, generator=generator)
    h, weight = x.T @ x, torch.randn(300, 512, generator=generator)
    scheme = Scheme.parse(label)
    options = Options(act_order=act_order)
    on_cpu = quantize(weight, scheme, h, options)
    on_gpu = quantize(weight.cuda(), scheme, h.cuda(), options)
    again = quantize(weight.cuda(), scheme, h.cuda(), options)
    assert torch.equal(on_gpu.tensor.codes, again.tensor.codes)
    differing = (on_cpu.tensor.codes != on_gpu.tensor.codes.cpu()).float().mean()
    assert differing < 0.02, f"{differing:.4f} of the codes differ"
    assert float(on_gpu.loss.sum()) == pytest.approx(float(on_cpu.loss.sum()), rel=2e-3)
