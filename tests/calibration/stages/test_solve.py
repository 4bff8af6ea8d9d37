"""One group of linears: errors name the right one, and every deviation from the recipe is reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantkit.algorithms import gptq, rtn
from quantkit.algorithms.hessian import Hessian
from quantkit.calibration.stages.solve import solve, solve_uncalibrated
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import NumericError
from quantkit.io.json_files import dump_json
from quantkit.progress import Progress
from quantkit.recipes.recipe import from_mapping

COARSE: dict[str, Any] = {"scheme": {"group_size": "channel"}, "clip": "none"}


def test_a_row_that_overflows_is_named_in_its_own_linear() -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    hessian = Hessian(32, "cpu")
    hessian.add(x)
    weights = {"a": x[:8].clone(), "b": x[8:16].clone()}
    weights["b"][3, 0] = 1e6
    recipe = from_mapping(COARSE)
    with pytest.raises(NumericError, match="b: row 3 "):
        solve(weights, dict.fromkeys(weights, recipe.scheme), hessian, recipe, Progress(quiet=True))


def test_a_linear_that_no_token_reaches_is_refused_or_rounded(capsys: pytest.CaptureFixture[str]) -> None:
    weights = {"expert": torch.randn(8, 128, generator=torch.Generator().manual_seed(0))}
    schemes = {"expert": Scheme.parse("int4:g64")}
    with pytest.raises(NumericError, match="expert: no calibration token"):
        solve(weights, schemes, Hessian(128, "cpu"), from_mapping({}), Progress(quiet=True))
    allowed = from_mapping({"gptq": {"on_unsolvable": "rtn"}})
    (item,) = solve(weights, schemes, Hessian(128, "cpu"), allowed, Progress(quiet=True))
    assert item.facts is not None
    assert (item.facts["method"], item.facts["tokens"]) == ("rtn", 0) and "no calibration" in item.facts["reason"]
    assert "expert" in capsys.readouterr().err


def test_few_tokens_and_dead_inputs_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    weights = {"late": torch.randn(8, 128, generator=torch.Generator().manual_seed(0))}
    schemes = {"late": Scheme.parse("int4:g64")}
    few = Hessian(128, "cpu")
    few.add(torch.randn(15, 128, generator=torch.Generator().manual_seed(1)))
    (item,) = solve(weights, schemes, few, from_mapping({}), Progress(quiet=True))
    assert "late: only 15 tokens" in capsys.readouterr().err
    assert item.facts is not None and item.facts["tokens"] == 15 and item.facts["loss"] <= item.facts["rtn_loss"]
    dead = Hessian(128, "cpu")
    dead.add(torch.zeros(200, 128))
    with pytest.raises(NumericError, match="late: "):
        solve(weights, schemes, dead, from_mapping({}), Progress(quiet=True))
    allowed = from_mapping({"gptq": {"on_unsolvable": "rtn"}})
    (item,) = solve(weights, schemes, dead, allowed, Progress(quiet=True))
    assert item.facts is not None and item.facts["method"] == "rtn" and item.facts["reason"]
    assert "late" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_relative_error_of_every_source_dtype(dtype: torch.dtype) -> None:
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    item = solve_uncalibrated("x", weight, Scheme.parse("int4:g64"), from_mapping({"method": "rtn"}))
    assert isinstance(item.value, QuantizedTensor) and item.facts is not None
    w = weight.double()
    expected = float((w - item.value.dequantize().double()).norm() / w.norm())
    assert item.facts["relative_error"] == pytest.approx(expected, rel=1e-4) and "reason" not in item.facts
    zeros = solve_uncalibrated("x", torch.zeros_like(weight), Scheme.parse("int4:g64"), from_mapping({"method": "rtn"}))
    assert zeros.facts is not None and zeros.facts["relative_error"] == 0


def test_an_overflowed_hessian_gives_no_loss() -> None:
    weights = {"x": torch.randn(8, 128, generator=torch.Generator().manual_seed(0))}
    huge = Hessian(128, "cpu")
    huge.add(torch.full((200, 128), 1e25))
    allowed = from_mapping({"gptq": {"on_unsolvable": "rtn"}})
    (item,) = solve(weights, {"x": Scheme.parse("int4:g64")}, huge, allowed, Progress(quiet=True))
    assert item.facts is not None and item.facts["method"] == "rtn" and "infinite" in item.facts["reason"]
    assert item.facts["loss"] is item.facts["rtn_loss"] is item.facts["norm"] is None
    dump_json(item.facts)


def test_the_largest_input_channel_is_compared_with_the_median_live_one() -> None:
    inputs = torch.ones(256, 64) * torch.tensor([-1.0, 1.0]).repeat(128)[:, None]
    inputs[:, 5] *= 30
    inputs[:, 6] = 0
    hessian = Hessian(64, "cpu")
    hessian.add(inputs)
    weights = {"x": torch.randn(8, 64, generator=torch.Generator().manual_seed(0))}
    (item,) = solve(weights, {"x": Scheme.parse("int4:g64")}, hessian, from_mapping({}), Progress(quiet=True))
    assert item.facts is not None and item.facts["channel_peak"] == pytest.approx(30)


def test_a_hessian_of_another_width_names_the_linear() -> None:
    narrow = Hessian(64, "cpu")
    narrow.add(torch.randn(400, 64, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(NumericError, match="128 channels for a linear of 64"):
        narrow.add(torch.zeros(2, 128))
    weights = {"wide": torch.randn(8, 128, generator=torch.Generator().manual_seed(0))}
    for method in ("gptq", "rtn"):
        recipe = from_mapping({"method": method, "metric": "block"})
        with pytest.raises(NumericError, match=r"wide: the Hessian is \[64, 64\] and the weight has 128"):
            solve(weights, {"wide": recipe.scheme}, narrow, recipe, Progress(quiet=True))
    for call in (
        lambda: rtn.quantize(weights["wide"], recipe.scheme, clip="search", metric="diag", hessian=narrow.matrix()),
        lambda: gptq.quantize(weights["wide"], recipe.scheme, narrow.matrix(), recipe.gptq),
    ):
        with pytest.raises(NumericError, match="128 input channels"):
            call()


#: Group 0 has a range of 1e8; 3 of its 64 weights are zero already.
def with_a_wide_range(dtype: torch.dtype) -> torch.Tensor:
    weight = 0.1 * torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    weight[2, :64] *= 1e-8 / weight[2, :64].abs().clamp_min(1e-2)
    weight[2, 5], weight[2, 7:10] = 1.0, 0.0
    weight[3, 64] = 1e-9  # one small weight among normal ones is no event
    return weight.to(dtype)


@pytest.mark.parametrize("label", ["int4:g64", "int4:g64:asym", "fp6", "fp5", "int4:g64:24"])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_weights_that_vanish_beside_far_larger_ones_are_counted(label: str, method: str) -> None:
    scheme = Scheme.parse(label)
    weight = with_a_wide_range(torch.float32)
    if scheme.group_size is None:
        weight[2, 64:] = 0  # the group is the row
    hessian = Hessian(128, "cpu")
    hessian.add(torch.randn(400, 128, generator=torch.Generator().manual_seed(1)))
    recipe = from_mapping(
        {
            "scheme": {"format": scheme.format.name, "symmetric": scheme.symmetric, "sparsity": scheme.sparsity}
            | {"group_size": scheme.group_size or "channel"},
            "method": method,
        }
    )
    (item,) = solve({"a": weight}, {"a": scheme}, hessian, recipe, Progress(quiet=True))
    assert item.facts is not None and isinstance(item.value, QuantizedTensor)
    lost = (item.value.dequantize() == 0) & (weight != 0)
    assert item.facts["zeroed"] == int(lost[2, :64].sum()) >= 30
    plain = weight.clone()
    plain[2] = 0.1
    (item,) = solve({"a": plain}, {"a": scheme}, hessian, recipe, Progress(quiet=True))
    assert item.facts is not None and "zeroed" not in item.facts
