"""Pruning whole models 2:4: zeros by every rule, packing, kill and resume, and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quantkit
from quantkit.calibration import loop
from quantkit.checkpoint import report
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.sparsity import check, weight_mask
from quantkit.errors import RecipeError
from quantkit.io import files
from quantkit.pipeline import quantize
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import from_mapping, pruning_from_mapping
from quantkit.reporting.summary import summary
from tests.algorithms.inputs import is_24
from tests.command_line import call, refused
from tests.faults import Killed, count, faults, killer
from tests.folders import hashes
from tests.tiny_models import write_model

RULES = ("magnitude", "wanda", "sparsegpt")
TEXT = ("--samples", 8, "--max-length", 128)


def blocks_only(name: str) -> bool:
    return name.endswith("_proj.weight")


def values(folder: Path) -> Mapping[str, Tensor]:
    src = Checkpoint(folder)
    return {name: src.get(name) for name in src.names()}


@pytest.fixture(scope="module")
def pruned(folders: dict[str, Path], calib: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Llama pruned by each rule, and one with biases and tied embeddings; no test changes them."""
    root = tmp_path_factory.mktemp("pruned")
    for name, family, rule in (*((rule, "llama", rule) for rule in RULES), ("tied", "qwen2", "sparsegpt")):
        result = call("prune", folders[family], "-o", root / name, "--method", rule, "--calib", calib, *TEXT)
        assert "fine-tuning" in result.stderr and "--skip" in result.stderr and f"linears by {rule}" in result.stdout
    return {name: root / name for name in (*RULES, "tied")}


@pytest.mark.parametrize("name", [*RULES, "tied"])
def test_a_pruned_model_differs_from_its_source_only_in_pruned_linears(
    name: str, pruned: dict[str, Path], folders: dict[str, Path], calib: Path
) -> None:
    family, rule = ("qwen2", "sparsegpt") if name == "tied" else ("llama", name)
    out = pruned[name]
    before, after = values(folders[family]), values(out)
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype
        if not blocks_only(name):
            assert torch.equal(tensor, before[name])  # biases, norms and tied embeddings among them
            continue
        assert is_24(tensor) and 0.49 < (tensor == 0).float().mean() < 0.51
        if rule == "magnitude":
            assert torch.equal(tensor, before[name] * weight_mask(before[name]))
        moved = bool((tensor[tensor != 0] != before[name][tensor != 0]).any())
        assert moved == (rule == "sparsegpt")
    assert Checkpoint(out).config == Checkpoint(folders[family]).config
    assert (out / "tokenizer.json").is_file()
    found = report.load(out)
    assert found["command"] == "prune" and found["layout"] == "dense" and len(found["layers"]) == 14
    assert all(layer["zeros"] >= layer["kept"] > 0 for layer in found["layers"])
    assert any("fine-tuning" in notice for notice in found["notices"])
    card = (out / "README.md").read_text()
    assert "Pruned from" in card and "quantized" not in card.split("---")[1] and f"linears by {rule}" in card
    assert "perplexity" in call("eval", "ppl", out, "--data", calib, "--window", 32, "-q").stdout
    assert "2:4" in call("report", out).stdout


def test_rules_rank_on_a_whole_model_and_quantization_preserves_the_mask(
    pruned: dict[str, Path], folders: dict[str, Path], calib: Path, tmp_path: Path
) -> None:
    text: dict[str, Any] = {"calib": str(calib), "samples": 8, "max_length": 128, "clip": "none"}
    lost = {rule: sum(layer.get("loss", 0) for layer in report.load(pruned[rule])["layers"]) for rule in RULES}
    assert lost["magnitude"] == 0 and lost["sparsegpt"] < lost["wanda"]
    joint = quantkit.quantize(folders["llama"], tmp_path / "joint", prune="2:4", **text)
    in_turn = quantkit.quantize(pruned["sparsegpt"], tmp_path / "gptq", prune="2:4", prune_method="magnitude", **text)
    assert joint["scheme"] == in_turn["scheme"] == "int4:g128:24"
    assert {layer["prune"] for layer in joint["layers"]} == {"sparsegpt"}
    assert {layer["prune"] for layer in in_turn["layers"]} == {"magnitude"}
    dense = values(pruned["sparsegpt"])
    for folder in ("joint", "gptq"):
        src = Checkpoint(tmp_path / folder)
        for module in src.modules():
            codes = src.quantized(module).codes
            check(codes != 8)
            assert folder == "joint" or bool((codes[dense[f"{module}.weight"] == 0] == 8).all())
        assert quantkit.verify(tmp_path / folder).ok


