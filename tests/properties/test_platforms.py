"""Where a platform lacks locks, limits, signals, /proc or a GPU, commands work all the same, to the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import call
from tests.tiny_models import write_model


def stripped(*commands: list[object]) -> str:
    lines = [json.dumps([str(word) for word in command]) for command in commands]
    done = subprocess.run([sys.executable, "-m", "tests.properties.stripped", *lines], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_help_needs_no_module_of_one_platform() -> None:
    printed = stripped(["--help"], ["quantize", "--help"])
    assert "quantize" in printed and "--layout" in printed


def test_rounding_conversion_and_evaluation_write_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the package gguf, which is not installed")
    model, text = write_model("qwen3_moe", tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n\n" * 80)
    calib = ("--calib", text, "--samples", 4, "--max-length", 32, "--group-size", 32)
    commands: dict[str, list[object]] = {
        "rounded": ["quantize", model, "--method", "rtn", "--group-size", 32],
        "calibrated": ["quantize", model, *calib],
        "packed": ["pack", tmp_path / "rounded", "--layout", "awq"],
    }
    printed = stripped(
        *([*command, "-o", tmp_path / name, "-q"] for name, command in commands.items()),
        ["inspect", tmp_path / "packed"],
        ["verify", tmp_path / "packed", "-q"],
        ["eval", "ppl", tmp_path / "packed", "--data", text],
        ["generate", tmp_path / "packed", "The quick", "--max-new-tokens", 4],
        ["doctor"],
    )
    assert "perplexity" in printed and "awq" in printed
    for name, (verb, source, *options) in commands.items():
        call(verb, source, *options, "-o", tmp_path / f"{name}-here", "-q")
        for path in (tmp_path / name).glob("*.safetensors"):
            assert path.read_bytes() == (tmp_path / f"{name}-here" / path.name).read_bytes()
    report = json.loads((tmp_path / "rounded" / "quantkit_report.json").read_text())
    assert any("no file locks" in line for line in report["notices"]) and "ram" not in report["totals"]["peak_memory"]
