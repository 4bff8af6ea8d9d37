"""Asking vLLM: one folder that ends or hangs the check is one row, and not the end of the census."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.census.engine import ask, opened

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
        "packed_only": ("weights", "KeyError: 'w2_bias'"),
        "both": ("model", "ValueError: no kernel for heads of 64"),
    }
    opens = name == "packed_only" and folder.endswith("model")
    stage, error = (None, None) if opens else errors.get(name, (None, None))
    print("a line of a log", flush=True)
    print(json.dumps({"folder": folder, "ok": not error, "stage": stage, "error": error}), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "check.py"
    path.write_text(SCRIPT)
    return path


def test_a_folder_that_hangs_or_ends_the_check_is_one_row(script: Path) -> None:
    folders = [Path("/x") / name / "rtn" for name in ("good", "hangs", "ends", "unknown", "new", "both", "last")]
    assert list(opened(script, folders, limit=3).items()) == [
        (folders[0], "ok"),
        (folders[1], "no end within 3 s"),
        (folders[2], "the check ended with code 7"),
        (folders[3], "no class"),
        (folders[4], "too new"),
        (folders[5], "model: ValueError: no kernel for heads of 64"),
        (folders[6], "ok"),
    ]


def test_a_script_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with code 2"):
        opened(tmp_path / "absent.py", [Path("/x/good/rtn")])


def test_a_refusal_says_whether_the_dense_model_opens(script: Path, tmp_path: Path) -> None:
    rows = [{"family": name} for name in ("good", "both", "packed_only", "not_made")]
    rows[3]["vllm"] = "ok"  # of a census before
    for row in rows[:3]:
        for kind in ("model", "rtn"):
            (tmp_path / "kept" / row["family"] / kind).mkdir(parents=True)
    ask(script, tmp_path / "kept", rows)
    assert rows == [
        {"family": "good", "vllm": "ok"},
        {
            "family": "both",
            "vllm": "model: ValueError: no kernel for heads of 64",
            "vllm_dense": "model: ValueError: no kernel for heads of 64",
        },
        {"family": "packed_only", "vllm": "weights: KeyError: 'w2_bias'", "vllm_dense": "ok"},
        {"family": "not_made"},
    ]
