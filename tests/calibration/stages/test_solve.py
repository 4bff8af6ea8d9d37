"""One group of linears: errors name the right one, and every deviation from the recipe is reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.algorithms.hessian import Hessian
from quantkit.calibration.stages.solve import solve, solve_uncalibrated
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import NumericError
from quantkit.io.json_files import dump_json
from quantkit.progress import Progress
from quantkit.recipes.recipe import from_mapping

COARSE: dict[str, Any] = {"scheme": {"group_size": "channel"}, "clip": "none"}
ROUNDS: dict[str, Any] = {"gptq": {"on_unsolvable": "rtn"}}


def gauss(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def summed(x: Tensor) -> Hessian:
    hessian = Hessian(x.shape[1], "cpu")
    hessian.add(x)
    return hessian


def solved(
    hessian: Hessian, weight: Tensor | None = None, label: str = "int4:g64", **recipe: Any
) -> tuple[dict[str, Any], QuantizedTensor]:
    """Solve one linear, named `x`; return its facts and its value."""
    weights, schemes = {"x": gauss(8, 128) if weight is None else weight}, {"x": Scheme.parse(label)}
    (item,) = solve(weights, schemes, hessian, from_mapping(recipe), Progress(quiet=True))
    assert item.facts is not None and isinstance(item.value, QuantizedTensor)
    return item.facts, item.value


def test_a_row_that_overflows_is_named_in_its_own_linear() -> None:
    x = gauss(64, 32)
    weights = {"a": x[:8].clone(), "b": x[8:16].clone()}
    weights["b"][3, 0] = 1e6
    recipe = from_mapping(COARSE)
    with pytest.raises(NumericError, match="b: row 3 "):
        solve(weights, dict.fromkeys(weights, recipe.scheme), summed(x), recipe, Progress(quiet=True))


def test_a_linear_that_no_token_reaches_is_refused_or_rounded(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NumericError, match="x: no calibration token"):
        solved(Hessian(128, "cpu"))
    facts, _ = solved(Hessian(128, "cpu"), **ROUNDS)
    assert (facts["method"], facts["tokens"]) == ("rtn", 0) and "no calibration" in facts["reason"]
    assert "x: no calibration" in capsys.readouterr().err


def test_few_tokens_and_dead_inputs_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    facts, _ = solved(summed(gauss(15, 128, seed=1)))
    assert "x: only 15 tokens" in capsys.readouterr().err
    assert facts["tokens"] == 15 and facts["loss"] <= facts["rtn_loss"]
    dead = summed(torch.zeros(200, 128))
    with pytest.raises(NumericError, match="x: "):
        solved(dead)
    facts, _ = solved(dead, **ROUNDS)
    assert facts["method"] == "rtn" and facts["reason"]
    assert "x: " in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_relative_error_of_every_source_dtype(dtype: torch.dtype) -> None:
    weight = gauss(8, 128).to(dtype)
    scheme, recipe = Scheme.parse("int4:g64"), from_mapping({"method": "rtn"})
    [item] = solve_uncalibrated({"x": weight}, scheme, recipe)
    assert isinstance(item.value, QuantizedTensor) and item.facts is not None
    w = weight.double()
    expected = float((w - item.value.dequantize().double()).norm() / w.norm())
    assert item.facts["relative_error"] == pytest.approx(expected, rel=1e-4) and "reason" not in item.facts
    [zeros] = solve_uncalibrated({"x": torch.zeros_like(weight)}, scheme, recipe)
    assert zeros.facts is not None and zeros.facts["relative_error"] == 0


def test_an_overflowed_hessian_gives_no_loss() -> None:
    facts, _ = solved(summed(torch.full((200, 128), 1e25)), **ROUNDS)
    assert facts["method"] == "rtn" and "infinite" in facts["reason"]
    assert facts["loss"] is facts["rtn_loss"] is facts["norm"] is None
    dump_json(facts)


def test_the_largest_input_channel_is_compared_with_the_median_live_one() -> None:
    inputs = torch.ones(256, 64) * torch.tensor([-1.0, 1.0]).repeat(128)[:, None]
    inputs[:, 5] *= 30
    inputs[:, 6] = 0
    assert solved(summed(inputs), gauss(8, 64))[0]["channel_peak"] == pytest.approx(30)


def test_a_hessian_of_another_width_names_the_linear() -> None:
    narrow, wide = summed(gauss(400, 64)), gauss(8, 128)
    with pytest.raises(NumericError, match="128 channels for a linear of 64"):
        narrow.add(torch.zeros(2, 128))
    for method in ("gptq", "rtn"):
        with pytest.raises(NumericError, match=r"x: the Hessian is \[64, 64\] and the weight has 128"):
            solved(narrow, wide, method=method, metric="block")


#: Group 0 has a range of 1e8; 3 of its 64 weights are zero already.
def with_a_wide_range() -> Tensor:
    weight = 0.1 * gauss(8, 128)
    weight[2, :64] *= 1e-8 / weight[2, :64].abs().clamp_min(1e-2)
    weight[2, 5], weight[2, 7:10] = 1.0, 0.0
    weight[3, 64] = 1e-9  # one small weight among normal ones is no event
    return weight


@pytest.mark.parametrize("label", ["int4:g64", "int4:g64:asym", "fp6", "fp5", "int4:g64:24"])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_weights_that_vanish_beside_far_larger_ones_are_counted(label: str, method: str) -> None:
    scheme = Scheme.parse(label)
    weight = with_a_wide_range()
    if scheme.group_size is None:
        weight[2, 64:] = 0  # the group is the row
    hessian = summed(gauss(400, 128, seed=1))
    asked: dict[str, Any] = {
        "scheme": {"format": scheme.format.name, "symmetric": scheme.symmetric, "sparsity": scheme.sparsity}
        | {"group_size": scheme.group_size or "channel"},
        "method": method,
    }
    facts, value = solved(hessian, weight, label, **asked)
    lost = (value.dequantize() == 0) & (weight != 0)
    assert facts["zeroed"] == int(lost[2, :64].sum()) >= 30
    plain = weight.clone()
    plain[2] = 0.1
    assert "zeroed" not in solved(hessian, plain, label, **asked)[0]
