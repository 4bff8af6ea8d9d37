"""Linears that share an input, and the sums of their Hessians: weights of tokens, checks, passes over experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit.algorithms.hessian import CHUNK, LONG_CHUNK, Hessian
from quantkit.calibration import budget
from quantkit.calibration.run import Run
from quantkit.calibration.stages import hessians
from quantkit.calibration.stages.base import Group, Task, find_groups, tasks
from quantkit.calibration.stages.hessians import Hessians, collect, sum_once, token_weights
from quantkit.models.weights import load_dense_model
from quantkit.recipes.recipe import from_mapping
from tests.calibration.runs import (
    COARSE,
    GROUPS,
    PLAIN_SUM,
    digests,
    distance,
    plain_hessian,
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


@pytest.mark.parametrize("family", GROUPS)
def test_groups_and_hessians_are_those_of_plain_forwards(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    block = start(folders[family], from_mapping(PLAIN_SUM), tmp_path)
    model, reference = block.run.model, load_dense_model(block.run.src)
    for index in (0, 1):
        if index:
            block.stream.forward(0)
            model.unload_block(0)
            model.load_block(1)
            block.index = 1
        groups = find_groups(block, model.targets(index))
        assert [" ".join(sorted(n.split(".")[-1] for n in g.linears)) for g in groups] == [
            " ".join(sorted(g.split())) for g in GROUPS[family]
        ]
        assert all(g.once for g in groups)
        together = collect(block, groups)
        for group, hessian in zip(groups, together, strict=True):
            h = hessian.matrix()
            assert torch.equal(h, collect(block, [group])[0].matrix())  # stopping early changes nothing
            assert hessian.tokens == sum(len(s) for s in sequences())
            for linear in group.linears:
                assert distance(h, plain_hessian(reference, model.paths[linear], sequences())) < 1e-6


def test_experts_are_grouped_after_a_token_has_chosen_them(three: Path, tmp_path: Path) -> None:
    """One linear is called for some documents only, and one is called twice."""
    block = start(three, from_mapping(COARSE), tmp_path)
    mlp = block.run.model.module.get_submodule("model.layers.0").mlp
    plain = mlp.forward

    def routed(x: Tensor) -> Tensor:
        if x.shape[1] == 17:  # only the third document reaches the expert
            return plain(x) + mlp.gate_proj(x[:, :4]).sum()
        return x

    mlp.forward = routed
    groups = find_groups(block, list(block.goals))
    by_name = {g.linears[0].split(".")[-1]: g for g in groups}
    tokens = {name: collect(block, [group])[0].tokens for name, group in by_name.items()}
    assert by_name["gate_proj"] == Group(("model.layers.0.mlp.gate_proj",), once=False)
    assert by_name["up_proj"].once and by_name["down_proj"].once
    assert (tokens["gate_proj"], tokens["up_proj"], tokens["down_proj"]) == (17 + 4, 17, 17)
    mlp.forward = lambda x: x
    block.stream.waiting.close()
    unreached = find_groups(block, list(block.goals))[2:]
    assert [len(g.linears) for g in unreached] == [1, 1, 1]
    assert all(collect(block, [g])[0].tokens == 0 for g in unreached)


def test_experts_are_calibrated_on_their_own_tokens_or_on_all_of_the_layer(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    block = start(folders["mixtral"], from_mapping(PLAIN_SUM), tmp_path)
    model, reference = block.run.model, load_dense_model(block.run.src)
    experts = "model.layers.0.block_sparse_moe.experts"
    pairs = [Group((f"{experts}.{e}.w1", f"{experts}.{e}.w3")) for e in range(4)]
    downs = [Group((f"{experts}.{e}.w2",)) for e in range(4)]
    offered, found = list[set[Group]](), dict[Group, Task]()
    for some in tasks(block):
        offered.append({task.group for task in some})
        Hessians().work(block, some)
        found |= {task.group: task for task in some}
    assert [len(groups) for groups in offered[:2]] == [1, 1]
    assert set(pairs) in offered and set(downs) in offered
    again = [groups for groups in offered[2:] if groups not in (set(pairs), set(downs))]
    assert {name for groups in again for group in groups for name in group.linears} == block.starved.keys()
    everything = sum(len(s) for s in sequences())
    for group, task in found.items():
        facts = task.facts[group.linears[0]]
        assert task.hessian is not None
        if facts.get("moe") == "routed":
            assert 128 <= task.hessian.tokens < everything
            expected = plain_hessian(reference, model.paths[group.linears[0]], sequences())
            assert distance(task.hessian.matrix(), expected) < 1e-6
        else:
            assert task.hessian.tokens == everything and ("few_routed" in facts) == (group.linears[0] in block.starved)
