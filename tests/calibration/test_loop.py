"""The loop over blocks: what each group is calibrated on, what ends a run, and how a stopped one continues."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.census import families
from quantkit.calibration.budget import SAVED_BLOCKS
from quantkit.calibration.loop import new_run
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import Item
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.errors import NumericError, RecipeError
from quantkit.models.block_runner import BlockRunner
from quantkit.models.weights import load_dense_model
from quantkit.progress import Progress
from quantkit.recipes.recipe import from_mapping
from tests.calibration.runs import (
    COARSE,
    GROUPS,
    PLAIN_SUM,
    broken,
    continued,
    digests,
    interrupted,
    plain_hessian,
    quantized,
    resumed,
    sequences,
)
from tests.tiny_models import write_model


@pytest.mark.parametrize(("family", "sequential"), [("llama", True), ("gpt_neox", True), ("llama", False)])
def test_each_group_is_calibrated_on_quantized_earlier_ones(
    family: str, sequential: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    recipe = from_mapping({**PLAIN_SUM, "true_sequential": sequential})
    items, _ = quantized(folders[family], recipe, tmp_path)
    src = Checkpoint(folders[family])
    model, reference = BlockRunner(src, device="cpu"), load_dense_model(src)
    for block in (0, 1):
        run_order = [[n for n in model.targets(block) if n.split(".")[-1] in g.split()] for g in GROUPS[family]]
        known: dict[str, Tensor] = {}
        if not sequential:
            known = {g[0]: plain_hessian(reference, g[0], sequences()) for g in run_order}
        for group in run_order:
            h = known[group[0]] if group[0] in known else plain_hessian(reference, group[0], sequences())
            for linear in group:
                item = items[f"{linear}.weight"]
                assert item.facts is not None and isinstance(item.value, QuantizedTensor)
                w = src.get(f"{linear}.weight").double()
                d = w - item.value.dequantize().double()
                for name, x, within in (("norm", w, 1e-6), ("loss", d, 1e-4)):
                    expected = float(((x @ h) * x).sum())
                    assert item.facts[name] == pytest.approx(expected, rel=within), (linear, name)
            for linear in group:
                value = items[f"{linear}.weight"].value
                assert isinstance(value, QuantizedTensor)
                reference.get_submodule(linear).weight.data = value.dequantize()


@pytest.mark.parametrize("family", ["qwen2", "opt"])
def test_only_linears_of_blocks_change(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    items, commits = quantized(folders[family], from_mapping(COARSE), tmp_path)
    src = Checkpoint(folders[family])
    model = BlockRunner(src, device="cpu")
    expected = {f"{linear}.weight" for block in (0, 1) for linear in model.targets(block)}
    assert set(digests(items)) == expected
    for name, item in items.items():
        if name not in expected:
            assert isinstance(item.value, Tensor) and torch.equal(item.value, src.get(name))
            assert item.value.dtype == src.dtype(name)
    assert [facts["block"] for facts in commits] == [0, 1, "rest"]
    assert all(facts["loss"] <= facts["rtn_loss"] for facts in (items[name].facts or {} for name in expected))
    assert {"load", "forward", "hessian", "solve"} <= set(commits[0]["phases"])


def test_skipped_and_overridden_members_of_a_group(folders: dict[str, Path], tmp_path: Path) -> None:
    recipe = from_mapping({**COARSE, "skip": ["lm_head", "k_proj"], "overrides": {"v_proj": "int4:g64:asym"}})
    items, _ = quantized(folders["llama"], recipe, tmp_path)
    prefix = "model.layers.0.self_attn"
    assert isinstance(items[f"{prefix}.k_proj.weight"].value, Tensor)
    found = {n: items[f"{prefix}.{n}.weight"].value for n in ("q_proj", "v_proj")}
    labels = {n: value.scheme.label for n, value in found.items() if isinstance(value, QuantizedTensor)}
    assert labels == {"q_proj": "int4:channel", "v_proj": "int4:g64:asym"}


def test_rtn_with_a_hessian_runs_in_the_loop(folders: dict[str, Path], tmp_path: Path) -> None:
    losses = {}
    for metric in ("diag", "block"):
        recipe = from_mapping({"method": "rtn", "clip": "search", "metric": metric})
        items, _ = quantized(folders["llama"], recipe, tmp_path)
        facts = [item.facts for item in items.values() if item.facts]
        assert {f["method"] for f in facts} == {"rtn"}
        losses[metric] = sum(f["loss"] for f in facts[:3])  # the first group, whose input is not quantized
    assert losses["block"] < losses["diag"]


def test_values_that_are_not_finite_stop_the_run_with_a_name(three: Path, tmp_path: Path) -> None:
    recipe = from_mapping(COARSE)
    token = int(sequences()[1][50])
    with pytest.raises(NumericError, match=r"layers\.0\.self_attn\.q_proj, calibration document \d: 128 of"):
        embedding = broken(three, tmp_path / "a", "model.embed_tokens.weight", (token,), float("inf"))
        quantized(embedding, recipe, tmp_path)
    with pytest.raises(NumericError, match=r"layers\.1\.self_attn\.q_proj, calibration document 0: "):
        quantized(
            broken(three, tmp_path / "b", "model.layers.1.input_layernorm.weight", (3,), float("nan")), recipe, tmp_path
        )
    with pytest.raises(NumericError, match=r"layers\.0\.self_attn\.v_proj: 1 of 16384 weights.*\[2, 5\]"):
        name = "model.layers.0.self_attn.v_proj.weight"
        quantized(broken(three, tmp_path / "c", name, (2, 5), float("nan")), recipe, tmp_path)


def test_sequences_that_the_model_cannot_take_are_refused(three: Path, tmp_path: Path) -> None:
    src = Checkpoint(three)
    for bad, says in (
        ([], "no calibration"),
        ([torch.zeros(513, dtype=torch.int64)], "513 tokens, the model takes 512"),
    ):
        with pytest.raises(RecipeError, match=says):
            new_run(from_mapping(COARSE), BlockRunner(src, device="cpu"), bad, tmp_path)


def test_cross_attention_is_rounded_and_the_report_says_why(folders: dict[str, Path], tmp_path: Path) -> None:
    items, _ = quantized(folders["bart"], from_mapping(COARSE), tmp_path)
    facts = {name: item.facts for name, item in items.items() if item.facts}
    cross = {name for name in facts if ".encoder_attn." in name}
    assert len(cross) == 4 and len(facts) == 10
    assert {facts[name].get("reason") for name in cross} == {"text alone never calls cross attention"}
    assert {facts[name]["method"] for name in facts.keys() - cross} == {"gptq"}


@pytest.fixture(scope="module")
def stopped(three: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, dict[str, Item]]]:
    """Return a function that gives the folder of a run that ended after some blocks, and what it had yielded."""

    @cache
    def after(blocks: int) -> tuple[Path, dict[str, Item]]:
        partial = tmp_path_factory.mktemp("stopped")
        return partial, interrupted(Checkpoint(three), from_mapping(COARSE), partial, blocks)

    return after


@pytest.mark.parametrize("recipe", [COARSE, {**COARSE, "tune": 2, "output_aware": True}], ids=["gptq", "tuned"])
def test_held_out_text_changes_no_bit_and_a_stop_changes_no_figure(
    recipe: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    """Documents of one length, which would run together, and tuning, which takes sequences by number."""
    src, docs = Checkpoint(folders["llama"]), sequences((20,) * 9)
    held_out = {"near": sequences((20, 20)), "far": [torch.full((20,), 7)]}
    plain = interrupted(src, from_mapping(recipe), tmp_path / "plain", 3, docs)
    whole = interrupted(src, from_mapping(recipe), tmp_path / "whole", 3, docs, held_out=held_out)
    first = interrupted(src, from_mapping(recipe), tmp_path / "stopped", 1, docs, held_out=held_out)
    second = resumed(src, from_mapping(recipe), tmp_path / "stopped", Progress(), docs, held_out=held_out)
    assert digests(plain) == digests(whole) == digests(first) | digests(second)

    def figures(items: dict[str, Item]) -> dict[str, Any]:
        return {name: (items[name].facts or {}).get("held_out") for name in digests(items)}

    assert figures(whole) == figures(first) | figures(second)
    found = [sorted(each) for each in figures(whole).values() if each]
    assert found.count(["far", "near"]) == len(found) and set(figures(plain).values()) == {None}
    assert found or "tune" in recipe  # codes that tuning moved have other losses


@pytest.mark.parametrize(("blocks", "damage"), [(1, "none"), (1, "flipped"), (2, "gone"), (4, "gone")])
def test_a_stopped_run_continues_with_the_same_bits(
    blocks: int,
    damage: str,
    three: Path,
    whole: dict[str, Item],
    stopped: Callable[[int], tuple[Path, dict[str, Item]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, first = stopped(blocks)
    partial = Path(shutil.copytree(before, tmp_path / "partial"))
    for path in partial.glob("activations-*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= damage == "flipped"
        path.write_bytes(data)
        if damage == "gone":
            path.unlink()
    second = resumed(Checkpoint(three), from_mapping(COARSE), partial, Progress())
    assert not first.keys() & second.keys()
    assert digests(first) | digests(second) == digests(whole)
    assert first.keys() | second.keys() == whole.keys()
    warned = "computed again" in capsys.readouterr().err
    assert warned == (damage != "none" and blocks < 3)  # after the last block nothing needs activations


def test_a_stop_between_snapshot_and_commit_loses_one_block_only(
    three: Path, whole: dict[str, Item], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src, recipe, partial = Checkpoint(three), from_mapping(COARSE), tmp_path / "partial"
    interrupted(src, recipe, partial, 2, before_commit=True)  # the snapshot is written, the commit is not
    second = resumed(src, recipe, partial, Progress())
    assert "computed again" not in capsys.readouterr().err  # the snapshot of the last commit was not overwritten
    assert {n: d for n, d in digests(whole).items() if ".layers.0." not in n} == digests(second)


def test_blocks_without_a_snapshot_are_computed_again_with_the_same_bits(
    three: Path,
    whole: dict[str, Item],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(SAVED_BLOCKS, "cpu", 2)
    src, recipe, partial = Checkpoint(three), from_mapping(COARSE), tmp_path / "partial"
    first = interrupted(src, recipe, partial, 3)
    assert len(list(partial.glob("activations-*"))) == 1
    assert continued(first, src, recipe, partial) == digests(whole)
    assert "computed again" not in capsys.readouterr().err  # that is said of snapshots that should be there


@pytest.mark.gpu
@pytest.mark.parametrize(("blocks", "every"), [(1, 8), (2, 8), (2, 1), (3, 2)])
def test_a_stopped_run_on_a_gpu_continues_with_the_same_bits(
    blocks: int, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SAVED_BLOCKS, "cuda", every)
    changes = {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024}
    folder, recipe = write_model("llama", tmp_path / "model", **changes), from_mapping({})
    docs = [torch.randint(256, (n,), generator=torch.Generator().manual_seed(n)) for n in (500, 500, 500, 7, 500, 500)]
    partials = [tmp_path / "whole", tmp_path / "stopped"]
    src = Checkpoint(folder)
    whole = interrupted(src, recipe, partials[0], 5, docs, "cuda")
    first = interrupted(src, recipe, partials[1], blocks, docs, "cuda")
    assert continued(first, src, recipe, partials[1], docs, device="cuda") == digests(whole)
    assert bool(list(partials[1].glob("activations-*"))) == (every < 4)


@pytest.mark.parametrize(("family", "damage"), [("glm_moe_dsa", "none"), ("gpt_oss", "gone")])
def test_a_stopped_run_of_experts_or_of_blocks_that_pass_tensors_on_continues_with_the_same_bits(
    family: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, recipe = families.write(family, tmp_path / "m"), from_mapping(COARSE)
    whole, commits = quantized(folder, recipe, tmp_path)
    src, last = Checkpoint(folder), len(commits) - 2
    partial = tmp_path / "stopped"
    first = interrupted(src, recipe, partial, last)
    if damage == "gone":
        (partial / f"activations-{(last - 1) % 2}.bin").unlink()
    assert continued(first, src, recipe, partial) == digests(whole)
    assert ("computed again" in capsys.readouterr().err) == (damage == "gone")
