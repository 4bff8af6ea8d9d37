"""The scripts that time parts of quantkit run on a CPU with small shapes, and their figures add up."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from benchmarks import quantize, solver
from tests.benchmarks.samples import LLAMA
from tests.promises.model import write_json


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_solver_has_a_row_for_each_shape_in_each_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "--shape 64x128 32x256 --scheme int4:g128 fp6:channel --rounds 1 --device cpu --csv"
    monkeypatch.setattr(sys, "argv", ["solver.py", *line.split(), str(tmp_path / "a.csv")])
    solver.main()
    found = read(tmp_path / "a.csv")
    assert [(row["rows"], row["columns"]) for row in found] == [("64", "128")] * 2 + [("32", "256")] * 2
    assert [row["scheme"] for row in found] == ["int4:g128", "fp6:channel"] * 2
    assert all(float(row[key]) > 0 for row in found for key in row if key.endswith("_s"))
    assert all(0 < float(row["loss_of_rounding"]) < 1 for row in found)


def test_the_phases_of_a_run_add_up_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "config.json", LLAMA | {"num_hidden_layers": 4})
    (tmp_path / "recipe.yaml").write_text("{scheme: {group_size: channel}, layout: marlin}")
    (tmp_path / "work").mkdir()
    line = f"--model {tmp_path} --recipe {tmp_path}/recipe.yaml --blocks 3 --samples 4 --max-length 16"
    line += f" --work {tmp_path}/work --device cpu --csv {tmp_path}/a.csv"
    monkeypatch.setattr(sys, "argv", ["quantize.py", *line.split()])
    quantize.main()
    *each, total = read(tmp_path / "a.csv")
    by_name = {row["phase"]: row for row in each}
    assert {"forward", "hessian", "solve", "load", "save", "write"} <= by_name.keys()
    assert (total["blocks"], total["all_blocks"], total["ranks"], total["tokens"]) == ("3", "4", "1", "64")
    for key in ("first_block_s", "block_s", "outside_blocks_s", "run_s", "estimate_all_blocks_s"):
        assert float(total[key]) == pytest.approx(sum(float(row[key]) for row in each), rel=1e-4)
    assert float(by_name["solve"]["times_floor"]) > 0 < float(total["planned_ram"])
    assert not list((tmp_path / "work").iterdir())
