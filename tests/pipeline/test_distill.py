"""Distilling a finished folder: what it may change, that it never does harm, same bytes again, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from quantkit.algorithms import learned_weight
from quantkit.api import build_recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import REPORT
from quantkit.cli.commands import quantkit
from quantkit.errors import CheckpointError, NumericError, QuantkitError, RecipeError
from quantkit.inference.load import load
from quantkit.io.json_files import load_json
from quantkit.models.block_runner import BlockRunner
from quantkit.models.weights import load_dense_model
from quantkit.pipeline import distill as module
from quantkit.pipeline.convert import pack
from quantkit.pipeline.distill import distill
from quantkit.pipeline.quantize import quantize
from quantkit.planning import memory as memory_estimate
from quantkit.recipes.recipe import from_mapping
from quantkit.reporting.summary import summary
from tests.faults import Killed, count, faults, killer, memory_path
from tests.folders import TEXT, hashes
from tests.tiny_models import write_model

tmp_path = memory_path


@pytest.fixture(scope="module")
def calib(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "calib.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture(scope="module")
def plain(small_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that was quantized and has learned nothing."""
    out = tmp_path_factory.mktemp("plain") / "plain"
    quantize(small_llama, out, from_mapping({"method": "rtn", "clip": "none"}))
    return out


def tuned(folder: Path, out: Path, model: Path, calib: str, steps: int = 3, seed: int = 0, **options: Any) -> Any:
    text = build_recipe(calib=calib, samples=10, max_length=64, seed=seed).calibration
    return distill(folder, out, model, text, steps=steps, **options)


def changed(before: Path, after: Path) -> set[str]:
    """List the last two parts of the names of dense tensors that differ."""
    a, b = Checkpoint(before), Checkpoint(after)
    both = [name for name in a.names() if name in b.names()]
    return {".".join(name.split(".")[-2:]) for name in both if not torch.equal(a.get(name), b.get(name))}


def test_codes_stay_and_scales_and_norms_learn(small_llama: Path, plain: Path, calib: str, tmp_path: Path) -> None:
    pack(plain, tmp_path / "marlin", "marlin")
    plain, out = tmp_path / "marlin", tmp_path / "tuned"
    text = ["--calib", calib, "--samples", "10", "--max-length", "64"]
    asked = ["distill", str(plain), "--against", str(small_llama), "-o", str(out), "--steps", "8", *text, "-q"]
    done = CliRunner().invoke(quantkit, asked)
    assert done.exit_code == 0, done.output
    before, after, report = Checkpoint(plain), Checkpoint(out), load_json(out / REPORT)
    assert after.layout is not None and after.layout.NAME == "marlin" and before.config == after.config
    for name in before.modules():
        assert torch.equal(before.quantized(name).codes, after.quantized(name).codes)
    assert all(not torch.equal(before.quantized(m).scales, after.quantized(m).scales) for m in before.modules())
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight"}
    assert changed(small_llama, out) == norms
    found, old = report["distillation"], load_json(plain / REPORT)
    assert found["best_step"] and found["kl_after"] < found["kl_before"] and found["against"] == small_llama.name
    assert report["base"] == old["base"] and report["recipe"] == old["recipe"] and report["command"] == "distill"
    assert "8 steps" in summary(report) and "8 steps" in (out / "README.md").read_text()
    assert not any("loss" in layer for layer in report["layers"]), "a loss of before would look like one of now"


def test_a_distilled_folder_computes_what_was_measured_and_can_learn_again(
    small_llama: Path, plain: Path, calib: str, tmp_path: Path
) -> None:
    once = tuned(plain, tmp_path / "out", small_llama, calib, 6)["distillation"]
    twice = tuned(tmp_path / "out", tmp_path / "twice", small_llama, calib)["distillation"]
    assert twice["kl_before"] == pytest.approx(once["kl_after"]) and twice["kl_after"] <= twice["kl_before"]
    source = Checkpoint(small_llama)
    model, reference = load(tmp_path / "out", device="cpu", dtype=torch.float32), load_dense_model(source)
    tokens = torch.tensor(list(TEXT.encode()))[:64]
    runner = BlockRunner(source, device="cpu")
    runner.load_whole()
    with torch.no_grad():
        torch.testing.assert_close(runner.logits(tokens, {}), reference(tokens[None]).logits[0])
        p = reference(tokens[None]).logits.log_softmax(-1)
        kl = float((p.exp() * (p - model(tokens[None]).logits.log_softmax(-1))).sum(-1).mean())
    assert kl == pytest.approx(once["kl_after"], rel=0.5)


