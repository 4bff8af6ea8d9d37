"""Tests of 2:4 masks: exactly two stay, the larger ones, and the lower index on ties; other weights are refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from quantkit.core import sparsity
from quantkit.core.sparsity import best_two, check, mask, quads, weight_mask
from quantkit.errors import LayoutError


def slow_mask(scores: Tensor) -> Tensor:
    kept = torch.zeros_like(scores, dtype=torch.bool)
    for row, values in enumerate(scores.tolist()):
        for a in range(0, len(values), 4):
            for j in sorted(range(a, a + 4), key=lambda j: (-values[j], j))[:2]:
                kept[row, j] = True
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_pattern_of_ties_keeps_the_lower_indices(dtype: torch.dtype) -> None:
    patterns = torch.tensor(list(itertools.product([0, 1, 2, 3], repeat=4)), dtype=dtype)
    found = mask(patterns)
    assert torch.equal(found, slow_mask(patterns)) and (found.sum(1) == 2).all()
    assert torch.equal(found, best_two(patterns.T).T)
    assert mask(torch.full((1, 4), torch.inf)).tolist() == [[True, True, False, False]]


def test_the_block_size_does_not_change_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.rand(37, 64, generator=torch.Generator().manual_seed(0))
    whole = mask(scores)
    monkeypatch.setattr(sparsity, "BLOCK", 300)
    assert torch.equal(mask(scores), whole)
    assert torch.equal(mask(scores.T.contiguous().T), whole)


def test_magnitudes_of_half_precision_tie_whatever_the_sign() -> None:
    weight = torch.tensor([[-1.0, 1.0, 1.0, -1.0, 0.0, -0.0, 65504, -65504]]).half()
    assert weight_mask(weight).tolist() == [[True, True, False, False, False, False, True, True]]
    tiny = torch.tensor([[1e-30, 2e-30, 3e-30, 4e-30]])  # their squares underflow to zero
    assert weight_mask(tiny).tolist() == [[False, False, True, True]]


def test_wanda_multiplies_by_the_root_of_the_diagonal() -> None:
    weight, diagonal = torch.tensor([[3.0, 2.0, 1.0, 1.5]]), torch.tensor([1.0, 1.0, 16.0, 16.0])
    assert weight_mask(weight).tolist() == [[True, True, False, False]]
    assert weight_mask(weight, diagonal).tolist() == [[False, False, True, True]]


@pytest.mark.parametrize("k", [1, 2, 6, 1023])
def test_a_row_that_four_does_not_divide_is_refused(k: int) -> None:
    for refused in (lambda: quads(k), lambda: mask(torch.ones(2, k)), lambda: check(torch.zeros(2, k).bool())):
        with pytest.raises(LayoutError, match=f"multiple of 4, and it is {k}: --skip"):
            refused()


@pytest.mark.parametrize("zero", [0, 8, 255])
def test_every_code_but_zero_counts_as_nonzero(zero: int) -> None:
    values = torch.full((256, 8), zero, dtype=torch.uint8)
    values[:, 5:] = torch.arange(256, dtype=torch.uint8).view(-1, 1)
    with pytest.raises(LayoutError, match=f"255 of 512 quads .* row {int(zero == 0)}, columns 4 to 7"):
        check(values, zero)
    values[:, 6] = zero
    check(values, zero)
    check(values.t().contiguous().t(), zero)
