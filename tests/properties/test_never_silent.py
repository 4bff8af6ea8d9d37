"""Nothing happens silently: each case is refused, or is in the report and in the closing table."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import quantkit
from quantkit.checkpoint import report
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, NumericError, RecipeError
from quantkit.evaluation.perplexity import perplexity
from quantkit.models.weights import load_dense_model
from quantkit.pipeline.convert import pack
from quantkit.pipeline.quantize import quantize
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import from_mapping, pruning_from_mapping
from quantkit.reporting.facts import EVENTS
from quantkit.reporting.summary import summary
from quantkit.text.tokenizer import load_tokenizer
from tests.folders import TEXT, edit
from tests.tiny_models import write_model

RTN = {"method": "rtn", "clip": "none"}


@pytest.fixture
def calib(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "calib.txt").write_text(TEXT)
    return {"data": str(tmp_path / "calib.txt"), "samples": 8, "max_length": 64}


def edited(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """Copy a Llama to `folder`, with changed tensors where the name contains `name`."""
    write_model("llama", folder, hidden_size=128, intermediate_size=256)
    return edit(folder, lambda tensors: tensors.update({k: change(t) for k, t in tensors.items() if name in k}))


def report_and_summary(out: Path) -> tuple[dict[str, Any], str]:
    found = report.load(out)
    return found, summary(found)


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[5] = torch.inf
    return tensor


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("embed_tokens", "rtn"),
        ("model.norm", "gptq"),
        ("layers.1.input_layernorm", "gptq"),
    ],
)
def test_a_tensor_that_is_not_finite_is_not_copied(
    name: str, method: str, tmp_path: Path, calib: dict[str, Any]
) -> None:
    model = edited(tmp_path / "model", name, poisoned)
    with pytest.raises(NumericError, match=rf"{name}.*: 1 of \d+ weights are NaN or infinite, the first \[.*5\] = inf"):
        quantize(model, tmp_path / "out", from_mapping({"method": method, "calibration": calib}))
    assert not any(tmp_path.glob("out*"))


def test_what_a_calibrated_run_did_otherwise_is_reported(tmp_path: Path, calib: dict[str, Any]) -> None:
    """Dense linears, dead channels, more damping than asked, cut documents and ignored files."""

    def with_dead_channels(norm: torch.Tensor) -> torch.Tensor:
        norm[:40] = 0
        return norm

    model = edited(tmp_path / "model", "layers.0.input_layernorm", with_dead_channels)
    (model / "pytorch_model.bin").write_bytes(b"pickle")
    calib["samples"] = 2  # fewer tokens than channels: the Hessian is singular
    calibrated = {"calibration": calib, "gptq": {"damp": 1e-17}, "clip": "none"}
    skip = ["lm_head", "layers.1.mlp.up_proj"]
    quantize(model, tmp_path / "out", from_mapping({**calibrated, "skip": skip}))
    found, text = report_and_summary(tmp_path / "out")
    assert found["dense"] == ["model.layers.1.mlp.up_proj", "lm_head"]
    assert "left dense: model.layers.1.mlp.up_proj, lm_head" in text and "gate_proj, up_proj mix dense" in text
    tried = [layer["rungs"] for layer in found["layers"] if len(layer["rungs"]) > 1]
    assert tried and all(rungs[0] == 1e-17 for rungs in tried)
    assert f"{len(tried)} of 13 linears {EVENTS['rungs']}" in text
    assert sum(layer["dead_columns"] for layer in found["layers"]) == 120
    assert f"3 of 13 linears {EVENTS['dead_columns']}: 120" in text
    assert found["calibration"]["cut"] > 0 and f"{found['calibration']['cut']} documents cut, 0 skipped" in text
    assert "ignored: pytorch_model.bin" in text


@pytest.mark.parametrize(
    ("asked", "is_said"),
    [
        ({"format": "fp6"}, True),
        ({"format": "int6", "group_size": "channel"}, True),
        ({"format": "fp6", "layout": "tcfpx", "pad": True}, False),
        ({"format": "int4", "group_size": 64}, False),
        ({"format": "fp6", "method": "gptq"}, False),
    ],
)
def test_rows_that_may_overflow_in_vllm_and_were_not_measured_are_named(
    asked: dict[str, Any], is_said: bool, small_llama: Path, calib: dict[str, Any], tmp_path: Path
) -> None:
    options = {"method": "rtn", **asked, **({"calib": calib["data"], "samples": 2} if "method" in asked else {})}
    assert any("no text measures" in line for line in quantkit.plan(small_llama, **options).notices) == is_said
    if asked["format"] == "fp6":
        quantkit.quantize(small_llama, tmp_path / "a", clip="none", **options)
        other = "humming" if "layout" in asked else "compressed-tensors"
        packed = quantkit.pack(tmp_path / "a", tmp_path / "b", other).report
        assert any("no text measures" in line for line in packed["layout_notices"]) == (options["method"] == "rtn")


def test_options_without_effect_and_rounding_instead_of_gptq_are_reported(
    tmp_path: Path, calib: dict[str, Any]
) -> None:
    model = edited(tmp_path / "model", "up_proj", torch.zeros_like)  # then the inputs of down_proj are zero
    calib["max_length"] = 4096
    with pytest.raises(NumericError, match=r"down_proj: no input channel ever moved"):
        quantize(model, tmp_path / "out", from_mapping({"calibration": calib}))
    quantize(model, tmp_path / "out", from_mapping({"calibration": calib, "gptq": {"on_unsolvable": "rtn"}}))
    found, text = report_and_summary(tmp_path / "out")
    layers = {layer["name"]: layer for layer in found["layers"]}
    layer = layers["model.layers.0.mlp.down_proj"]
    assert layer["method"] == "rtn" and "ever moved" in layer["reason"]
    assert f"2 of 14 linears {EVENTS['reason']}" in text
    assert "end at the model's 512 positions, --max-length is 4096" in text


@pytest.mark.parametrize("recipe", [RTN, {"gptq": {"on_unsolvable": "rtn"}}])
def test_linears_of_zeros_are_reported_in_one_line(
    recipe: dict[str, Any], tmp_path: Path, calib: dict[str, Any]
) -> None:
    """A broken merge leaves them, and they round without any error."""
    model = edited(tmp_path / "model", "up_proj", torch.zeros_like)
    quantize(model, tmp_path / "out", from_mapping({**recipe, "calibration": calib}))
    found, text = report_and_summary(tmp_path / "out")
    assert f"2 of 14 linears {EVENTS['all_zero']}: " in text
    assert [layer["name"][-7:] for layer in found["layers"] if layer.get("all_zero")] == ["up_proj"] * 2
    quantize(edited(tmp_path / "b", "up_proj", torch.ones_like), tmp_path / "out-b", from_mapping(RTN))
    assert EVENTS["all_zero"] not in report_and_summary(tmp_path / "out-b")[1], "exact weights are not suspicious"


def test_a_calibration_text_that_rounding_never_reads_is_reported(
    small_llama: Path, tmp_path: Path, calib: dict[str, Any]
) -> None:
    quantize(small_llama, tmp_path / "out", from_mapping({**RTN, "calibration": calib, "gptq": {"damp": 0.1}}))
    _, text = report_and_summary(tmp_path / "out")
    assert "no weight depends on --set gptq.damp, --calib, --samples, --max-length" in text


def test_pruning_by_magnitude_names_no_damping_that_nobody_stated(small_llama: Path, tmp_path: Path) -> None:
    quantize(small_llama, tmp_path / "out", pruning_from_mapping({"method": "magnitude"}))
    assert "nothing depends" not in report_and_summary(tmp_path / "out")[1]


def test_scales_at_the_limits_of_float16_are_reported(tmp_path: Path) -> None:
    small = edited(tmp_path / "small", "up_proj", lambda t: (t.float() * 1e-6).to(t.dtype))
    quantize(small, tmp_path / "out", from_mapping(RTN))
    found, text = report_and_summary(tmp_path / "out")
    assert sum(layer["floored_scales"] for layer in found["layers"]) > 0
    assert EVENTS["floored_scales"] in text and EVENTS["subnormal_scales"] in text
    assert "nothing depends" not in text


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path, calib: dict[str, Any]) -> None:
    model = write_model("llama", tmp_path / "model")
    words = load_tokenizer(model)
    words.add_tokens(["quick", "brown"])
    words.save_pretrained(model)
    with pytest.raises(CheckpointError, match="gives token 258, the model knows 257"):
        quantize(model, tmp_path / "out", from_mapping({"calibration": calib}))
    assert not any(tmp_path.glob("out*"))


def test_a_loss_too_large_for_a_perplexity_is_refused(tmp_path: Path) -> None:
    model = edited(tmp_path / "model", "lm_head", lambda t: t.float() * 1e6)
    with pytest.raises(NumericError, match="no language model's"):
        perplexity(load_dense_model(Checkpoint(model)), load_tokenizer(model), TEXT, window=64)


def test_a_packed_folder_reports_its_own_facts(small_llama: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(small_llama, tmp_path / "source"))
    (source / "pytorch_model.bin").write_bytes(b"")  # ignored, with a notice
    quantize(
        source, tmp_path / "ct", from_mapping({**RTN, "skip": ["lm_head", "down_proj"]}), run=RunOptions(min_share=0.5)
    )
    pack(tmp_path / "ct", tmp_path / "marlin", "marlin")
    (before, _), (found, text) = report_and_summary(tmp_path / "ct"), report_and_summary(tmp_path / "marlin")
    assert found["notices"] == before["notices"] != []
    assert not set(found["layout_notices"]) & set(before["layout_notices"])
    assert "will not open this folder because of dense linears besides lm_head" in text
    assert found["base"]["name"] == before["source"]["name"] != found["source"]["name"]
    assert (tmp_path / "marlin" / "quantkit_recipe.yaml").read_bytes() == (
        tmp_path / "ct" / "quantkit_recipe.yaml"
    ).read_bytes()
    assert f"# {before['source']['name']}, int4:g128" in (tmp_path / "marlin" / "README.md").read_text()


@pytest.mark.parametrize("mapping", [{"calibration": {"data": "\udcff.txt"}}, {"skip": ["\udcff"]}])
def test_names_that_are_not_utf8_are_refused_before_the_work(mapping: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="UTF-8"):
        from_mapping(mapping)
