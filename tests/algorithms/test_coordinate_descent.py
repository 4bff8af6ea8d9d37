"""Signed scales, descent and refit: hostile Hessians, slow references, and options that change the output."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.algorithms import coordinate_descent, gptq, pruning, rtn
from quantkit.algorithms.hessian import Hessian, row_losses
from quantkit.algorithms.numerics import encode, stored_scale
from quantkit.algorithms.options import Options
from quantkit.algorithms.pruning import fixed_mask
from quantkit.algorithms.scale_search import choose_scales
from quantkit.api import build_recipe
from quantkit.calibration.stages.solve import solve, solve_uncalibrated
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import NumericError, RecipeError
from quantkit.progress import Progress
from quantkit.recipes.recipe import from_mapping, written
from tests.algorithms.inputs import correlated, damped, gauss, hostile, is_24, loss

LABELS = ["int4:g32", "int4:channel", "int4:g64:asym", "int4:g32:24", "fp6:channel", "fp5:channel"]
HOSTILE = ["rank 1", "rank k/4", "duplicates", "massive channel", "dead column"]


def rounded(w: Tensor, label: str, signed: bool = False) -> QuantizedTensor:
    """Round to nearest; a sparse scheme first loses the second and fourth weight of each quad."""
    scheme = Scheme.parse(label)
    if scheme.sparsity is not None:
        w = w * torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=w.dtype).repeat(w.shape[1] // 4)
    grid = choose_scales(w, scheme, "none", None, signed)
    return QuantizedTensor(scheme, encode(w, scheme, grid), *grid)


def slow_pass(w: Tensor, tensor: QuantizedTensor, h: Tensor) -> Tensor:
    """Run one pass of coordinate descent (ALGORITHMS 8) column by column, in float64; return dequantized values."""
    n, k = w.shape
    scales = tensor.scales.double().repeat_interleave(k // tensor.scales.shape[1], 1)
    values = torch.tensor(tensor.scheme.format.values, dtype=torch.float64)
    zeros = values.new_zeros(n, k)
    if tensor.zeros is not None:
        zeros = values[tensor.zeros.long()].repeat_interleave(k // tensor.zeros.shape[1], 1)
    q = tensor.dequantize(torch.float64)
    for j in (h.diagonal() > 0).nonzero().flatten().tolist():
        t = q[:, j] + ((w.double() - q) @ h)[:, j] / h[j, j]
        grid = (values - zeros[:, j : j + 1]) * scales[:, j : j + 1]
        best = grid.gather(1, (grid - t[:, None]).abs().argmin(1, keepdim=True))[:, 0]
        pruned = (q[:, j] == 0) & (tensor.scheme.sparsity is not None)
        q[:, j] = torch.where(pruned, q[:, j], best)
    return q


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("k", [64, 320])
def test_a_pass_equals_the_slow_loop(label: str, k: int) -> None:
    w, h = gauss(12, k), correlated(k)
    h[5] = h[:, 5] = 0
    tensor = rounded(w, label)
    expected = slow_pass(w, tensor, h)
    found, changes, *_ = coordinate_descent.refine(w, tensor, h, descent=1)
    fell = loss(w, found, h) < loss(w, tensor, h)
    assert fell.all()
    assert torch.equal(found.dequantize(torch.float64), expected)
    assert torch.equal(found.scales, tensor.scales) and torch.equal(found.codes[:, 5], tensor.codes[:, 5])
    assert torch.equal(changes["descent_changed"], (found.codes != tensor.codes).sum(1)) and changes.keys() == {
        "descent_changed"
    }


def slow_fours(w: Tensor, q: Tensor, h: Tensor, scales: Tensor | None) -> Tensor:
    """Run one pass over the masks of aligned fours (ALGORITHMS 9), in float64; return dequantized values."""
    q = q.clone()
    for row, a in product(range(len(w)), range(0, w.shape[1], 4)):

        def loss_of(four: Tensor, row: int = row, a: int = a) -> Tensor:
            d = w[row] - q[row]
            d[a : a + 4] = w[row, a : a + 4] - four
            return d @ h @ d

        s = torch.tensor(1.0) if scales is None else scales[row, a]
        block = h[a : a + 4, a : a + 4]
        aim = block @ q[row, a : a + 4] + (h @ (w[row] - q[row]))[a : a + 4]
        best = q[row, a : a + 4].clone()
        for i, j in permutations(range(4), 2):
            pair = torch.linalg.solve(block[[i, j]][:, [i, j]], aim[[i, j]])
            four = torch.zeros(4, dtype=torch.float64)
            four[i] = pair[0] if scales is None else s * (pair[0] / s).round().clamp(-8, 7)
            four[j] = (aim[j] - block[i, j] * four[i]) / block[j, j]
            four[j] = four[j] if scales is None else s * (four[j] / s).round().clamp(-8, 7)
            if loss_of(four) < loss_of(best) * (1 - 1e-9):
                best = four
        q[row, a : a + 4] = best
    return q


@pytest.mark.parametrize("k", [32, 160])
def test_a_pass_over_masks_equals_the_slow_loop(k: int) -> None:
    w, h = gauss(3, k), correlated(k)
    start = rounded(w, "int4:g32:24", signed=True)
    found = coordinate_descent.descend(w, start, h, masks=True)
    scales = start.scales.double().repeat_interleave(32, 1)
    expected = slow_fours(w, start.dequantize(torch.float64), h, scales)
    assert torch.allclose(found.dequantize(torch.float64), expected, rtol=1e-9)
    assert not torch.equal(found.codes == 8, start.codes == 8)
    held = coordinate_descent.descend(w, start, h)
    assert bool((held.codes[start.codes == 8] == 8).all())
    values = start.dequantize(torch.float64)
    pruned = coordinate_descent.descend_pruned(w, values, h, 1)
    assert torch.allclose(pruned, slow_fours(w, values, h, None), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", HOSTILE)
def test_masks_stay_2_4_and_no_row_gets_worse_on_hostile_hessians(name: str) -> None:
    w, h = gauss(24, 64).float(), hostile(name, 64)
    start = rounded(w, "int4:g32:24")
    for passes in (1, 3):
        found, _, *_ = coordinate_descent.refine(w, start, h, descent=passes, refit=True, masks=True)
        assert (loss(w, found, h) <= loss(w, start, h) * (1 + 1e-9)).all()
    pruned = coordinate_descent.descend_pruned(w, start.dequantize(torch.float32), h, 3)
    assert is_24(pruned) and bool(pruned.isfinite().all())


def test_a_mask_that_was_asked_for_stays_and_sparsegpts_is_chosen_again() -> None:
    scheme, h = Scheme.parse("int4:g32:24"), correlated(64)
    w = gauss(24, 64)
    for rule in ("magnitude", "wanda"):
        found = gptq.quantize(w, scheme, h, Options(prune=rule, descent=3)).tensor
        assert bool((found.codes[~fixed_mask(w, rule, h)] == 8).all())
    plain, moved = (gptq.quantize(w, scheme, h, Options(descent=passes, damp=1e-3)) for passes in (0, 3))
    assert float(moved.loss.sum()) < 0.95 * float(plain.loss.sum())
    assert not torch.equal(plain.tensor.codes == 8, moved.tensor.codes == 8)
    before, after = (pruning.prune(w, h, Options(descent=passes, damp=1e-3)) for passes in (0, 3))
    assert is_24(after) and float(loss(w, after, h).sum()) < 0.95 * float(loss(w, before, h).sum())


@pytest.mark.parametrize(
    ("dtype", "label", "name"),
    [
        *((torch.float64, label, HOSTILE[(i + turn) % 5]) for i, label in enumerate(LABELS) for turn in (0, 2)),
        *((torch.float16, "int4:g32", name) for name in HOSTILE),
    ],
)
def test_descent_and_refit_never_raise_the_loss_of_a_row(dtype: torch.dtype, label: str, name: str) -> None:
    w, h = gauss(48, 128).to(dtype), hostile(name, 128)
    h = h if dtype == torch.float64 else h.float()
    tensor = rounded(w, label)
    last = row_losses(w, tensor, h)
    for step in ({"descent": 1}, {"descent": 1}, {"refit": True}, {"descent": 3}):
        tensor, _, *_ = coordinate_descent.refine(w, tensor, h, **step)
        now = row_losses(w, tensor, h)
        assert (now <= last).all(), step
        last = now
        assert torch.isfinite(tensor.dequantize(torch.float16)).all() and (tensor.scales > 0).all()
    if dtype == torch.float64:  # passes in float32 may move a row's loss up by its rounding errors
        twice, _, *_ = coordinate_descent.refine(w, rounded(w, label), h, descent=2)
        once, _, *_ = coordinate_descent.refine(w, rounded(w, label), h, descent=1)
        assert (row_losses(w, twice, h) <= row_losses(w, once, h) * (1 + 1e-9)).all()


def test_optimal_codes_stay() -> None:
    w, tensor = gauss(8, 64), rounded(gauss(8, 64), "fp6:channel")
    tensor.codes[0, :8] = 32  # negative zeros
    for h in (torch.zeros(64, 64), torch.eye(64)):
        same, changes, *_ = coordinate_descent.refine(w[1:], rounded(w[1:], "int4:g32"), h, descent=3)
        assert same.equal(rounded(w[1:], "int4:g32")) and not changes["descent_changed"].any()
    exact, h = tensor.dequantize(torch.float64), correlated(64)
    same, changes, *_ = coordinate_descent.refine(exact, tensor, h, descent=3, refit=True)
    assert same.equal(tensor) and not changes["descent_changed"].any() and not changes["refit_rows"].any()


def test_a_tiny_channel_with_a_huge_slope_gives_finite_codes() -> None:
    w, h = gauss(4, 64).float(), correlated(64).float()
    h[7, 7] = 1e-42  # its target is infinite
    tensor = rounded(w, "int4:g32")
    found, _, *_ = coordinate_descent.refine(w, tensor, h, descent=2, refit=True)
    assert torch.isfinite(found.dequantize()).all()
    assert (row_losses(w, found, h) <= row_losses(w, tensor, h)).all()


@pytest.mark.parametrize("label", ["int4:g16", "int4:g16:asym", "int4:g16:24", "fp6:channel"])
def test_refitted_scales_are_those_of_least_squares(label: str) -> None:
    x = gauss(256, 64, seed=4)
    w, h = gauss(40, 64), x.T @ x * (2 / len(x))
    tensor = rounded(w, label)
    found, changes, *_ = coordinate_descent.refine(w, tensor, h, refit=True)
    assert changes.keys() == {"refit_rows"} and changes["refit_rows"].sum() > 30
    assert torch.equal(found.codes, tensor.codes)
    groups = tensor.scales.shape[1]
    ones = QuantizedTensor(tensor.scheme, tensor.codes, torch.ones_like(tensor.scales), tensor.zeros)
    for row in changes["refit_rows"].nonzero().flatten().tolist():
        values = ones.dequantize(torch.float64)[row].view(groups, -1)
        inputs = (x.view(len(x), groups, -1) * values).sum(-1)  # what one step of each scale adds to the output
        best = torch.linalg.lstsq(inputs, (x @ w[row])[:, None]).solution[:, 0]
        assert torch.equal(found.scales[row], best.half()), row
    unchanged = ~changes["refit_rows"]
    assert torch.equal(found.scales[unchanged], tensor.scales[unchanged])


def test_a_refit_with_a_bad_scale_leaves_the_row_unchanged() -> None:
    h = torch.eye(32)
    scheme = Scheme.parse("int4:channel")
    codes = torch.full((5, 32), 9, dtype=torch.uint8)  # every value is one step
    codes[4] = 8
    tensor = QuantizedTensor(scheme, codes, torch.full((5, 1), 0.5).half())
    # The best scales: of the other sign, zero, so large that -8 steps would overflow, a good one, and none at all.
    w = torch.tensor([-1.0, 0.0, 30000.0, 0.75, 1.0])[:, None].expand(5, 32).contiguous()
    found, changes, *_ = coordinate_descent.refine(w, tensor, h, refit=True)
    assert found.scales.flatten().tolist() == [0.5, 0.5, 0.5, 0.75, 0.5]
    assert changes["refit_rows"].tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_refitted_scales_of_bfloat16_weights_are_bfloat16_values(dtype: torch.dtype) -> None:
    w, h = gauss(16, 128).to(dtype), correlated(128).float()
    found, changes, *_ = coordinate_descent.refine(w, rounded(w, "int4:g32", signed=True), h, refit=True)
    assert changes["refit_rows"].any() and (found.scales < 0).any()
    exact = torch.equal(found.scales.float(), found.scales.bfloat16().float())
    assert exact == (dtype == torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_extreme_of_each_group_gets_the_code_of_minus_eight(dtype: torch.dtype) -> None:
    w = gauss(64, 128).to(dtype)
    tensor, _ = rtn.quantize(w, Scheme.parse("int4:g32"), signed=True)
    groups = w.float().view(64, 4, 32)
    low, high = groups.aminmax(dim=-1)
    extreme = torch.where(high > -low, high, low)  # of two as large, the negative one
    assert not tensor.codes.view(64, 4, 32)[groups == extreme.unsqueeze(-1)].any()
    assert torch.equal(tensor.scales, stored_scale(extreme / -8, dtype, tensor.scheme.format).half())
    assert (tensor.scales < 0).any() and (tensor.scales > 0).any()
    plain, _ = rtn.quantize(w, Scheme.parse("int4:g32"))
    gains = [(t.dequantize() - w.float()).square().sum() for t in (tensor, plain)]
    assert gains[0] < 0.9 * gains[1]
    searched, _ = rtn.quantize(w, Scheme.parse("int4:g32"), clip="search", signed=True)
    assert (searched.dequantize() - w.float()).square().sum() < gains[0]
    untied = high != -low
    negated, _ = rtn.quantize(-w, Scheme.parse("int4:g32"), clip="search", signed=True)
    assert torch.equal(negated.codes.view(64, 4, 32)[untied], searched.codes.view(64, 4, 32)[untied])
    assert torch.equal(negated.scales[untied], -searched.scales[untied])


@pytest.mark.parametrize("size", [0.75, 2.0**-9, 3e3])
def test_weights_of_one_magnitude_are_exact_with_signed_scales(size: float) -> None:
    signs = torch.where(gauss(8, 128) > 0, 1.0, -1.0)
    for w in (signs * size, torch.where(gauss(8, 128).abs() > 0.5, signs * size, 0.0)):  # binary, ternary
        tensor, _ = rtn.quantize(w, Scheme.parse("int4:g32"), clip="search", signed=True)
        assert (tensor.dequantize(torch.float32) - w).abs().max() <= size * 2**-11
    w = gauss(8, 128).clamp(-4, 4) * size
    w[:, ::32], w[:, 1::32] = 5 * size, -5 * size  # the same extremes, and others between them: no such candidate
    scales = rtn.quantize(w, Scheme.parse("int4:g32"), clip="search", signed=True)[0].scales.float()
    assert (scales.abs() <= 5 * size / 8 * (1 + 2**-10)).all()


def test_signed_scales_at_their_limits() -> None:
    scheme = Scheme.parse("int4:channel")
    w = torch.zeros(6, 32)
    w[1, 3], w[2, 3], w[3, 3], w[4, :2] = 1e-7, -1e-7, 60000.0, torch.tensor([2.0, -2.0])
    tensor, facts = rtn.quantize(w, scheme, signed=True)
    assert tensor.scales.flatten().tolist() == [1.0, -(2.0**-20), 2.0**-20, -7500.0, 0.25, 1.0]
    assert (facts["floored_scales"], facts["subnormal_scales"], facts["zero_scales"]) == (2, 2, 0)
    assert torch.isfinite(tensor.dequantize(torch.float16)).all() and tensor.dequantize()[3, 3] == 60000
    w[3, 3] = 65520.0 * 1.001
    with pytest.raises(NumericError, match="row 3 "):
        rtn.quantize(w, scheme, signed=True)


@pytest.mark.parametrize("label", ["int4:g32:asym", "fp6:channel", "fp5:channel"])
def test_signed_scales_are_refused_for_other_schemes(label: str) -> None:
    w, h, scheme = gauss(4, 64), correlated(64), Scheme.parse(label)
    for clip in ("none", "search"):
        with pytest.raises(RecipeError, match="signed"):
            rtn.quantize(w, scheme, clip=clip, signed=True)
        with pytest.raises(RecipeError, match="signed"):
            gptq.quantize(w, scheme, h, Options(clip=clip, signed=True))
    with pytest.raises(RecipeError, match="signed"):
        from_mapping({"scheme": written(scheme), "signed": True})


@pytest.mark.parametrize("order", ["static", "off"])
def test_refined_gptq_is_guarded_and_reports_the_final_tensor(order: Any) -> None:
    w, h = gauss(96, 128), correlated(128)
    for label in ("int4:g32", "int4:g64:asym", "fp6:channel"):
        scheme = Scheme.parse(label)
        signed = label == "int4:g32"
        options = Options(act_order=order, signed=signed, descent=2, refit=True)
        solution = gptq.quantize(w, scheme, h, options)
        plain = gptq.quantize(w, scheme, h, Options(act_order=order, signed=signed))
        assert (solution.loss <= solution.rtn_loss).all()
        swept, whole = ~(solution.guard_rows | plain.guard_rows), damped(h, options)
        assert (loss(w, solution.tensor, whole) <= loss(w, plain.tensor, whole) * (1 + 1e-12))[swept].all()
        assert torch.allclose(solution.loss, loss(w, solution.tensor, h), rtol=1e-9)
        parts = [solution.rows(slice(0, 40)), solution.rows(slice(40, 96))]
        for fact in ("descent_changed", "refit_rows"):
            assert solution.facts[fact] == sum(part.facts[fact] for part in parts) > 0
            assert fact not in plain.facts
        assert (solution.tensor.scales < 0).any() == signed


def test_each_option_reaches_the_solver() -> None:
    hessian, weight, plain = Hessian(64, "cpu"), gauss(16, 64).float(), {"signed": False, "descent": 0, "refit": False}
    hessian.add(gauss(16 * 64, 64, seed=7).float() @ correlated(64).float())
    found = {}
    for name, options in {
        "default": {}, "gptq": plain, "signed": {"descent": 0, "refit": False}, "descent": {**plain, "descent": 1},
        "refit": {**plain, "refit": True}, "rtn": {"method": "rtn"}, "rtn signed": {"method": "rtn", "signed": True},
    }.items():  # fmt: skip
        recipe = build_recipe(group_size=32, **options)
        if "rtn" in name:
            [item] = solve_uncalibrated({"proj": weight}, recipe.scheme, recipe)
        else:
            (item,) = solve({"proj": weight}, {"proj": recipe.scheme}, hessian, recipe, Progress(quiet=True))
        assert isinstance(item.value, QuantizedTensor) and item.facts is not None
        found[name] = item.value
        assert ("descent_changed" in item.facts) == (name in ("descent", "default"))
        assert ("refit_rows" in item.facts) == (name in ("refit", "default"))
    assert {n for n, tensor in found.items() if bool((tensor.scales < 0).any())} == {"rtn signed", "signed", "default"}
    assert len({tensor.digest() for tensor in found.values()}) == len(found)


@pytest.mark.parametrize("label", ["int4:g128", "int4:channel", "int4:g64:asym", "int4:g128:24", "fp6:channel"])
@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_signed_scales_and_descent_are_the_default_of_symmetric_int4_by_gptq_alone(label: str, method: Any) -> None:
    scheme = Scheme.parse(label)
    section = written(scheme)
    recipe = from_mapping({"scheme": section, "method": method})
    refined = method == "gptq" and label in ("int4:g128", "int4:channel", "int4:g128:24")
    gptq = recipe.gptq
    assert (recipe.signed, gptq.signed, gptq.descent, gptq.refit) == (
        (True, True, 3, True) if refined else (False, False, 0, False)
    )
    again = from_mapping(recipe.to_mapping())
    assert again == recipe and again.sha256() == recipe.sha256()
    plain = from_mapping({"scheme": section, "method": method, "signed": False, "gptq": {"descent": 0}})
    assert not plain.signed and plain.gptq.descent == 0 and (plain == recipe) is not refined
    # One linear that takes no sign leaves the default of all others.
    if label == "int4:g128" and refined:
        for other in ("int4:g128:asym", "fp6:channel", "int4:g128:24"):
            mixed = build_recipe(override={"k_proj": other})
            assert mixed.signed and mixed.gptq.descent == 3
        assert build_recipe(override={"k_proj": "int4:g32"}).signed
        assert build_recipe(descent=0).signed and build_recipe(signed=False).gptq.descent == 3


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_one_float_takes_no_signed_scales_from_the_integers_beside_it(method: Any) -> None:
    asked: dict[str, Any] = {"method": method, "scheme": {"group_size": 64}, "overrides": {"down": "fp5:channel"}}
    recipe = from_mapping(asked | ({"signed": True} if method == "rtn" else {}))
    assert recipe.signed and recipe.gptq.signed and recipe.gptq.descent == (3 if method == "gptq" else 0)
    fp5 = Scheme.parse("fp5:channel")
    ours, theirs = recipe.solving(recipe.scheme), recipe.solving(fp5)
    assert ours == recipe and not theirs.signed and not theirs.gptq.signed
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    weight[:, 3] = 4.0
    negative = {}
    for name in ("up", "down"):
        scheme = recipe.scheme_of(name)
        assert isinstance(scheme, Scheme)
        tensor = solve_uncalibrated({name: weight}, scheme, recipe)[0].value
        assert isinstance(tensor, QuantizedTensor)
        negative[name] = bool((tensor.scales < 0).any())
    assert negative == {"up": True, "down": False}


@pytest.mark.parametrize(
    ("label", "dtype"),
    [
        *((label, torch.float64) for label in ("int4:g32", "int4:g64:asym", "fp6:channel")),
        *(("int4:g32", dtype) for dtype in (torch.bfloat16, torch.float32)),
    ],
)
def test_losses_that_follow_from_the_refit_are_those_of_the_errors(label: str, dtype: torch.dtype) -> None:
    w, h = gauss(100, 128).to(dtype), correlated(128)
    h[5] = h[:, 5] = 0  # a dead channel
    before = w.clone()
    near = 1e-6 if dtype == torch.float32 else 1e-9  # `row_losses` takes the errors in float32
    for step in ({"refit": True}, {"descent": 2}, {"descent": 2, "refit": True}):
        refined = coordinate_descent.refine(w, rounded(w, label), h, **step)
        assert refined.loss is not None and torch.allclose(refined.loss, row_losses(w, refined.tensor, h), rtol=near)
        options = Options(**step)
        solution = gptq.quantize(w, Scheme.parse(label), h, options)
        assert torch.allclose(solution.loss, row_losses(w, solution.tensor, h), rtol=near)
        assert torch.allclose(solution.norm, row_losses(w, None, h), rtol=1e-9)
    assert torch.equal(w, before)
