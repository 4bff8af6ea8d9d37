"""Closing table and model card show every event, and print every name as data."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from quantkit.reporting.facts import EVENTS
from quantkit.reporting.model_card import model_card
from quantkit.reporting.summary import summary
from tests.reporting.samples import HOSTILE, example


def test_the_closing_table_has_every_figure() -> None:
    text = summary(example())
    for part in (
        "2 linears, int4:g128, marlin",
        "4.5 MB before, 2.7 MB after, 4.125 bits",
        "mean 0.15, worst 0.2 (a.k_proj)",
        "0.700 of rounding's on average, worst 0.900 (a.k_proj)",
        "8 sequences, 2048 tokens of c4",
        "5 documents cut, 2 skipped",
        "5.0 s (forward 1.5 s, solve 2.2 s)",
        "400.0 MB RAM, 1.0 GB VRAM",
        "left dense: lm_head",
        "something was left as it is",
    ):
        assert part in text, part


@pytest.mark.parametrize("fact", EVENTS)
def test_closing_table_and_card_count_every_event(fact: str) -> None:
    report = example()
    quiet = summary(report) + model_card(report)
    assert EVENTS[fact] not in quiet
    value: Any = {"rungs": [0.01, 0.1, 1.0], "reason": "no calibration token came here"}.get(fact, 7)
    report["layers"][1][fact] = value
    counted = {"rungs": "2", "reason": "no calibration token came here"}.get(fact, "7")
    for text in (summary(report), model_card(report)):
        assert f"1 of 2 linears {EVENTS[fact]}: {counted}, first a.k_proj" in text


def test_linears_of_several_schemes_are_counted_in_the_first_line() -> None:
    report = example()
    report["layers"][1]["scheme"] = "fp6:channel"
    assert "2 linears, int4:g128 (1) + fp6:channel (1), marlin" in summary(report)


@pytest.mark.parametrize(("same", "line"), [(2, "lossless      2 of 2 tensors"), (1, "lossy         1 of 2 tensors")])
def test_a_conversion_says_how_many_tensors_have_the_same_values(same: int, line: str) -> None:
    assert line in summary({**example(), "same_values": same})
    assert "tensors represent" not in summary(example())


def test_a_long_list_of_dense_linears_ends_in_a_count() -> None:
    report = example()
    report["dense"] = [f"l{i}" for i in range(9)]
    assert "l0, l1, l2, l3, l4 and 4 more" in summary(report)


def test_the_model_card_opens_with_metadata_that_yaml_reads() -> None:
    card = model_card(example())
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": "some/model",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["quantized", "quantkit", "marlin", "int4"],
    }
    for part in (
        "some/model",
        "revision abc",
        "4.125 bits",
        "| loads in | quantkit.load |",
        "quantkit verify",
        "2048 tokens",
    ):
        assert part in body, part
    assert '"method": "gptq"' in body and "f" * 64 in body
    assert "| a.k_proj | 0.20000 | 0.900 |" in body
    assert "5.0 s" not in card, "a time would make the card differ from run to run"
    assert card == model_card(example())


def test_a_hostile_name_is_printed_as_data() -> None:
    report = example()
    report["source"]["name"] = HOSTILE
    report["dense"] = report["notices"] = [HOSTILE]
    report["layers"][0]["name"] = HOSTILE
    card = model_card(report)
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == HOSTILE
    assert "<script>" not in body
    assert not any(line.strip() == "---" for line in body.splitlines())
    assert HOSTILE not in (text := summary(report)) and "left dense: evil --- name: `x` <script>" in text
    assert len(text.splitlines()) == len(summary({**example(), "notices": ["x"]}).splitlines())
    report["notices"] = ["\x1b[2Jx\x1b]0;title\x07\u202ey"]  # a terminal would obey these
    assert "[2Jx]0;titley" in summary(report) and summary(report).replace("\n", "").isprintable()


@pytest.mark.parametrize("command", ["pack", "quantize"])
def test_a_report_with_few_entries_can_be_printed(command: str) -> None:
    report = {"command": command, "layout": "gptq", "scheme": "int4:g64", "layers": [{"name": "x"}], "totals": {}}
    assert "1 linears" in summary(report)
    assert "no text was read" in model_card(report)
    assert model_card({}) and summary({})
