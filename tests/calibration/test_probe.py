"""The estimate of a run's duration comes from the run itself, leaves it as it is, and never fails it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.calibration import probe
from quantkit.core.units import format_range
from quantkit.planning import survey
from quantkit.planning.survey import plan
from quantkit.progress import Progress
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import from_mapping
from tests.command_line import RTN, call
from tests.promises.model import TEXT, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe")
    (folder / "text.txt").write_text(TEXT)
    return write_model(folder / "model", num_hidden_layers=4)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every run be worth a probe."""
    monkeypatch.setattr(probe, "SMALL", {"cpu": 0, "cuda": 0})
    monkeypatch.setattr(probe, "FEW_WEIGHTS", 0)


@pytest.mark.parametrize("asked", [{}, {"tune": 2}, {"tune": 2, "output_aware": True}, {"method": "rtn"}], ids=str)
@pytest.mark.usefixtures("always")
def test_every_kind_of_run_is_estimated(asked: dict[str, Any], model: Path) -> None:
    text = {"calibration": {"data": str(model.parent / "text.txt"), "samples": 16, "max_length": 32}}
    planned = plan(model, from_mapping({**text, **asked}), probe=True, run=RunOptions(device="cpu"))
    assert planned.needs.duration is not None and planned.needs.duration[1] is not None, planned.notices
    assert probe.FIXED["cpu"] * probe.SPREAD[0] < planned.needs.duration[0] < planned.needs.duration[1] < 600


@pytest.mark.usefixtures("always")
def test_a_probe_changes_no_byte_and_is_left_out_where_nobody_reads(model: Path, tmp_path: Path) -> None:
    text = ("--calib", model.parent / "text.txt", "--samples", 4, "--max-length", 32)
    args = (model, *text, "--set", "clip=none", "--set", "gptq.descent=0")
    told = call("quantize", *args, "-o", tmp_path / "told").stderr
    assert "by a probe of one block" in told
    quiet = call("quantize", *args, "-o", tmp_path / "quiet", "-q").stderr
    assert "probe" not in quiet
    for path in (tmp_path / "told").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "quiet" / path.name).read_bytes()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("seconds", [0.0, 30.0])
def test_a_probe_is_announced_and_extrapolates_what_was_done_in_time(
    seconds: float, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "MOST_SECONDS", seconds)
    args = (model, "--calib", model.parent / "text.txt", "--max-length", 64, "--device", "cpu", "--set", "tune=8")
    done = call("plan", *args, "--samples", 16)
    assert "the speed of this machine is measured" in done.stderr
    assert "duration       about" in done.stdout and "more than" not in done.stdout
    assert "duration" not in call("plan", *args, "--samples", 16, "--no-probe").stdout


@pytest.mark.usefixtures("always")
def test_a_stopped_probe_counts_the_text_and_the_evaluation(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MOST_SECONDS", 0.0)
    monkeypatch.setattr(probe, "RATE", {"cpu": 1e6, "cuda": 1.0})
    job = survey.survey(survey.dense_source(model, RunOptions()), from_mapping({}), None, RunOptions(device="cpu"))
    found = [
        probe.probe(job.model, job.recipe, job.goals, [torch.arange(64)] * count, progress=Progress(), evaluated=tokens)
        for count, tokens in ((4, 0), (16, 0), (16, 4096))
    ]
    assert found == sorted(found) and found[2][1] > 1.2 * found[1][1] > found[0][1]


@pytest.mark.usefixtures("always")
def test_weights_that_are_broken_do_not_fail_a_plan(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        first = 8 + int.from_bytes(data[:8], "little")
        path.write_bytes(data[:first] + b"\xff" * (len(data) - first))  # NaN
    found = call("plan", folder, *RTN).stdout
    assert "the duration is not known, a probe of one block failed:" in found and "NaN" in found


def test_short_runs_have_no_probe(model: Path) -> None:
    assert "duration" not in call("plan", model, *RTN).stdout


def test_lines_without_a_terminal_say_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quantkit.progress.DELAY", 0)
    assert list(Progress().bar(range(3), "calibrate", "block")) == [0, 1, 2]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"calibrate: block {i}/3" for i in (1, 2, 3)]
    assert lines[0].endswith("about 0 s left") and "left" not in lines[2]
    list(Progress(quiet=True).bar(range(3), "calibrate", "block"))
    list(Progress().bar(range(3), "pack"))
    assert capsys.readouterr().err == ""


def test_ranges_are_round_and_in_one_unit() -> None:
    assert format_range(24.3, 61.2) == "about 24 to 62 s"
    assert format_range(190, 290) == "about 3 to 5 min"
    assert format_range(7000, 9000) == "about 1 to 3 h"
    assert format_range(0.2, 0.4) == "about 1 s"
