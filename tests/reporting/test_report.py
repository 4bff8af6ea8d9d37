"""Closing table, model card and charts show every event, and treat every name as data."""

from __future__ import annotations

import copy
import html.parser
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantkit.errors import CheckpointError, RecipeError
from quantkit.layouts import LAYOUTS
from quantkit.reporting.facts import EVENTS
from quantkit.reporting.model_card import READERS, model_card
from quantkit.reporting.plots import draw
from quantkit.reporting.report import REPORT, load
from quantkit.reporting.summary import summary
from quantkit.reporting.units import format_bytes

HOSTILE = 'evil\n---\nname: `x` <script>alert(1)</script> | "y" é'


def layer(name: str, **facts: Any) -> dict[str, Any]:
    known = {"name": name, "shape": [256, 512], "scheme": "int4:g128", "method": "gptq", "digest": "0" * 64}
    figures = {"relative_error": 0.1, "loss": 0.5, "rtn_loss": 1.0, "norm": 9.0, "rungs": [0.01], "damp": 0.01}
    counts = {"dead_columns": 0, "guard_rows": 0, "floored_scales": 0, "subnormal_scales": 0, "zero_scales": 0}
    return {**known, **figures, **counts, "seconds": 0.1, **facts}


def example() -> dict[str, Any]:
    return {
        "quantkit": "0.1.0",
        "command": "quantize",
        "source": {"name": "some/model", "revision": "abc", "files": {}},
        "recipe": {"method": "gptq"},
        "recipe_sha256": "f" * 64,
        "layout": "marlin",
        "scheme": "int4:g128",
        "calibration": {
            "source": "c4",
            "rule": "one document a row",
            "sequences": 8,
            "tokens": 2048,
            "lengths": "own",
            "max_length": 256,
            "seed": 3,
            "cut": 5,
            "skipped": 2,
        },
        "layers": [layer("a.q_proj"), layer("a.k_proj", relative_error=0.2, loss=0.9)],
        "dense": ["lm_head"],
        "notices": ["something was left as it is"],
        "phases": {"forward": 1.5, "solve": 2.25},
        "files": {"model-00001.safetensors": "0" * 64},
        "totals": {
            "bits_per_weight": 4.125,
            "bytes": 2_700_000,
            "source_bytes": 4_500_000,
            "seconds": 5.0,
            "peak_memory": {"ram": 400_000_000, "vram": 1_000_000_000},
        },
    }


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


def test_a_long_list_of_dense_linears_ends_in_a_count() -> None:
    report = example()
    report["dense"] = [f"l{i}" for i in range(9)]
    assert "l0, l1, l2, l3, l4 and 4 more" in summary(report)


def test_every_layout_has_its_readers() -> None:
    assert READERS.keys() == LAYOUTS.keys()


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
    for part in ("some/model", "revision abc", "4.125 bits", READERS["marlin"], "quantkit verify", "2048 tokens"):
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


@pytest.mark.parametrize("suffix", [".html", ".png"])
def test_charts_show_every_layer(suffix: str, tmp_path: Path) -> None:
    if suffix == ".png":
        pytest.importorskip("matplotlib", reason="PNG drawings need the extra `plot`")
    report = example()
    report["layers"] = [layer(f"model.layers.{i}.mlp.up_proj", relative_error=i / 100) for i in range(40)]
    path = tmp_path / f"report{suffix}"
    draw(report, path)
    data = path.read_bytes()
    if suffix == ".png":
        assert data.startswith(b"\x89PNG")
    else:
        text = data.decode()
        assert all(f"model.layers.{i}.mlp.up_proj" in text for i in range(40))
        for title in ("Relative weight error", "Time", "Size"):
            assert title in text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), "the page must stand alone"
    draw(report, tmp_path / f"again{suffix}")
    assert (tmp_path / f"again{suffix}").read_bytes() == data


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)


def test_names_are_escaped_in_html(tmp_path: Path) -> None:
    report = example()
    report["source"]["name"] = report["scheme"] = HOSTILE
    report["layers"][0]["name"] = HOSTILE
    report["phases"] = {HOSTILE: 1.0}
    draw(report, tmp_path / "r.html")
    tags = Tags()
    tags.feed((tmp_path / "r.html").read_text())
    assert "script" not in tags.seen


def test_charts_of_an_empty_and_of_a_perfect_run(tmp_path: Path) -> None:
    perfect = example()
    perfect["layers"] = [layer("x", relative_error=0.0, loss=0.0, rtn_loss=0.0)]
    for number, report in enumerate(({}, perfect)):
        draw(report, tmp_path / f"{number}.html")
        if pytest.importorskip("matplotlib"):
            draw(report, tmp_path / f"{number}.png")


def test_another_file_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"\.html or \.png"):
        draw(example(), tmp_path / "r.pdf")
    assert not list(tmp_path.iterdir())


def test_a_png_without_matplotlib_names_the_extra_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(CheckpointError, match=r"quantkit\[plot\]"):
        draw(example(), tmp_path / "r.png")
    assert not list(tmp_path.iterdir())


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
    assert summary(found) and model_card(found)
    draw(found, tmp_path / "r.html")


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
    assert summary(found) and model_card(found)
    draw(found, tmp_path / "r.html")


def test_bytes_are_formatted_in_decimal_units() -> None:
    assert [format_bytes(x) for x in (0, 999, 1000, 4_459_008, 2e9, 3e13)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "4.5 MB",
        "2.0 GB",
        "30.0 TB",
    ]
