"""Runs whose tuning is weighed by gradients: the same bytes again and after any stop, and what they refuse."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.census import families
from quantkit.checkpoint.report import REPORT
from quantkit.errors import NumericError
from quantkit.io.json_files import load_json
from quantkit.io.staging import JOURNAL
from quantkit.models import block_runner
from quantkit.pipeline.quantize import quantize
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import Recipe, from_mapping
from tests.calibration.runs import QUICK
from tests.command_line import call, refused
from tests.faults import Killed, faults, stop_at
from tests.folders import edit, hashes
from tests.tiny_models import write_model

SHORT = ("--samples", 9, "--max-length", 64)
AWARE = (*SHORT, "--set", "output_aware=true", "--set", "tune=2")
#: Changes that make a model small, so that a run takes a second.
SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Llama of two very small blocks."""
    return write_model("llama", tmp_path_factory.mktemp("model") / "model", **SMALL, num_key_value_heads=2)


@pytest.fixture(scope="module")
def whole(small: Path, calib: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of an undisturbed run."""
    out = tmp_path_factory.mktemp("whole") / "out"
    quantize(small, out, aware(calib))
    return out


@pytest.fixture(scope="module")
def interrupted(small: Path, calib: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a run was killed after its first block. Tests must not change it."""
    folder = tmp_path_factory.mktemp("interrupted")
    with faults(stop_at("open", JOURNAL, 3)), pytest.raises(Killed):
        quantize(small, folder / "out", aware(calib))
    return folder


@pytest.fixture
def half(interrupted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(interrupted, tmp_path / "half"))


def aware(calib: Path, **changes: Any) -> Recipe:
    text = {"data": str(calib), "samples": 9, "max_length": 64}
    asked = {**QUICK, "scheme": {"group_size": 32}, "calibration": text, "output_aware": True, "tune": 2}
    return from_mapping({**asked, **changes})


def test_gradients_change_what_tuning_minimises_and_are_not_published(whole: Path, small: Path, calib: Path) -> None:
    plain = whole.parent / "plain"
    quantize(small, plain, aware(calib, output_aware=False))
    found, other = (load_json(out / REPORT)["layers"] for out in (whole, plain))
    assert all(layer["tuned_error"] <= layer["untuned_error"] for layer in found)
    first = len(found) // 2  # the first block has the same codes before it is tuned
    for a, b in zip(found[:first], other[:first], strict=True):
        assert a["untuned_loss" if a["tuned_step"] else "loss"] == b["untuned_loss" if b["tuned_step"] else "loss"]
        assert a["untuned_error"] != b["untuned_error"]
    assert hashes(whole) != hashes(plain) and not list(whole.rglob("*activations*"))


@pytest.mark.parametrize("name", ["activations-entered-1", "activations-fisher-0"], ids=["forward", "backward"])
def test_killed_before_the_first_commit_the_same_bytes_follow(
    name: str, whole: Path, small: Path, calib: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with faults(stop_at("write", name)), pytest.raises(Killed):
        quantize(small, out, aware(calib))
    assert not out.exists() and any(tmp_path.glob("out.partial-*"))
    quantize(small, out, aware(calib), run=RunOptions(resume="fisher" in name))
    assert hashes(out) == hashes(whole)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("activations-fisher-1.bin", None),
        ("activations-fisher-1.bin", flip),
        ("activations-gradients.json", lambda path: path.write_text('{"hashes": 3}')),
    ],
)
def test_a_resumed_run_reads_gradients_or_measures_damaged_ones_to_the_same_bytes(
    name: str,
    damage: Callable[[Path], Any] | None,
    whole: Path,
    half: Path,
    small: Path,
    calib: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = half / "out"
    (partial,) = half.glob("out.partial-*")
    if damage is not None:
        damage(partial / name)
    quantize(small, out, aware(calib), run=RunOptions(resume=True))
    assert hashes(out) == hashes(whole)
    assert (damage is not None) == ("gradients" in capsys.readouterr().err)


def test_a_disk_too_small_for_gradients_is_refused_before_the_run_with_its_way_out(
    small: Path, calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = write_model("llama", tmp_path / "deep", **SMALL, num_key_value_heads=2, num_hidden_layers=8)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    # Hidden states of all blocks of the deep model are more than the output and three snapshots.
    for model, length, helps in ((small, 64, False), (deep, 512, True)):
        text = ("--calib", calib, "--samples", 12, "--max-length", length)
        args = (model, *text, "--group-size", 32, "--set", "tune=2", "--set", "output_aware=true", "-q")
        lines = {call(command, *args, "-o", tmp_path / "out", code=1).stderr for command in ("plan", "quantize")}
        assert len(lines) == 1 and len((line := lines.pop()).splitlines()) == 1
        assert ("or use --set output_aware=false: " in line) is helps and "are free: free some or use" in line
    assert not list(tmp_path.glob("out*"))


GATE = "model.layers.1.mlp."


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        # The gate closes, so that the block passes on finite numbers, but the gradient of the gate overflows.
        (
            {f"{GATE}gate_proj.weight": 0.0, f"{GATE}up_proj.weight": 1e35, f"{GATE}down_proj.weight": 1e25},
            r"^model\.layers\.1: its gradient is not finite: use --set output_aware=false$",
        ),
        (
            {"model.norm.weight": 0.0},  # so that no gradient passes
            r"^model\.layers\.0: its outputs have no finite gradient: use --set output_aware=false$",
        ),
    ],
    ids=["overflow", "zero"],
)
def test_a_gradient_that_is_not_finite_names_its_block(
    changes: dict[str, float], says: str, calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_runner, "is_fast_in_bfloat16", lambda device: False)
    model = write_model("llama", tmp_path / "model", torch.float32, **SMALL, num_key_value_heads=2)
    edit(model, lambda tensors: [tensors[name].fill_(value) for name, value in changes.items()])
    with pytest.raises(NumericError, match=says):
        quantize(model, tmp_path / "out", aware(calib))
    assert not list(tmp_path.glob("out*"))


def test_blocks_that_pass_on_more_than_a_hidden_state_are_refused_in_one_line(calib: Path, tmp_path: Path) -> None:
    model = families.write("glm_moe_dsa", tmp_path / "model")
    line = refused("quantize", model, "--calib", calib, *AWARE, "--group-size", 32, out=tmp_path / "out", code=2)
    assert "use --set output_aware=false" in line
