"""2:4 in the algorithms: sweeps against a slow loop, hostile Hessians, and the published ranking of the rules."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.algorithms import gptq, pruning, rtn
from quantkit.algorithms.hessian import factorize, row_losses
from quantkit.algorithms.options import Options
from quantkit.algorithms.pruning import fixed_mask
from quantkit.algorithms.scale_search import choose_scales, group_errors
from quantkit.core.quantized_tensor import Scheme
from quantkit.core.sparsity import check, weight_mask
from quantkit.errors import LayoutError, NumericError, RecipeError
from tests import synthetic
from tests.algorithms.inputs import correlated, damped, gauss, hostile, is_24, loss

RULES = ("magnitude", "wanda", "sparsegpt")
SPARSE = Scheme.parse("int4:g32:24")


def slow_sweep(w: Tensor, h: Tensor, order: Tensor, fixed: Tensor | None, scales: Tensor | None) -> Tensor:
    """Run SparseGPT as published: right-looking, inverse Cholesky factor; each quad's mask is chosen as it begins."""
    size = 0 if scales is None else w.shape[1] // scales.shape[1]
    w, result = w[:, order].clone(), torch.zeros_like(w)
    u = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h[order][:, order])), upper=True)
    for j, column in enumerate(order.tolist()):
        if j % 4 == 0:
            quad = slice(j, j + 4)
            scores = (w[:, quad] / u.diagonal()[quad]).square()
            mask = weight_mask(scores) if fixed is None else fixed[:, order[quad]]
        q = w[:, j] * mask[:, j % 4]
        if scales is not None:
            s = scales[:, column // size].double()
            q = s * (q / s).round().clamp(-8, 7)
        result[:, column] = q
        w[:, j:] -= torch.outer((w[:, j] - q) / u[j, j], u[j, j:])
    return result


@pytest.mark.parametrize("rule", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("order", ["static", "off"])
@pytest.mark.parametrize(("kind", "block"), [("own", 7), ("mean", 128)])
def test_sweeps_equal_the_slow_loop(rule: Any, order: Any, kind: Any, block: int) -> None:
    w, h = gauss(96, 160), correlated(160)
    options = Options(damp=0.3, prune=rule, act_order=order, damp_kind=kind, block=block)
    columns = factorize(h, options, sparse=True).order
    fixed = fixed_mask(w, "wanda", h) if rule == "wanda" else None
    solution = gptq.quantize(w, SPARSE, h, options)
    expected = slow_sweep(w, damped(h, options), columns, fixed, solution.tensor.scales)
    swept = ~solution.guard_rows
    assert swept.sum() > 0.8 * len(swept)
    assert torch.equal(solution.tensor.dequantize(torch.float64)[swept], expected[swept])
    first = slow_sweep(w, damped(h, options), columns, fixed, None)
    if rule == "sparsegpt":
        found = pruning.prune(w, h, options)
        assert torch.equal(found != 0, first != 0)
        assert torch.allclose(found, first, rtol=1e-9, atol=1e-12)
        assert not torch.equal(found != 0, weight_mask(w))
    scales = choose_scales(first, SPARSE, "search", _errors(h, options)).scales
    assert torch.equal(solution.tensor.scales[swept], scales[swept])


def _errors(h: Tensor, options: Options) -> Any:
    diagonal = factorize(h, options, sparse=True).diagonal
    return group_errors(h, diagonal, h.shape[0] // 32, "block", torch.float64)


def test_order_sorts_quads_by_their_sum_and_never_columns() -> None:
    h = torch.diag(torch.tensor([1.0, 1, 1, 9, 4, 4, 4, 4, 3, 3, 3, 3]))
    order = factorize(h, Options(), sparse=True).order
    assert order.tolist() == [4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11]  # sums 16, 12 and 12: the lower index first on ties
    assert factorize(h, Options(act_order="off"), sparse=True).order.tolist() == list(range(12))
    with pytest.raises(LayoutError, match="multiple of 4"):
        factorize(h[:10, :10], Options(), sparse=True)


#: Each rule meets each Hessian, in orders and dtypes that take turns.
HOSTILE = [
    (rule, name, ("static", "off")[i % 2], (torch.float64, torch.float16)[i // 2 % 2])
    for i, (name, rule) in enumerate(
        product(["rank 1", "rank k/4", "duplicates", "massive channel", "dead column"], RULES)
    )
]


@pytest.mark.parametrize(("rule", "name", "order", "dtype"), HOSTILE)
def test_hostile_hessians_give_2_4_and_are_never_worse_than_rounding(
    rule: Any, name: str, order: Any, dtype: torch.dtype
) -> None:
    w, h = gauss(32, 128).to(dtype), hostile(name, 128)
    options = Options(prune=rule, act_order=order)
    values = pruning.prune(w, h, options)
    assert is_24(values) and values.dtype == dtype and bool(values.isfinite().all())
    solution = gptq.quantize(w, SPARSE, h, options)
    tensor = solution.tensor
    check(tensor.codes != 8)
    assert (solution.loss <= solution.rtn_loss).all()
    assert torch.allclose(solution.loss, loss(w, tensor, h).clamp(min=0), rtol=1e-6, atol=1e-9 * float(h.max()))
    assert solution.facts["prune"] == rule and solution.facts["kept"] == int((tensor.codes != 8).sum())
    assert solution.facts["zeros"] + solution.facts["kept"] == w.numel()


def test_the_guard_compares_with_rounding_under_the_same_mask() -> None:
    h = torch.eye(128, dtype=torch.float64) + 0.02 * correlated(128) / correlated(128).diagonal().mean()
    w, options = gauss(300, 128), Options(act_order="off", clip="none", prune="magnitude")
    solution = gptq.quantize(w, SPARSE, h, options)
    plain, _ = rtn.quantize(w, SPARSE)
    assert torch.equal(solution.rtn_loss, row_losses(w, plain, h))
    guard = solution.guard_rows
    assert 0 < guard.sum() < 300 and torch.equal(solution.tensor.codes[guard], plain.codes[guard])


def test_unusable_rules_and_weights_are_refused() -> None:
    w, h = gauss(4, 64), correlated(64)
    with pytest.raises(RecipeError, match="rounding does not"):
        rtn.quantize(w, SPARSE, prune="sparsegpt")
    with pytest.raises(RecipeError, match="calibration"):
        rtn.quantize(w, SPARSE, prune="wanda")
    with pytest.raises(NumericError, match="ever moved"):
        pruning.prune(w, torch.zeros(64, 64), Options(prune="wanda"))
    w[1, 2] = torch.nan
    for rule in RULES:
        with pytest.raises(NumericError, match=r"\[1, 2\]"):
            pruning.prune(w, h, Options(prune=rule))
    with pytest.raises(LayoutError, match="multiple of 4"):
        pruning.prune(gauss(4, 62), correlated(62), Options())


def test_a_survivor_that_overflows_half_precision_is_refused_or_left_to_the_guard() -> None:
    w = torch.full((1, 4), 60000.0).half()
    h = torch.ones(4, 4, dtype=torch.float64) + 1e-3 * torch.eye(4)
    with pytest.raises(NumericError, match="overflow float16"):
        pruning.prune(w, h, Options())
    solution = gptq.quantize(w, Scheme.parse("int4:channel:24"), h, Options())
    assert (solution.loss <= solution.rtn_loss).all() and bool(solution.tensor.dequantize(torch.half).isfinite().all())
    with pytest.raises(NumericError, match="row 0"):
        gptq.quantize(torch.full_like(w, 65504), Scheme.parse("int4:channel:24"), h, Options())


def test_synthetic_layer_ranks_rules_and_their_combinations_with_int4() -> None:
    layer = synthetic.layer(0, n=64)
    w, h, scheme = layer.weight, layer.h, Scheme.parse("int4:g128:24")
    norm = float(((w @ layer.held_out) * w).sum())
    dense = {rule: pruning.prune(w, h, Options(damp=0.3, prune=rule)) for rule in RULES}
    rounded, _ = rtn.quantize(dense["sparsegpt"], scheme, clip="search", metric="block", hessian=h)
    found = {rule: float(loss(w, values, layer.held_out).sum()) / norm for rule, values in dense.items()}
    found["joint"] = layer.loss(gptq.quantize(w, scheme, h, Options(damp=0.3)).tensor) / norm
    found["then rtn block"] = layer.loss(rounded) / norm
    expected = {"sparsegpt": 0.0094, "joint": 0.0122, "then rtn block": 0.016, "wanda": 0.021, "magnitude": 0.269}
    assert sorted(found, key=found.__getitem__) == list(expected), found
    for name, figure in expected.items():
        assert figure / 1.5 < found[name] < figure * 1.5, (name, found)
    again = gptq.quantize(dense["sparsegpt"], scheme, h, Options(damp=0.3, prune="magnitude"))
    assert found["joint"] < layer.loss(again.tensor) / norm < found["then rtn block"]