def test_finished_blocks_are_read_back_where_their_activations_are_lost(
    small_llama: Path, calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "COMMIT_BYTES", 200_000)
    text: dict[str, Any] = {"data": str(calib), "samples": 4, "max_length": 64}
    recipe = pruning_from_mapping({"calibration": text})
    whole, out = tmp_path / "whole", tmp_path / "out"
    operations = count(lambda: quantize.quantize(small_llama, whole, recipe) and None)
    expected, resumed = hashes(whole), 0
    for stop in range(operations // 3, operations, operations // 3):
        with faults(killer(stop)), pytest.raises(Killed):
            quantize.quantize(small_llama, out, recipe)
        for activations in tmp_path.glob("out.partial-*/activations-*"):
            activations.unlink()  # so that finished blocks are read back from their files
        if not out.exists():
            resumable = any(tmp_path.glob("out.partial-*"))
            resumed += resumable
            quantize.quantize(small_llama, out, recipe, run=RunOptions(resume=resumable))
        assert hashes(out) == expected, stop
        files.remove(out)
    assert resumed > 1


def test_a_head_that_is_not_skipped_is_pruned_as_all_linears(small_llama: Path, calib: Path, tmp_path: Path) -> None:
    recipe = replace(
        pruning_from_mapping({"calibration": {"data": str(calib), "samples": 4, "max_length": 64}}), skip=()
    )
    made = quantize.quantize(small_llama, tmp_path / "out", recipe)
    (head,) = [layer for layer in made["layers"] if layer["name"] == "lm_head"]
    assert head["method"] == "sparsegpt" and head["loss"] > 0 and "by_magnitude" not in head
    assert "pruned by magnitude although" not in summary(made)
    assert is_24(values(tmp_path / "out")["lm_head.weight"])


def test_impossible_pruning_gives_a_one_line_error_and_writes_nothing(
    small_llama: Path, calib: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    odd = write_model("llama", tmp_path / "odd", hidden_size=128, intermediate_size=130, num_hidden_layers=1)
    for command in (("prune",), ("quantize", "--prune", "2:4", "--group-size", "channel")):
        error = refused(command[0], odd, *command[1:], "--calib", calib, out=out)
        assert "multiple of 4" in error and "--skip down_proj" in error
    for wrong in (("--asym",), ("--format", "fp6"), ("--method", "rtn", "--set", "prune=sparsegpt")):
        refused("quantize", small_llama, "--prune", "2:4", *wrong, out=out, code=2)
    assert "add --prune 2:4" in refused("quantize", small_llama, "--set", "prune=wanda", out=out, code=2)
    assert "--prune" not in refused("quantize", small_llama, "--layout", "marlin24", "--format", "fp6", out=out)
    assert "nothing to prune" in refused("prune", small_llama, "--skip", ".*", out=out, code=2)


def test_recipes_of_2_4_round_trip_and_mistakes_are_named() -> None:
    recipe = from_mapping({"scheme": {"sparsity": "2:4"}})
    assert (recipe.scheme.label, recipe.prune, recipe.gptq.prune) == ("int4:g128:24", "sparsegpt", "sparsegpt")
    wanda = from_mapping({"overrides": {"up_proj": "int4:g64:24"}, "method": "rtn", "prune": "wanda"})
    assert wanda.calibrated and from_mapping(wanda.to_mapping()) == wanda
    assert not from_mapping({"scheme": {"sparsity": "2:4"}, "method": "rtn"}).calibrated
    with pytest.raises(RecipeError, match="use '2:4' in quotes"):
        from_mapping({"scheme": {"sparsity": 124}})  # YAML reads 2:4 as 124
    for slip in ({"method": "taylor"}, {"gptq": {"damp": 0.0}}, {"gptq": {"descent": 1}}, {"layout": "marlin"}):
        with pytest.raises(RecipeError):
            pruning_from_mapping(slip)
    asked = pruning_from_mapping({"method": "wanda", "gptq": {"act_order": "off"}, "skip": []})
    assert pruning_from_mapping(asked.to_mapping()) == asked
