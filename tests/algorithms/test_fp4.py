"""NVFP4 and MXFP4: every scale is one that the format stores, from rounding to tuning, and no row gets worse."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quantkit.algorithms import coordinate_descent, gptq, rtn
from quantkit.algorithms.block_tuning import TunedWeight
from quantkit.algorithms.options import Options
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import NumericError, RecipeError
from quantkit.layouts import LAYOUTS
from tests.algorithms.inputs import correlated, gauss, loss

LABELS = ("nvfp4", "mxfp4")
#: Every scale that solvers may choose.
SCALES = {
    "nvfp4": sorted((1 + m / 8) * 2.0**e for e in range(-13, 2) for m in range(8) if (1 + m / 8) * 2.0**e <= 3.5),
    "mxfp4": [2.0**e for e in range(-20, 14)],
}


def stored(tensor: QuantizedTensor) -> bool:
    return set(tensor.scales.flatten().tolist()) <= set(SCALES[tensor.scheme.format.name])


def weights(k: int = 128) -> Tensor:
    """Make rows of sizes from the least scale to the largest."""
    w = gauss(16, k)
    return w * torch.logspace(-5, 0, 16).unsqueeze(-1)


@pytest.mark.parametrize("label", LABELS)
def test_a_rounded_scale_is_the_one_of_its_rule(label: str) -> None:
    """NVFP4 takes the scale nearest to a / 6, MXFP4 the least one with a < 7 scales."""
    w = weights()
    tensor, _ = rtn.quantize(w, Scheme.parse(label))
    size = tensor.scheme.group_size or 0
    for a, found in zip(w.abs().view(-1, size).amax(1).tolist(), tensor.scales.flatten().tolist(), strict=True):
        if label == "nvfp4":
            assert abs(found - a / 6) == min(abs(scale - a / 6) for scale in SCALES[label])
        else:
            assert found == next(scale for scale in SCALES[label] if a < 7 * scale)
    assert stored(tensor) and stored(rtn.quantize(w, tensor.scheme, clip="search")[0])
    again, _ = rtn.quantize(tensor.dequantize(), tensor.scheme)
    assert torch.equal(again.dequantize(), tensor.dequantize())
    searched, _ = rtn.quantize(w, tensor.scheme, clip="search")
    again, _ = rtn.quantize(searched.dequantize(), tensor.scheme, clip="search")
    assert torch.equal(again.dequantize(), searched.dequantize())


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_solved_and_tuned_scales_are_stored_ones(label: str, dtype: torch.dtype) -> None:
    w, h = weights().to(dtype), correlated(128)
    scheme = Scheme.parse(label)
    for options in (Options(descent=2, refit=True), Options(act_order="off")):
        solution = gptq.quantize(w, scheme, h.to(dtype if dtype == torch.float64 else torch.float32), options)
        assert stored(solution.tensor) and (solution.loss <= solution.rtn_loss).all()
        assert (
            LAYOUTS["compressed-tensors"]
            .unpack(LAYOUTS["compressed-tensors"].pack(solution.tensor), scheme)
            .equal(solution.tensor)
        )
    tuned = TunedWeight(w, solution.tensor)
    for _ in range(3):
        tuned.descend(torch.randn(w.shape), 0.3)
    assert stored(tuned.tensor()) and not torch.equal(tuned.tensor().scales, solution.tensor.scales)


@pytest.mark.parametrize("label", LABELS)
def test_descent_raises_no_loss_and_a_refit_leaves_scales_that_are_stored_in_eight_bits(label: str) -> None:
    w, h = gauss(16, 128), correlated(128).float()
    w[3], w[5, :32] = 0, 0
    tensor, _ = rtn.quantize(w, Scheme.parse(label))
    found, changes, *_ = coordinate_descent.refine(w, tensor, h, descent=3, refit=True)
    assert (loss(w, found, h) <= loss(w, tensor, h) * (1 + 1e-6)).all()
    assert loss(w, found, h).sum() < 0.9 * loss(w, tensor, h).sum()
    assert torch.equal(found.scales, tensor.scales) and changes.keys() == {"descent_changed"}


@pytest.mark.parametrize(("label", "most"), [("nvfp4", 21), ("mxfp4", 7 * 2.0**13)])
def test_a_weight_past_the_end_of_the_format_is_refused_by_row(label: str, most: float) -> None:
    w = gauss(7, 64)
    w[5, 3] = math.nextafter(most, 0)
    for clip in ("none", "search"):
        assert stored(rtn.quantize(w, Scheme.parse(label), clip=clip)[0])  # type: ignore[arg-type]
        w[5, 4] = 1.1 * most
        with pytest.raises(NumericError, match=rf"row 5 .* the end of {label}: leave it dense"):
            rtn.quantize(w, Scheme.parse(label), clip=clip)  # type: ignore[arg-type]
        w[5, 4] = 0


@pytest.mark.parametrize("wrong", ["nvfp4:g32", "nvfp4:channel", "mxfp4:g16", "mxfp4:asym", "nvfp4:24"])
def test_other_groups_zero_points_and_sparsity_are_refused(wrong: str) -> None:
    with pytest.raises(RecipeError, match=r"groups of|symmetric"):
        Scheme.parse(wrong)
