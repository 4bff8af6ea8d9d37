"""Times of the solver on single weights: a row for each shape and scheme."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from tests.command_line import call


def test_each_shape_in_each_scheme_has_a_row_in_the_table_the_csv_and_the_json(tmp_path: Path) -> None:
    options = ("--shape", "64x128", "--shape", "32x256", "--scheme", "int4:g128", "--scheme", "fp6:channel")
    line = ("bench", "solver", *options, "--device", "cpu", "--csv", tmp_path / "solver.csv")
    found = json.loads(call(*line, "--json", "-q").stdout)["rows"]
    assert [(row["rows"], row["columns"], row["scheme"]) for row in found] == [
        (n, k, scheme) for n, k in ((64, 128), (32, 256)) for scheme in ("int4:g128", "fp6:channel")
    ]
    assert all(row[key] > 0 for row in found for key in row if key.endswith("_s"))
    assert all(0 < row["loss_of_rounding"] < 1 for row in found)
    with (tmp_path / "solver.csv").open(newline="") as file:
        assert [row.keys() for row in csv.DictReader(file)] == [row.keys() for row in found]


def test_a_shape_that_is_none_is_refused() -> None:
    assert "is no shape" in call("bench", "solver", "--shape", "64", code=2).stderr
