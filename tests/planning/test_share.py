"""A model of which little is quantized ends before work with exit code 4, and every output says its share."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import quantkit
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import REPORT
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.errors import RecipeError, ThresholdError
from quantkit.models.block_runner import BlockRunner
from quantkit.models.outline import decoder_weights
from tests.command_line import RTN, call, refused
from tests.tiny_models import FAMILIES

MLP = ("--skip", ".*(gate|up|down)_proj")
#: Of a block of `small_llama`, hidden 128 and intermediate 256, the attention's part.
ATTENTION = 4 * 128 * 128 / (4 * 128 * 128 + 3 * 128 * 256)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_decoder_is_what_the_block_runner_runs(family: str, folders: dict[str, Path]) -> None:
    src = Checkpoint(folders[family])
    model = BlockRunner(src)
    inside = {name for block in range(len(model.blocks)) for name in model.stored(block)}
    expected = {name: prod(src.shape(name)) for name in inside if len(src.shape(name)) > 1}
    assert decoder_weights(src) == expected and expected


def test_a_tower_that_is_larger_than_the_decoder_is_none(tmp_path: Path) -> None:
    """Of a conversion only names are known."""
    decoder = {"model.language_model.layers.0.mlp.up_proj.weight": torch.ones(8, 8)}
    tower = {f"model.visual.blocks.{i}.mlp.fc.weight": torch.ones(16, 16) for i in range(4)}
    others = {
        "model.embed_tokens.weight": torch.ones(64, 8),
        "model.language_model.layers.0.norm.weight": torch.ones(8),
    }
    save_file(decoder | tower | others, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert decoder_weights(Checkpoint(tmp_path)) == {name: 64 for name in decoder}


@pytest.mark.parametrize("command", [("quantize", *RTN), ("prune", "--method", "magnitude")])
def test_too_small_a_share_ends_before_work(
    command: tuple[str, ...], small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *options = command
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "add", None)
        line = refused(name, small_llama, *options, *MLP, code=4, out=tmp_path / "out")
    assert f"{100 * ATTENTION:.1f} % of the decoder's weights would be {name}" in line
    assert "model.layers.0.mlp.down_proj.weight and its like in other blocks (20.0 %, skipped)" in line
    assert "--min-share asks for 90 %" in line and "lower --min-share" in line
    if name == "quantize":
        found = json.loads(call("plan", small_llama, *RTN, *MLP, "--min-share", 0, "--json").stdout)
        assert found["share"] == pytest.approx(ATTENTION)
    printed = call(name, small_llama, "-o", tmp_path / "out", *options, *MLP, "--min-share", 0.4).stdout
    assert f"share         {100 * ATTENTION:.2f} % of the decoder's weights" in printed
    assert json.loads((tmp_path / "out" / REPORT).read_text())["totals"]["share"] == pytest.approx(ATTENTION)


def test_weights_that_are_no_linear_are_named_so(small_llama: Path) -> None:
    """Half of the decoder is outside the linears, as in a model whose experts are not understood."""
    from quantkit.planning.plan import plan_quantize
    from quantkit.recipes.recipe import from_mapping

    src = Checkpoint(small_llama)
    linears = {k: v for k, v in BlockRunner(src).linears.items() if not k.endswith(".down_proj")}
    plan = plan_quantize(src, linears, from_mapping({"method": "rtn"}))
    with pytest.raises(ThresholdError, match=r"down_proj\.weight and its like .*\(20\.0 %, no linear\)"):
        plan.require_share(0.9)
    plan.require_share(0.8)


def test_conversions_and_inspect_state_the_share(small_llama: Path, tmp_path: Path) -> None:
    quantkit.quantize(small_llama, tmp_path / "a", method="rtn", skip=[MLP[1]], min_share=0.4)
    call("pack", tmp_path / "a", "--layout", "marlin", "-o", tmp_path / "b", "-q")
    for folder in ("a", "b"):
        assert json.loads((tmp_path / folder / REPORT).read_text())["totals"]["share"] == pytest.approx(ATTENTION)
        assert json.loads(call("inspect", tmp_path / folder, "--json").stdout)["share"] == pytest.approx(ATTENTION)
    assert "share" not in call("inspect", small_llama).stdout


def test_a_share_that_is_none(small_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="min_share is 90: use a number from 0 and up to 1"):
        quantkit.quantize(small_llama, tmp_path / "out", method="rtn", min_share=90)
    call("quantize", small_llama, "-o", tmp_path / "out", "--min-share", 90, code=2)
