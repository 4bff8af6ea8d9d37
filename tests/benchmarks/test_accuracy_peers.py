"""The judge of quantizers: rows that are there are skipped, and one that fails costs no other."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from benchmarks import accuracy_peers, tables


def test_a_row_that_fails_costs_no_other_and_rows_that_are_there_are_skipped(
    small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, count in (("long", 800), ("short", 100)):
        (tmp_path / f"{name}.txt").write_text("".join(chr(97 + (i * i) % 26) for i in range(count)))
    line = ["accuracy_peers", "--model", small_llama, "--calib", tmp_path / "long.txt", "--device", "cpu"]
    line += ["--text", f"long={tmp_path / 'long.txt'}", f"brief={tmp_path / 'short.txt'}", "--group-size", 64]
    line += ["--folder", f"lost={tmp_path}", "--recipe", "rtn", "--window", 64, "-o", tmp_path / "rows.csv"]
    monkeypatch.setattr(sys, "argv", [*map(str, line)])
    monkeypatch.setattr(accuracy_peers, "SHORT", 32)
    with pytest.raises(SystemExit) as left:
        accuracy_peers.main()
    said = capsys.readouterr().out
    assert left.value.code == 1 and "FAILED: lost, seed 0" in said
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["unquantized", "rtn g64"]
    assert [float(row["long_kl_x1e3"]) > 0 for row in rows] == [False, True]
    assert (rows[1]["long_tokens"], rows[1]["brief_tokens"]) == ("768", "96"), "a short text has short windows"
    assert float(rows[1]["long_kl_x1e3_low"]) < float(rows[1]["long_kl_x1e3"]) < float(rows[1]["long_kl_x1e3_p999"])
    with pytest.raises(SystemExit):
        accuracy_peers.main()
    assert '"name"' not in capsys.readouterr().out, "no row is made twice"
    tables.peers(rows)
    assert "first tokens: 768 of long, 96 of brief" in capsys.readouterr().out
