"""Run checks inside an engine's real classes, by a Python that has them, with quantkit's plug-in installed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT.parent / "shared" / "tools" / "vllm"
MODEL = ROOT.parent / "shared" / "models" / "tiny-llama-1m"
INT4: dict[str, Any] = {"format": "int4", "group_size": 128, "method": "rtn"}


def engine() -> Path:
    """Find vLLM's Python; skip if it is not here."""
    home = Path(os.environ.get("VLLM_CHECK") or ROOT.parent / ".vllm-check")
    python = home / "bin" / "python"
    if not python.exists() or not (TOOLS / "vllm_without_gpu.py").exists() or not MODEL.exists():
        pytest.skip(f"no environment with vLLM in {home} (../shared/tools/vllm/setup.sh makes one)")
    return python


def answers(
    python: Path, module: str, arguments: list[Path], installed: Path, group: str, register: str, path: str
) -> dict[str, str | None]:
    """Run the checks of a module; return the error of each, None if it passed.

    The engine finds the plug-in `register` by an entry point of `group` in the folder `installed`. `path` comes before
    the checkout in the module's search path.
    """
    found = installed / "quantkit-0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: quantkit\nVersion: 0\n")
    (found / "entry_points.txt").write_text(f"[{group}]\nquantkit = {register}\n")
    run = subprocess.run(
        [python, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{path}:{ROOT}:{installed}", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, run.stdout[-2000:] + run.stderr[-4000:]
    results: dict[str, str | None] = json.loads(lines[0].removeprefix("RESULTS "))
    return results
