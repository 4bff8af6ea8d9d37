"""Sums of Hessians: weights of tokens, checks, and the number of passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantkit.algorithms.hessian import CHUNK, LONG_CHUNK, Hessian
from quantkit.calibration import budget
from quantkit.calibration.run import Run
from quantkit.calibration.stages import hessians
from quantkit.calibration.stages.base import Group, find_groups
from quantkit.calibration.stages.hessians import collect, sum_once, token_weights
from quantkit.recipes.recipe import from_mapping
from tests.calibration.runs import (
    COARSE,
    PLAIN_SUM,
    digests,
    quantized,
    sequences,
    start,
)


def test_the_first_token_weighs_more_where_a_norm_returns_the_input(folders: dict[str, Path], tmp_path: Path) -> None:
    block, flat = (start(folders["llama"], from_mapping(recipe), tmp_path) for recipe in (COARSE, PLAIN_SUM))
    groups = find_groups(block, list(block.goals))
    assert [group.normalised for group in groups] == [True, False, True, False]  # q k v, o, gate up, down
    for group, found, plain in zip(groups, collect(block, groups), collect(flat, groups), strict=True):
        assert torch.equal(found.matrix(), plain.matrix()) != group.normalised, group
    weights = token_weights(block, [0])
    tokens = len(sequences()[0])
    assert weights.shape == (1, tokens) and weights[0, 0] == max(1, 0.1 * tokens) and (weights[0, 1:] == 1).all()


def test_sums_that_are_checked_in_the_end_are_those_that_are_checked_at_once(three: Path, tmp_path: Path) -> None:
    block = start(three, from_mapping(COARSE), tmp_path)
    groups = find_groups(block, list(block.goals))
    late, at_once = (sum_once(block, groups, checks) or [] for checks in (False, True))
    for a, b in zip(late, at_once, strict=True):
        assert torch.equal(a.matrix(), b.matrix()) and not a.may_be_broken()
    block.stream.activations.get(1).hidden[5, 7] = torch.nan
    broken = sum_once(block, groups, False) or []
    assert len(broken) == len(late) == 4 and all(each.may_be_broken() for each in broken)


@pytest.mark.gpu
def test_experts_on_a_gpu_have_short_chunks_in_any_number_of_passes(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = set[tuple[bool, int]]()
    new = hessians.new_hessian

    def recorded(run: Run, group: Group, checks: bool = True) -> Hessian:
        made = new(run, group, checks)
        chunks.add((group.linears[0] in run.model.experts, made.chunk))
        return made

    monkeypatch.setattr(hessians, "new_hessian", recorded)
    at_once, _ = quantized(folders["qwen3_moe"], from_mapping(COARSE), tmp_path, "cuda")
    assert chunks == {(True, CHUNK), (False, LONG_CHUNK)}
    monkeypatch.setattr(budget, "HESSIAN_BYTES", 1)
    one_by_one, _ = quantized(folders["qwen3_moe"], from_mapping(COARSE), tmp_path, "cuda")
    assert digests(at_once) == digests(one_by_one)
