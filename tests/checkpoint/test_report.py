"""A report is read as it was written; a malformed one is refused, or can be printed and drawn."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from quantkit.checkpoint.report import REPORT, digest, load
from quantkit.core.units import format_bytes
from quantkit.errors import CheckpointError
from quantkit.reporting.html import page
from quantkit.reporting.model_card import model_card
from quantkit.reporting.summary import summary
from tests.reporting.samples import example


def test_load_reads_a_written_report(tmp_path: Path) -> None:
    assert load(tmp_path) == {}
    (tmp_path / REPORT).write_text(json.dumps(example()))
    assert load(tmp_path) == example()


WRONG: list[Any] = ["x", 5, None, [], {}, [5], ["x"], [{}], [{"name": 5}], {"a": "b"}, True]


@pytest.mark.parametrize("key", ["layers", "files", "source", "totals", "phases", "calibration", "dense", "notices"])
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_report_with_a_wrong_entry_is_refused_or_printed(key: str, value: Any, tmp_path: Path) -> None:
    report = copy.deepcopy(example())
    report[key] = value
    (tmp_path / REPORT).write_text(json.dumps(report))
    try:
        found = load(tmp_path)
    except CheckpointError as error:
        assert REPORT in str(error) and "\n" not in str(error)
        return
    assert summary(found) and model_card(found) and page(found)


@pytest.mark.parametrize("key", ["relative_error", "loss", "rtn_loss", "dead_columns", "rungs", "reason", "name"])
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_layer_with_a_wrong_fact_is_refused_or_printed(key: str, value: Any, tmp_path: Path) -> None:
    report = example()
    report["layers"][0][key] = value
    (tmp_path / REPORT).write_text(json.dumps(report))
    try:
        found = load(tmp_path)
    except CheckpointError:
        return
    assert summary(found) and model_card(found) and page(found)


@pytest.mark.parametrize(
    "value", [*WRONG, [{"share": "x"}, {}], [{}, {"share": 0.5, "source": 5, "sha256": None}]], ids=repr
)
def test_a_calibration_with_wrong_sources_is_refused_or_printed(value: Any, tmp_path: Path) -> None:
    report = example()
    report["calibration"]["sources"] = value
    (tmp_path / REPORT).write_text(json.dumps(report))
    try:
        found = load(tmp_path)
    except CheckpointError:
        return
    assert summary(found) and model_card(found)


def test_bytes_are_formatted_in_decimal_units() -> None:
    assert [format_bytes(x) for x in (0, 999, 1000, 4_459_008, 2e9, 3e13)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "4.5 MB",
        "2.0 GB",
        "30.0 TB",
    ]


def test_the_digest_of_a_report_leaves_out_what_differs_from_run_to_run() -> None:
    first = example()
    again = {**first, "phases": {}, "environment": {"threads": 2}, "totals": {**first["totals"], "seconds": 9.0}}
    again["layers"] = [{**layer, "seconds": 1.0, "loss": 0.5 + 1e-12} for layer in first["layers"]]
    assert digest(first) == digest(again)
    changed = {**first, "files": {"model-00001.safetensors": "1" * 64}}
    assert digest(changed) != digest(first)