@pytest.mark.parametrize("codes", [False, True])
def test_it_is_never_worse_than_the_start(
    codes: bool, small_llama: Path, plain: Path, calib: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SCALE_RATE", "NORM_RATE", "CODE_TRAVEL"):
        monkeypatch.setattr(module, name, 3.0)  # every step does harm
    report = tuned(plain, tmp_path / "tuned", small_llama, calib, 2, codes=codes)
    assert report["distillation"]["best_step"] == 0
    assert report["distillation"]["kl_after"] == report["distillation"]["kl_before"]
    before, after = Checkpoint(plain), Checkpoint(tmp_path / "tuned")
    assert all(before.quantized(name).equal(after.quantized(name)) for name in before.modules())
    assert not changed(small_llama, tmp_path / "tuned")


def test_codes_learn_if_asked(
    small_llama: Path, plain: Path, calib: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned_weight, "INSIDE", 0.49)  # so that a few short steps move some
    monkeypatch.setattr(module, "CODE_TRAVEL", 0.16)
    report = tuned(plain, tmp_path / "tuned", small_llama, calib, 8, codes=True)
    before, after = Checkpoint(plain), Checkpoint(tmp_path / "tuned")
    assert any(not torch.equal(before.quantized(m).codes, after.quantized(m).codes) for m in before.modules())
    assert "codes" in summary(report)


def test_a_killed_run_leaves_no_folder_and_begins_anew_with_the_same_bytes_unless_the_seed_is_another(
    small_llama: Path, plain: Path, calib: str, tmp_path: Path
) -> None:
    whole, out, before = tmp_path / "whole", tmp_path / "out", hashes(plain)
    operations = count(lambda: tuned(plain, whole, small_llama, calib, codes=True) and None)
    with faults(killer(operations // 2)), pytest.raises(Killed):
        tuned(plain, out, small_llama, calib, codes=True)
    assert not out.exists()
    torch.manual_seed(7)  # the process's own generator is not used
    tuned(plain, out, small_llama, calib, codes=True)
    tuned(plain, tmp_path / "other", small_llama, calib, seed=1, codes=True)
    assert hashes(out) == hashes(whole) != hashes(tmp_path / "other") and hashes(plain) == before


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "llama4_text"])
def test_families_learn(family: str, calib: str, tmp_path: Path) -> None:
    """Tied embeddings, biases of norms, Conv1D, norms around zero, experts."""
    model = write_model(family, tmp_path / "model", torch.bfloat16 if family == "gemma2" else torch.float16)
    layout = "marlin" if family == "gpt2" else "compressed-tensors"
    quantize(model, tmp_path / "plain", build_recipe(method="rtn", layout=layout), min_share=0.0)
    found = tuned(tmp_path / "plain", tmp_path / "out", model, calib, 4)["distillation"]
    assert found["kl_after"] < found["kl_before"]
    assert any("norm" in name or "ln_" in name for name in changed(model, tmp_path / "out"))


def test_padded_weights_learn_without_their_padding(calib: str, tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model", hidden_size=192, intermediate_size=320, num_hidden_layers=1)
    quantize(model, tmp_path / "plain", build_recipe(method="rtn", layout="marlin", pad=True))
    tuned(tmp_path / "plain", tmp_path / "out", model, calib, codes=True)
    src = Checkpoint(tmp_path / "out")
    for name in src.modules():
        n, k = src.true_size(name)
        dense = src.quantized(name).dequantize()
        assert src.is_padded(name) == Checkpoint(tmp_path / "plain").is_padded(name)
        assert not dense[n:].any() and not dense[:, k:].any()


def refused(error: type[QuantkitError], words: str, *given: Any, **options: Any) -> None:
    with pytest.raises(error, match=words) as found:
        tuned(*given, **options)
    assert "\n" not in str(found.value)


def test_what_cannot_learn_is_refused_in_one_line(
    small_llama: Path, plain: Path, calib: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    refused(CheckpointError, "no quantized weights", small_llama, out, small_llama, calib)
    refused(CheckpointError, "is quantized itself", plain, out, plain, calib)
    other = write_model("llama", tmp_path / "other", intermediate_size=128)
    refused(CheckpointError, "give the model that was quantized", plain, out, other, calib)
    refused(CheckpointError, "lie in each other", plain, plain, small_llama, calib)
    refused(RecipeError, "use 50 to 200", plain, out, small_llama, calib, 0)
    with pytest.raises(RecipeError, match="one calibration sequence is held out"):
        distill(plain, out, small_llama, build_recipe(calib=calib, samples=1, max_length=64).calibration)
    monkeypatch.setattr(module, "NORM_RATE", float("inf"))
    refused(NumericError, "give other --calib", plain, out, small_llama, calib)
    monkeypatch.setattr(memory_estimate, "LEARNED", 10**9)
    refused(QuantkitError, "the run takes about", plain, out, small_llama, calib, codes=True)
    assert not out.exists()


def test_a_model_whose_code_has_no_gradient_is_refused_in_one_line(
    small_llama: Path, plain: Path, calib: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def writes_in_place(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x.sigmoid().mul_(norm.weight).sigmoid_().mul_(norm.weight)

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaRMSNorm.forward", writes_in_place)
    refused(CheckpointError, r"has no gradient \(.*\): keep", plain, tmp_path / "out", small_llama, calib)


@pytest.mark.parametrize("asked", [["--distill", "2"], ["--distill-codes"], ["--set", "distill=2"], ["--recipe", "R"]])
def test_the_options_of_former_versions_name_the_command(asked: list[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("distill: 100\n")
    asked = [str(recipe) if word == "R" else word for word in asked]
    done = CliRunner().invoke(quantkit, ["quantize", "model", "-o", str(tmp_path / "out"), *asked])
    assert done.exit_code == 2 and "quantkit distill OUT --against MODEL" in done.output
