"""The scripts of the study write programs and summaries with the packaged model, and judge them without a network."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.study import programs, summaries

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


@pytest.mark.parametrize("chats", [True, False])
def test_a_model_is_asked_through_its_template_and_goes_on_after_a_stop(
    chats: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, asked = shutil.copytree(MODEL, tmp_path / "model"), []
    if chats:
        (model / "chat_template.jinja").write_text("{% for m in messages %}<{{ m['content'] }}>{% endfor %}")
    own = programs.write
    monkeypatch.setattr(programs, "judged", lambda made, seconds: [False] * len(made))
    monkeypatch.setattr(programs, "write", lambda *a, **o: asked.append((a[2], o["stops"])) or own(*a, **o))
    data = lines(tmp_path / "data.jsonl", *[HUMANEVAL] * 3)
    line = ["", str(model), "--data", str(data), "-o", str(tmp_path / "out"), "--device", "cpu"]
    for limit in ("1", "3"):
        monkeypatch.setattr(sys, "argv", [*line, "--limit", limit, "--max-new-tokens", "4"])
        programs.main()
    prompt, stops = asked[0]
    assert (prompt[0][0] == "<", stops) == (chats, () if chats else programs.STOPS)
    assert [len(each) for each, _ in asked] == [1, 2] and len((tmp_path / "out").read_text().splitlines()) == 3
    found = "0.00 % (0.00 to 0.00)"
    assert capsys.readouterr().out.splitlines()[-1] == f"pass@1 {found}: 0 of 3 programs"
    other = lines(tmp_path / "other.jsonl", {"passed": True}, {"passed": True}, {"passed": False})
    monkeypatch.setattr(sys, "argv", [*line, "--against", str(other)])
    programs.main()
    assert capsys.readouterr().out.splitlines()[-1] == "against other -66.67 % (-100.00 to 0.00)"


def test_summaries_are_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("rouge_score", reason="needs rouge-score")
    rows = [{"document": f"The {word} fell for days.", "summary": f"{word} fell"} for word in ("rain", "hail")]
    data = lines(tmp_path / "data.jsonl", *rows)
    line = ["", str(MODEL), "--data", str(data), "--max-new-tokens", "4", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", line)
    summaries.main()
    assert [each.split()[0] for each in capsys.readouterr().out.splitlines()] == [*summaries.KINDS]
    assert summaries.rouge(["the cat sat"] * 2, ["the cat"] * 2)[1] == "rouge2 66.7 (66.7 to 66.7)"
