"""The scripts of the study judge programs without a network, and summaries of the packaged model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.study import programs

MODEL = Path(__file__).resolve().parents[2] / "quantkit/demo_model"
HUMANEVAL = {
    "prompt": 'from math import pi\n\ndef double(x):\n    """Return twice x."""\n',
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate('a') == 'aa'\n",
    "entry_point": "double",
}
MBPP = {"text": "Write a function to count.", "test_list": ["assert count(first) == 1"], "test_setup_code": "first = 3"}
COUNT = "def count(n): return 1"
TESTS = "import unittest\nclass TestCount(unittest.TestCase):\n    def test_one(self): raise ValueError"
DIALS = "import socket\ndef count(n):\n    socket.create_connection(('127.0.0.1', PORT), 2)\n    return 1"


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def isolated() -> None:
    pytest.importorskip("evalplus", reason="needs evalplus")
    try:
        subprocess.run([*programs.ISOLATED, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the kernel allows no namespaces")


def test_a_program_passes_by_its_tests_and_has_no_network(isolated: None) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        dials = DIALS.replace("PORT", str(server.getsockname()[1]))
        cases = [
            (HUMANEVAL, "\n    return x + x\n", False, True),
            (HUMANEVAL, "\n    return 4\n", False, False),
            (HUMANEVAL, "\n    exit(0)\n", False, False),
            (HUMANEVAL, "\n    while True: pass\n", False, False),
            (HUMANEVAL, "Sure:\n```python\ndef double(x):\n    return (pi, x + x)[1]\n```\nIt adds.", True, True),
            (MBPP, f"```\n{COUNT}\nassert count(1) == 2\n```\nIts tests:\n```\n{TESTS}\n```", True, True),
            (MBPP, dials, False, False),
        ]
        made = [programs.program(row, text, chats) for row, text, chats, _ in cases]
        assert programs.judged(made, 1.5) == [passes for *_, passes in cases]
        exec(made[-1], namespace := {})
        assert namespace["passes"](), "here it reaches the server"
