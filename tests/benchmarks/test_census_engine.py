"""Asking vLLM: one folder that ends or hangs the check is one row, and not the end of the census."""

from __future__ import annotations

from pathlib import Path

from benchmarks.census.engine import opened

SCRIPT = """
import json, os, sys, time
for folder in (argument for argument in sys.argv if argument.startswith("/")):
    name = folder.split("/")[-2]
    if name == "hangs":
        time.sleep(60)
    if name == "ends":
        os._exit(7)
    errors = {
        "unknown": ("config", "ValidationError: Model architectures ['A'] are not supported for now."),
        "new": ("config", "ValidationError: Transformers does not recognize this architecture."),
        "both": ("model", "ValueError: no kernel for heads of 64"),
    }
    stage, error = errors.get(name, (None, None))
    print("a line of a log", flush=True)
    print(json.dumps({"folder": folder, "ok": not error, "stage": stage, "error": error}), flush=True)
"""


def test_a_folder_that_hangs_or_ends_the_check_is_one_row(tmp_path: Path) -> None:
    script = tmp_path / "check.py"
    script.write_text(SCRIPT)
    folders = [Path("/x") / name / "rtn" for name in ("good", "hangs", "ends", "unknown", "new", "both", "last")]
    assert list(opened(script, folders, limit=2).items()) == [
        (folders[0], "ok"),
        (folders[1], "no end within 2 s"),
        (folders[2], "the check ended with code 7"),
        (folders[3], "no class"),
        (folders[4], "too new"),
        (folders[5], "model: ValueError: no kernel for heads of 64"),
        (folders[6], "ok"),
    ]
