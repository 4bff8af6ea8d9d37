"""Tuning by gradients: codes that leave their grid or their neighbourhood, scales that are not those stored."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from quantkit.algorithms import rtn
from quantkit.algorithms.block_tuning import FACTORS, SPARSE_BOUND, TunedWeight
from quantkit.algorithms.numerics import Grid, encode
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.layouts.recast import recast
from tests.algorithms.inputs import gauss

LABELS = ("int4:g32", "int4:channel", "int4:g32:asym", "fp6:channel", "fp5:g32", "fp6-e2m3:channel", "int4:g32:24")


def rounded(w: Tensor, label: str, signed: bool = False) -> QuantizedTensor:
    return rtn.quantize(w, Scheme.parse(label), clip="search", signed=signed)[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("label", LABELS)
def test_tuning_starts_at_the_codes_nearest_to_the_weight_and_at_the_given_scales(
    label: str, dtype: torch.dtype
) -> None:
    w = gauss(16, 64).to(dtype)
    w[3] = 0
    other = rounded(w + 0.3 * gauss(16, 64, seed=1).to(dtype), label)  # codes that are not nearest to the weight
    for solved in (rounded(w, label), other):
        found = TunedWeight(w, solved).tensor()
        if solved.scheme.sparsity is None:
            codes = encode(w, solved.scheme, Grid(solved.scales, solved.zeros))
            assert torch.equal(found.dequantize(), dataclasses.replace(solved, codes=codes).dequantize())
        else:  # the codes go with the mask
            assert found.equal(solved)


@pytest.mark.parametrize("label", LABELS)
def test_tuned_codes_stay_next_to_the_weight_and_on_their_grid(label: str) -> None:
    w = gauss(16, 64).float()
    start = rounded(w, label, signed=label == "int4:channel")
    tuned = TunedWeight(w, start)
    for step in range(30):
        tuned.descend(gauss(16, 64, seed=step).float(), 0.3)
    found = tuned.tensor()  # which checks codes, shapes and the 2:4 pattern
    assert not torch.equal(found.codes, start.codes)
    assert torch.equal(tuned.dense(), found.dequantize())
    assert start.zeros is None or torch.equal(found.zeros, start.zeros)
    ratio = found.scales.float() / start.scales.float()
    assert ratio.min() > FACTORS[0] - 0.01 and ratio.max() < FACTORS[1] + 0.01
    ranks = [sorted(set(start.scheme.format.values)).index(value) for value in start.scheme.format.values]
    moves = torch.tensor(ranks)[found.codes.int()] - torch.tensor(ranks)[start.codes.int()]
    if start.scheme.sparsity is None:  # to the other side of the weight only
        assert moves.abs().max() == 1
        rest = w.view_as(start.values()) / start.scales.float().unsqueeze(-1) - start.values()
        assert bool((moves.view_as(rest) * rest >= 0).all())
    if start.scheme.sparsity:
        assert 1 < moves.abs().max() <= SPARSE_BOUND
        zero = start.scheme.format.zero_code
        assert bool((found.codes[start.codes == zero] == zero).all())


def test_padding_is_not_tuned() -> None:
    w = gauss(10, 48).float()
    scheme = Scheme.parse("int4:g16")
    start = recast(rounded(w, scheme.label), scheme, (16, 64))
    tuned = TunedWeight(w, start)
    for step in range(10):
        tuned.descend(gauss(10, 48, seed=step).float(), 0.3)
    found = tuned.tensor()
    assert found.shape == (16, 64) and torch.equal(tuned.dense(), found.dequantize()[:10, :48])
    assert torch.equal(found.codes[10:], start.codes[10:]) and torch.equal(found.codes[:, 48:], start.codes[:, 48:])
    assert torch.equal(found.scales[10:], start.scales[10:])


@pytest.mark.parametrize("label", LABELS)
def test_tuning_lowers_the_error_of_an_output(label: str) -> None:
    w, x = gauss(16, 64).float(), gauss(256, 64, seed=1).float()
    target = w + 0.1 * gauss(16, 64, seed=2)  # what the block needs of this weight, now that others have errors
    tuned = TunedWeight(w, rounded(w, label))
    losses = []
    for step in range(100):
        error = (tuned.dense() - target).float() @ x.T
        losses.append(float(error.square().sum()))
        tuned.descend(error @ x, 0.01 * (1 - step / 100))
    assert losses[-1] < 0.9 * losses[0]
    assert tuned.tensor().scales.dtype == torch.float16


def test_a_scale_never_overflows_float16() -> None:
    w = torch.full((2, 32), 60000.0)
    start = rounded(w, "int4:g32")
    tuned = TunedWeight(w, start)
    for _ in range(100):
        tuned.descend(-torch.ones(2, 32), 0.05)
    assert bool(torch.isfinite(tuned.tensor().dequantize(torch.float16)).all())
