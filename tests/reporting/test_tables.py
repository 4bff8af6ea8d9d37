"""Tables and facts fit a terminal, and lose no word; a file gets the same text whatever terminal is there."""

from __future__ import annotations

import pytest

from quantkit.engines.tables import UNTRIED
from quantkit.reporting import tables
from quantkit.reporting.facts import readers
from quantkit.reporting.model_card import model_card
from quantkit.reporting.summary import summary
from tests.reporting.samples import example

ROWS = [("model.layers.0.mlp.experts.11.down_proj", [256, 512], "int4:g128:asym", "the engine does not join them", 7)]
HEADER = ("linear", "shape", "scheme", "why it stays as it is", "count")


@pytest.mark.parametrize("columns", [48, 60, 80])
def test_a_table_wraps_at_the_width_of_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tables.table(HEADER, ROWS)
    monkeypatch.setenv("COLUMNS", str(columns))
    text = tables.table(HEADER, ROWS)
    assert max(map(len, whole.splitlines())) > 80 and len(whole.splitlines()) == 2
    assert max(map(len, text.splitlines())) <= columns
    assert sorted("".join(text.split())) == sorted("".join(whole.split()))


@pytest.mark.parametrize("columns", [60, 200, None])
def test_the_closing_table_wraps_below_its_labels(columns: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    report = example()
    report["notices"] = ["a note of many words " * 12]
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    lines = summary(report).splitlines()
    values = [line[14:] for line in lines]
    assert max(map(len, lines)) <= (columns or 300)
    assert (max(map(len, values)) <= tables.MOST) is (columns is not None)
    assert " ".join(" ".join(values).split()).count("a note of many words") == 12


def test_what_loads_a_folder_is_said_under_one_word_with_what_was_tried() -> None:
    public = ["vLLM", f"SGLang{UNTRIED}", "transformers (with compressed-tensors)", "quantkit.load"]
    report = {**example(), "readers": public, "opened_by": ["quantkit.load", "transformers"]}
    here = "quantkit.load, transformers (with compressed-tensors), tried on this folder; vLLM"
    assert readers(report) == [("loads in", here), ("perhaps in", "SGLang: by documentation, not tried")]
    for text in (summary(report), model_card(report)):
        assert "opened by" not in text and here in text
    assert readers({"readers": public[:1], "opened_by": []})[0][1].startswith("vLLM; none was tried")
    assert readers({}) == [("loads in", ""), ("perhaps in", "")]


def test_no_cell_of_a_card_is_longer_than_a_line() -> None:
    report = example()
    report["readers"] = [f"a program of many words, number {i}" for i in range(9)]
    cells = [cell for line in model_card(report).splitlines() if line.startswith("|") for cell in line.split(" | ")]
    assert max(map(len, cells)) <= tables.MOST + 4
    assert all(f"number {i}" in " ".join(cells) for i in range(9))
