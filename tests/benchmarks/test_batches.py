"""The means that batches.py prints, and those of docs/kernels.md, follow from its rows."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from statistics import geometric_mean

from benchmarks.batches import COLUMNS, summary
from quantkit.kernels.hopper import MAX_TOKENS

ROOT = Path(__file__).resolve().parents[2]


def row(m: int, layer: str, packed: float, in_parts: float) -> dict[str, object]:
    about = {"layout": "tcfpx", "scheme": "fp6:channel", "layer": layer, "M": m}
    times = {name: in_parts if name == "packed_2048_us" else packed for name in COLUMNS}
    return about | times | {"cublas_us": 80.0, "vs_cublas": 80.0 / in_parts}


def test_means_are_geometric_and_the_worst_layer_is_named() -> None:
    rows = [row(512, "o", 40.0, 40.0), row(8192, "o", 160.0, 80.0), row(8192, "qkv", 640.0, 320.0)]
    assert list(summary(rows)) == [
        "tcfpx fp6:channel M=512: packed 2.000, packed_2048 2.000, packed_4096 2.000 of cuBLAS; worst 2.000 (o)",
        "tcfpx fp6:channel M=8192: packed 0.250, packed_2048 0.500, packed_4096 0.250 of cuBLAS; worst 0.250 (qkv)",
    ]


def test_the_page_has_the_means_of_the_committed_rows() -> None:
    with (ROOT / "benchmarks/gpu/batches.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = (ROOT / "docs/kernels.md").read_text().splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    head = next(line for line in table if line[:2] == ["layout, scheme", "launches"])
    found = {(line[0], line[1]): line[2:] for line in table if line[1] in ("one", f"of {MAX_TOKENS}")}
    schemes = dict.fromkeys(f"{one['layout']} {one['scheme']}" for one in rows)
    assert found == {
        (scheme, launches): [mean(rows, scheme, m, column) for m in head[2:]]
        for scheme in schemes
        for launches, column in (("one", "packed_us"), (f"of {MAX_TOKENS}", f"packed_{MAX_TOKENS}_us"))
    }


def mean(rows: list[dict[str, str]], scheme: str, m: str, column: str) -> str:
    part = [one for one in rows if (f"{one['layout']} {one['scheme']}", one["M"]) == (scheme, m.replace(",", ""))]
    assert len(part) == 8, "the linears of two models"
    return f"{geometric_mean(share(one, column) for one in part):.2f}"


def share(one: Mapping[str, str], column: str) -> float:
    return float(one["cublas_us"]) / float(one[column])
