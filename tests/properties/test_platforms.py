"""Where a platform lacks locks, limits, signals, /proc or a GPU, commands work all the same, to the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import call
from tests.properties import stripped
from tests.reliability import forks
from tests.tiny_models import write_model


def test_help_needs_no_module_of_one_platform() -> None:
    code = "from tests.properties.stripped import run; run(['--help'], ['quantize', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "quantize" in done.stdout and "--layout" in done.stdout


def test_rounding_conversion_and_evaluation_write_the_same_bytes(tmp_path: Path) -> None:
    for library in ("datasets", "gguf"):  # they look at the platform when they are imported
        pytest.importorskip(library)
    model, text = write_model("qwen3_moe", tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n\n" * 80)
    calib = ("--calib", text, "--samples", 4, "--max-length", 32, "--group-size", 32)
    commands: dict[str, list[object]] = {
        "rounded": ["quantize", model, "--method", "rtn", "--group-size", 32],
        "calibrated": ["quantize", model, *calib],
        "packed": ["pack", tmp_path / "rounded", "--layout", "awq"],
    }
    lines: list[list[object]] = [
        *([*command, "-o", tmp_path / name, "-q"] for name, command in commands.items()),
        ["inspect", tmp_path / "packed"],
        ["verify", tmp_path / "packed", "-q"],
        ["eval", "ppl", tmp_path / "packed", "--data", text],
        ["generate", tmp_path / "packed", "The quick", "--max-new-tokens", 4],
        ["doctor"],
    ]
    ended = forks.run(lambda: stripped.run(*([str(word) for word in line] for line in lines)), tmp_path)
    assert ended.code == 0 and "perplexity" in ended.stdout and "awq" in ended.stdout, ended
    for name, (verb, source, *options) in commands.items():
        call(verb, source, *options, "-o", tmp_path / f"{name}-here", "-q")
        for path in (tmp_path / name).glob("*.safetensors"):
            assert path.read_bytes() == (tmp_path / f"{name}-here" / path.name).read_bytes()
    report = json.loads((tmp_path / "rounded" / "quantkit_report.json").read_text())
    assert any("no file locks" in line for line in report["notices"]) and "ram" not in report["totals"]["peak_memory"]
