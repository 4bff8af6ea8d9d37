"""Test the plug-in against SGLang's real classes on a CPU: each test is a check of `inside_sglang`.

$SGLANG_CHECK, or `.sglang-check` beside the checkout, is a folder with SGLang's Python code and what it imports
(`sglang_setup.sh` makes it). The
Python of `test_vllm` runs it, because it has torch and transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import quantkit
from tests.serving.inside_sglang import CHECKS
from tests.serving.test_vllm import INT4, MODEL, ROOT, engine

ENTRY = """[sglang.srt.plugins]
quantkit = quantkit.serving.sglang_plugin:register
"""
FOLDERS = {
    "marlin": {**INT4, "layout": "marlin"},
    "tcfpx": {"format": "fp6", "method": "rtn", "layout": "tcfpx"},
    "quick": {**INT4, "layout": "quick", "asym": True},
    "compressed-tensors": {**INT4, "layout": "compressed-tensors"},
    "gptq": {**INT4, "layout": "gptq"},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    python, folders = engine(), tmp_path_factory.mktemp("served")
    home = Path(os.environ.get("SGLANG_CHECK") or ROOT.parent / ".sglang-check")
    if not (home / "sglang").is_dir():
        pytest.skip(f"no SGLang in {home}")
    for name, options in FOLDERS.items():
        quantkit.quantize(MODEL, folders / name, **options)
    found = tmp_path_factory.mktemp("installed") / "quantkit-0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: quantkit\nVersion: 0\n")
    (found / "entry_points.txt").write_text(ENTRY)
    run = subprocess.run(
        [python, "-m", "tests.serving.inside_sglang", folders],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{home}:{ROOT}:{found.parent}", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, run.stdout[-2000:] + run.stderr[-4000:]
    answers: dict[str, str | None] = json.loads(lines[0].removeprefix("RESULTS "))
    return answers


@pytest.mark.parametrize("check", CHECKS)
def test_inside_sglang(results: dict[str, str | None], check: str) -> None:
    assert results[check] is None, results[check]
