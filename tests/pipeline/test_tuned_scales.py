"""Tuning the scales of the whole model: only scales change, the folder is what was measured, never worse, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import kl_div

from quantkit.calibration import scales
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.errors import RecipeError
from quantkit.evaluation.verify import verify
from quantkit.io.staging import JOURNAL
from quantkit.models.weights import load_dense_model
from quantkit.pipeline.quantize import quantize
from quantkit.planning.survey import plan
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import Recipe, from_mapping
from quantkit.reporting.summary import summary
from quantkit.text.sequences import Calibration
from tests.faults import Killed, faults, killer
from tests.folders import hashes, tensors
from tests.tiny_models import write_model

STEPS = 8


def text() -> Calibration:
    """Draw sequences of two lengths, of which two are held out."""
    generator = torch.Generator().manual_seed(3)
    return Calibration([torch.randint(256, (48 + 16 * (i % 2),), generator=generator) for i in range(16)], {})


def recipe(steps: int = STEPS, **changes: Any) -> Recipe:
    return from_mapping(
        {"scheme": {"format": "int3", "group_size": 32}, "clip": "none", "tune_scales": steps, **changes}
    )


def run(model: Path, out: Path, asked: Recipe, **options: Any) -> dict[str, Any]:
    return quantize(model, out, asked, text=text(), run=RunOptions(device="cpu", **options))


def records(folder: Path) -> dict[str, QuantizedTensor]:
    src = Checkpoint(folder)
    return {module: src.quantized(module) for module in src.modules()}


def divergence(model: Path, folder: Path) -> float:
    """Compute the mean divergence of the stored folder on the held-out sequences."""
    ours, theirs = (load_dense_model(Checkpoint(each)) for each in (folder, model))
    held_out, total = text().sequences[7::8], 0.0
    for tokens in held_out:
        with torch.no_grad():
            logs, wanted = (each(tokens[None]).logits.log_softmax(-1) for each in (ours, theirs))
        total += float(kl_div(logs, wanted, reduction="sum", log_target=True))
    return total / sum(map(len, held_out))


def small(family: str, folder: Path) -> Path:
    return write_model(family, folder, torch.bfloat16, num_hidden_layers=1)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"scheme": {"format": "int4", "group_size": 32, "symmetric": False}, "layout": "awq"}),
        ("llama", {"scheme": {"format": "fp6", "group_size": "channel"}, "layout": "humming"}),
        ("llama", {"scheme": {"format": "int4", "sparsity": "2:4", "group_size": "channel"}, "layout": "marlin24"}),
        ("qwen2", {"overrides": {"model.embed_tokens": "int8:channel"}}),  # tied: the head too
        ("qwen3_moe", {"scheme": {"format": "int3", "group_size": "channel"}}),
    ],
)
def test_nothing_but_scales_changes_and_the_stored_folder_is_what_was_measured(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = small(family, tmp_path / "model")
    run(model, tmp_path / "before", recipe(0, **changes))
    report = run(model, tmp_path / "out", recipe(**changes))
    found = report["tuned_scales"]
    assert found["steps"] == STEPS and found["after"] < found["before"]
    for folder, value in (("before", found["before"]), ("out", found["after"])):
        assert divergence(model, tmp_path / folder) == pytest.approx(value, rel=1e-3)
    before, after = records(tmp_path / "before"), records(tmp_path / "out")
    for module, was in before.items():
        now = after[module]
        assert torch.equal(now.codes, was.codes)
        assert now.zeros is was.zeros or (
            now.zeros is not None and was.zeros is not None and torch.equal(now.zeros, was.zeros)
        )
    assert any(not torch.equal(after[module].scales, was.scales) for module, was in before.items())
    dense = set(Checkpoint(tmp_path / "out").names()) & {f"{n}.weight" for n in ("model.norm", "lm_head")}
    assert all(tensors(tmp_path / "out")[name] == tensors(tmp_path / "before")[name] for name in dense)
    proof = verify(tmp_path / "out")
    assert proof.ok and proof.checked
    line = f"after {STEPS} steps on the whole model {found['after']:.4g}"
    assert line in summary(report)


def test_scales_that_are_worse_on_held_out_text_or_take_too_much_memory_are_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small("llama", tmp_path / "model")
    run(model, tmp_path / "before", recipe(0))
    monkeypatch.setattr(scales, "RATE", -scales.RATE)  # away from the minimum
    report = run(model, tmp_path / "out", recipe())
    found = report["tuned_scales"]
    assert found["steps"] == 0 and found["after"] == found["before"]
    assert tensors(tmp_path / "out") == tensors(tmp_path / "before")
    assert "tuning the whole model did not lower: unchanged" in summary(report)

    def full(*given: object, **named: object) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(scales, "load_dense_model", full)
    report = run(model, tmp_path / "full", recipe())
    assert report["tuned_scales"] == {"steps": 0, "reason": "no memory is left"}
    assert tensors(tmp_path / "full") == tensors(tmp_path / "before")


def test_blocks_that_run_again_for_their_gradient_change_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small("llama", tmp_path / "model")
    run(model, tmp_path / "kept", recipe())
    monkeypatch.setattr(scales, "stays_on_gpu", lambda size, free: False)
    run(model, tmp_path / "again", recipe())
    assert hashes(tmp_path / "again") == hashes(tmp_path / "kept")


def test_a_run_that_is_stopped_while_it_writes_scales_gives_the_same_folder(tmp_path: Path) -> None:
    model = small("llama", tmp_path / "model")
    seen: list[tuple[str, str]] = []
    with faults(lambda operation, path: seen.append((operation, path.name))):
        run(model, tmp_path / "whole", recipe())
    removed = next(at for at, (op, name) in enumerate(seen) if op == "unlink" and name.endswith(".safetensors"))
    recorded = max(at for at, (_, name) in enumerate(seen[:removed]) if name == JOURNAL)
    for at in (recorded - 1, removed, removed + 2):
        out = tmp_path / f"out-{at}"
        with pytest.raises(Killed), faults(killer(at + 1)):
            run(model, out, recipe())
        report = run(model, out, recipe(), resume=True)
        assert hashes(out) == hashes(tmp_path / "whole"), seen[at]
        assert report["tuned_scales"]["steps"] == STEPS
        assert verify(out).ok


def test_a_device_without_memory_for_the_whole_model_is_refused_before_the_work(tmp_path: Path) -> None:
    model = small("llama", tmp_path / "model")
    few = {"calibration": {"data": "packaged", "samples": 16, "max_length": 64}}
    needs = plan(model, recipe(**few), gpu_memory=10**12).to_dict()["peak_memory"]
    found = plan(model, recipe(**few), gpu_memory=needs["vram_least"] - 1).refusal
    assert found is not None and "tuning scales takes" in str(found) and "tune_scales=0" in str(found)
    assert plan(model, recipe(0, **few), gpu_memory=needs["vram_least"] - 1).refusal is None


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"method": "rtn"}, "tune_scales starts from the codes of gptq"),
        ({"calibration": {"data": "packaged", "samples": 7, "max_length": 32}}, "holds out one of 8"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_a_line(changes: dict[str, Any], rule: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=rule):
        quantize(small("llama", tmp_path / "model"), tmp_path / "out", recipe(**changes), run=RunOptions(device="cpu"))
