"""Tuning from end to end: what it may change, that it never does harm, same bytes after a stop, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantkit.algorithms import learned_weight
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import REPORT
from quantkit.errors import CheckpointError, NumericError, QuantkitError, RecipeError
from quantkit.inference.load import load
from quantkit.io import files
from quantkit.io.json_files import load_json
from quantkit.models.block_runner import BlockRunner
from quantkit.models.whole_model import load_dense_model
from quantkit.pipeline import distill
from quantkit.pipeline.quantize import plan, quantize
from quantkit.planning import memory as memory_estimate
from quantkit.recipes.recipe import Recipe, from_mapping
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


def recipe(calib: str, steps: int = 3, **changes: object) -> Recipe:
    return from_mapping(
        {"calibration": {"data": calib, "samples": 10, "max_length": 64}, "distill": steps, "method": "rtn", **changes}
    )


def changed(before: Path, after: Path) -> set[str]:
    """Return the last two parts of the names of dense tensors that differ."""
    a, b = Checkpoint(before), Checkpoint(after)
    both = [name for name in a.names() if name in b.names()]
    return {".".join(name.split(".")[-2:]) for name in both if not torch.equal(a.get(name), b.get(name))}


def test_codes_stay_and_scales_and_norms_learn(small_llama: Path, calib: str, tmp_path: Path) -> None:
    quantize(small_llama, tmp_path / "plain", recipe(calib, 0))
    report = quantize(small_llama, tmp_path / "tuned", recipe(calib, 8))
    before, after = Checkpoint(tmp_path / "plain"), Checkpoint(tmp_path / "tuned")
    for module in before.modules():
        assert torch.equal(before.quantized(module).codes, after.quantized(module).codes)
    assert all(not torch.equal(before.quantized(m).scales, after.quantized(m).scales) for m in before.modules())
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight"}
    assert changed(small_llama, tmp_path / "tuned") == norms
    found = report["distillation"]
    assert found["best_step"] and found["kl_after"] < found["kl_before"]
    assert "8 steps" in summary(report) and "8 steps" in (tmp_path / "tuned" / "README.md").read_text()
    assert not any("loss" in layer for layer in report["layers"]), "a loss of before would look like one of now"


def test_a_tuned_folder_computes_what_was_measured(small_llama: Path, calib: str, tmp_path: Path) -> None:
    report = quantize(small_llama, tmp_path / "out", recipe(calib, 6))
    source = Checkpoint(small_llama)
    model, reference = load(tmp_path / "out", device="cpu", dtype=torch.float32), load_dense_model(source)
    tokens = torch.tensor(list(TEXT.encode()))[:64]
    runner = BlockRunner(source, device="cpu")
    runner.load_whole()
    with torch.no_grad():
        torch.testing.assert_close(runner.logits(tokens, {}), reference(tokens[None]).logits[0])
        p = reference(tokens[None]).logits.log_softmax(-1)
        kl = float((p.exp() * (p - model(tokens[None]).logits.log_softmax(-1))).sum(-1).mean())
    assert kl == pytest.approx(report["distillation"]["kl_after"], rel=0.5)


@pytest.mark.parametrize("codes", [False, True])
def test_it_is_never_worse_than_the_start(
    codes: bool, small_llama: Path, calib: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SCALE_RATE", "NORM_RATE", "CODE_TRAVEL"):
        monkeypatch.setattr(distill, name, 3.0)  # every step does harm
    quantize(small_llama, tmp_path / "plain", recipe(calib, 0))
    report = quantize(small_llama, tmp_path / "tuned", recipe(calib, 2, distill_codes=codes))
    assert report["distillation"]["best_step"] == 0
    assert report["distillation"]["kl_after"] == report["distillation"]["kl_before"]
    before, after = Checkpoint(tmp_path / "plain"), Checkpoint(tmp_path / "tuned")
    assert all(before.quantized(module).equal(after.quantized(module)) for module in before.modules())
    assert not changed(small_llama, tmp_path / "tuned")


def test_codes_learn_if_asked(small_llama: Path, calib: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_weight, "_INSIDE", 0.49)  # so that a few short steps move some
    monkeypatch.setattr(distill, "CODE_TRAVEL", 0.16)
    quantize(small_llama, tmp_path / "plain", recipe(calib, 0))
    report = quantize(small_llama, tmp_path / "tuned", recipe(calib, 8, distill_codes=True))
    before, after = Checkpoint(tmp_path / "plain"), Checkpoint(tmp_path / "tuned")
    modules = before.modules()
    assert any(not torch.equal(before.quantized(m).codes, after.quantized(m).codes) for m in modules)
    assert "codes" in summary(report)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(
    small_llama: Path, calib: str, tmp_path: Path
) -> None:
    made = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(len(made))  # the process's own generator is not used
        calibration = {"data": calib, "samples": 10, "max_length": 64, "seed": seed}
        quantize(small_llama, tmp_path / name, recipe(calib, distill_codes=True, calibration=calibration))
        made[name] = hashes(tmp_path / name)
    assert made["a"] == made["b"] != made["c"]


def test_killed_in_the_stage_and_resumed_gives_the_same_bytes(small_llama: Path, calib: str, tmp_path: Path) -> None:
    whole, out, asked = tmp_path / "whole", tmp_path / "out", recipe(calib)
    begun: list[int] = []
    operations = count(lambda: quantize(small_llama, whole, asked) and None)

    def drafts() -> int:
        return sum(len(list(folder.glob("draft-*"))) for folder in tmp_path.glob("out.partial-*"))

    for stop in range(operations // 2, operations, operations // 8):
        with faults(killer(stop)), pytest.raises(Killed):
            quantize(small_llama, out, asked)
        if not out.exists():
            begun.append(drafts())
            quantize(small_llama, out, asked, resume=any(tmp_path.glob("out.partial-*")))
        assert hashes(out) == hashes(whole), stop
        report = load_json(out / REPORT)
        assert report["distillation"] == load_json(whole / REPORT)["distillation"]
        assert sum(report["phases"].values()) == pytest.approx(report["totals"]["seconds"])
        files.remove(out)
    assert max(begun) > 1 and min(begun) == 0, "some stops were in the stage, some behind it"


def test_a_stop_between_two_steps_ends_with_the_same_bytes(
    small_llama: Path, calib: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(small_llama, tmp_path / "whole", recipe(calib))
    with monkeypatch.context() as patched, pytest.raises(Killed):
        steps = iter(range(2))

        def stops(step: int, of: int) -> float:
            if next(steps, None) is None:
                raise Killed
            return 1.0

        patched.setattr(distill, "_schedule", stops)
        quantize(small_llama, tmp_path / "out", recipe(calib))
    quantize(small_llama, tmp_path / "out", recipe(calib), resume=True)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


@pytest.mark.parametrize("family", ["qwen2", "opt", "gpt2", "gemma2", "mixtral", "llama4_text"])
def test_families_tune(family: str, calib: str, tmp_path: Path) -> None:
    """Tied embeddings, biases of norms, Conv1D, norms around zero, experts."""
    model = write_model(family, tmp_path / "model", torch.bfloat16 if family == "gemma2" else torch.float16)
    asked = recipe(calib, 4, layout="marlin" if family == "gpt2" else "compressed-tensors")
    found = quantize(model, tmp_path / "out", asked, min_share=0.0)["distillation"]
    assert found["kl_after"] < found["kl_before"]
    planned = plan(model, asked, min_share=0.0)
    for name, size in planned.files.items():
        assert (tmp_path / "out" / name).stat().st_size == size, name
    assert any("norm" in name or "ln_" in name for name in changed(model, tmp_path / "out"))


def test_padded_weights_tune_without_their_padding(calib: str, tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model", hidden_size=192, intermediate_size=320, num_hidden_layers=1)
    asked = {"layout": "marlin", "pad": True, "distill_codes": True}
    quantize(model, tmp_path / "out", recipe(calib, **asked))
    src = Checkpoint(tmp_path / "out")
    for module in src.modules():
        n, k = src.true_size(module)
        dense = src.quantized(module).dequantize()
        assert not dense[n:].any() and not dense[:, k:].any()


def test_a_recipe_without_tuning_has_no_key_of_it(calib: str) -> None:
    assert not {"distill", "distill_codes"} & recipe(calib, 0).to_mapping().keys()
    assert from_mapping(recipe(calib, 5, distill_codes=True).to_mapping()) == recipe(calib, 5, distill_codes=True)
    with pytest.raises(RecipeError, match="use an integer from 0"):
        recipe(calib, -1)
    with pytest.raises(RecipeError, match="--set distill_codes is for --set distill"):
        recipe(calib, 0, distill_codes=True)


def test_one_sequence_cannot_be_split(small_llama: Path, calib: str, tmp_path: Path) -> None:
    one = {"data": calib, "samples": 1, "max_length": 64}
    with pytest.raises(RecipeError, match="holds out one calibration sequence"):
        quantize(small_llama, tmp_path / "out", recipe(calib, calibration=one))


def test_a_model_that_memory_does_not_hold_is_refused_before_the_work(
    small_llama: Path, calib: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan(small_llama, recipe(calib)).refusal is None
    parts = plan(small_llama, recipe(calib)).to_dict()["peak_memory"]["ram_parts"]
    more = plan(small_llama, recipe(calib, distill_codes=True)).to_dict()["peak_memory"]["ram_parts"]
    assert {"whole model", "quantized model"} <= parts.keys() and more["quantized model"] > parts["quantized model"]
    monkeypatch.setattr(memory_estimate, "LEARNED", 10**9)
    refusal = plan(small_llama, recipe(calib, distill_codes=True)).refusal
    assert refusal is not None and "drop --set distill" in str(refusal) and "\n" not in str(refusal)
    asked = plan(small_llama, recipe(calib, distill_codes=True), gpu_memory=2**30).refusal
    assert isinstance(asked, QuantkitError)


def test_a_divergence_that_is_not_finite_is_one_line(
    small_llama: Path, calib: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "NORM_RATE", float("inf"))
    with pytest.raises(NumericError, match="drop --set distill"):
        quantize(small_llama, tmp_path / "out", recipe(calib))


def test_a_model_whose_code_has_no_gradient_is_refused_in_one_line(
    small_llama: Path, calib: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def writes_in_place(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x.sigmoid().mul_(norm.weight).sigmoid_().mul_(norm.weight)

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaRMSNorm.forward", writes_in_place)
    with pytest.raises(CheckpointError, match=r"has no gradient \(.*\): drop --set distill") as error:
        quantize(small_llama, tmp_path / "out", recipe(calib))
    assert "\n" not in str(error.value)
