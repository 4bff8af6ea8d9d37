"""Learned weights begin as their records, keep what is fixed, and have the gradients of what they compute."""

from __future__ import annotations

import pytest
import torch

from quantkit.algorithms import rtn
from quantkit.algorithms.learned_weight import LearnedVector, LearnedWeight
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme

SCHEMES = ["int4:g64", "int4:g64:asym", "int4:g64:24", "fp6", "fp5"]


def weight(dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (0.02 * torch.randn(32, 128, generator=torch.Generator().manual_seed(0))).to(dtype)


def rounded(label: str, dtype: torch.dtype = torch.float16) -> QuantizedTensor:
    return rtn.quantize(weight(dtype), Scheme.parse(label), clip="search", signed=label == "int4:g64")[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("label", SCHEMES)
def test_nothing_changes_before_the_first_step(label: str, codes: bool, dtype: torch.dtype) -> None:
    start = rounded(label, dtype)
    learned = LearnedWeight(start, dtype, weight(dtype) if codes else None)
    assert torch.equal(learned.dense(torch.float32), start.dequantize())
    assert torch.equal(learned.record().dequantize(), start.dequantize())
    if not codes:
        assert learned.record().equal(start)


@pytest.mark.parametrize("label", SCHEMES)
def test_codes_are_fixed_unless_they_are_learned(label: str) -> None:
    start = rounded(label)
    learned = LearnedWeight(start, torch.float16)
    with torch.no_grad():
        learned.factors.normal_()
    assert torch.equal(learned.record().codes, start.codes)
    assert torch.equal(learned.record().scales.sign(), start.scales.sign())
    assert not torch.equal(learned.record().scales, start.scales)
    assert torch.equal(learned.dense(torch.float32), learned.record().dequantize()), "what is learned is what is stored"


@pytest.mark.parametrize("label", SCHEMES)
def test_learned_codes_stay_in_range_and_pruned_weights_zero(label: str) -> None:
    start = rounded(label)
    learned = LearnedWeight(start, torch.float16, weight())
    assert learned.positions is not None
    with torch.no_grad():
        learned.positions.add_(30 * torch.randn(start.shape, generator=torch.Generator().manual_seed(1)))
    found = learned.record()  # refuses codes out of range, and more than two of four
    assert not torch.equal(found.codes, start.codes)
    assert torch.equal(learned.dense(torch.float32), found.dequantize())


def test_scales_are_values_that_readers_of_the_source_dtype_see() -> None:
    learned = LearnedWeight(rounded("int4:g64", torch.bfloat16), torch.bfloat16)
    with torch.no_grad():
        learned.factors.normal_()
    scales = learned.record().scales
    assert torch.equal(scales.bfloat16().half(), scales)


def test_a_scale_never_grows_past_float16() -> None:
    start = QuantizedTensor(Scheme.parse("int4:g64"), torch.full((1, 64), 15).byte(), torch.full((1, 1), 8000.0).half())
    learned = LearnedWeight(start, torch.float16)
    with torch.no_grad():
        learned.factors.fill_(3.0)
    assert learned.record().dequantize(torch.float16).isfinite().all()


@pytest.mark.parametrize("label", SCHEMES)
def test_the_gradient_of_a_scale_is_that_of_the_weight(label: str) -> None:
    learned, start = LearnedWeight(rounded(label), torch.float16, weight()), rounded(label)
    goal = weight().float() + 0.01
    ((learned.dense(torch.float32) - goal) ** 2).sum().backward()
    scales = start.scales.double().requires_grad_()
    steps = (start.dequantize().double().view(*scales.shape, -1) / start.scales.double().unsqueeze(-1)).detach()
    (((steps * scales.unsqueeze(-1)).view(goal.shape) - goal) ** 2).sum().backward()
    assert scales.grad is not None and learned.positions is not None and learned.positions.grad is not None
    torch.testing.assert_close(learned.factors.grad, (scales.grad * scales).float(), rtol=1e-3, atol=1e-6)
    slope = 2 * (start.dequantize() - goal).view(*scales.shape, -1) * start.scales.float().unsqueeze(-1)
    torch.testing.assert_close(learned.positions.grad, slope.view(goal.shape))


def test_a_vector_keeps_its_dtype_and_moves_by_its_size() -> None:
    for start in (torch.full((8,), 3.0, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.float16)):
        learned = LearnedVector(start)
        assert torch.equal(learned.record(), start)
        with torch.no_grad():
            learned.moves.fill_(0.5)
        assert learned.record().dtype == start.dtype
        assert float(learned.record()[0]) == (4.5 if start[0] else 0.5)
