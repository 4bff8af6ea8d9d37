"""Run checks inside an engine's real classes, by a Python that has them, with quantkit's plug-in installed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import write_model

ROOT = Path(__file__).resolve().parents[2]
INT4: dict[str, Any] = {"format": "int4", "group_size": 128, "method": "rtn"}


def engine() -> Path:
    """Find vLLM's Python; skip if it is not here."""
    home = Path(os.environ.get("VLLM_CHECK") or ROOT.parent / ".vllm-check")
    python = home / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment with vLLM in {home} (make engines makes one in build/engines)")
    return python


def write_llama(folder: Path) -> Path:
    """Write the Llama whose folders the engines load: four heads of 64, two of keys and values."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    return write_model("llama", folder, **sizes)


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
