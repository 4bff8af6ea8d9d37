"""A report is read as it was written, and its digest leaves out what differs from run to run."""

from __future__ import annotations

import json
from pathlib import Path

from quantkit.checkpoint.report import REPORT, digest, load
from quantkit.core.units import format_bytes
from tests.reporting.samples import example


def test_load_reads_a_written_report(tmp_path: Path) -> None:
    assert load(tmp_path) == {}
    (tmp_path / REPORT).write_text(json.dumps(example()))
    assert load(tmp_path) == example()


def test_bytes_are_formatted_in_decimal_units() -> None:
    found = ", ".join(map(format_bytes, (0, 999, 1000, 4_459_008, 2e9, 3e13)))
    assert found == "0 B, 999 B, 1.0 kB, 4.5 MB, 2.0 GB, 30.0 TB"


def test_the_digest_of_a_report_leaves_out_what_differs_from_run_to_run() -> None:
    first = example()
    again = {**first, "phases": {}, "environment": {"threads": 2}, "totals": {**first["totals"], "seconds": 9.0}}
    again["layers"] = [{**layer, "seconds": 1.0, "loss": 0.5 + 1e-12} for layer in first["layers"]]
    assert digest(first) == digest(again)
    changed = {**first, "files": {"model-00001.safetensors": "1" * 64}}
    assert digest(changed) != digest(first)
