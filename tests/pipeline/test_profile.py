"""A profiled run: every second is in a phase, and the closing table has floors beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.checkpoint.report import load
from quantkit.pipeline.profile import COMPUTING
from tests.command_line import call

FLOORED = {"load", "forward", "hessian", "solve", "save", "write"}


def test_the_table_has_every_phase_its_floor_and_the_time_without_computing(small_llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join("the quick brown fox " * 9 for _ in range(4)))
    options = ("--calib", text, "--samples", 2, "--max-length", 16, "--group-size", "channel", "--profile")
    printed = call("quantize", small_llama, "-o", tmp_path / "out", *options).stdout
    found = load(tmp_path / "out")
    phases, profile = found["phases"], found["profile"]
    assert profile["floors"].keys() == FLOORED and all(seconds > 0 for seconds in profile["floors"].values())
    assert profile["idle_seconds"] == pytest.approx(sum(s for name, s in phases.items() if name not in COMPUTING))
    table = printed[printed.index("phase ") :].splitlines()
    assert [line.split()[0] for line in table[1:]] == [*phases, "all", "not"]
    assert sum(phases.values()) == pytest.approx(found["totals"]["seconds"])
    assert not list((tmp_path / "out").glob("speed*"))
