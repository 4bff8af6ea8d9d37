"""The page stands alone, fits a phone, shows the report's own figures, and takes no name for markup."""

from __future__ import annotations

import base64
import copy
import hashlib
import html.parser
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from quantkit.core.units import format_percent, format_seconds
from quantkit.reporting.charts import ticks
from quantkit.reporting.html import LISTED, WORST, page
from quantkit.reporting.layer_errors import NO_CAUSE, bits, causes
from tests.reporting.samples import HOSTILE, example, layer

VOID = {"meta", "br", "hr", "img", "link", "input"}
PHONE = 390


class Page(html.parser.HTMLParser):
    """Read a page: its elements as (tag, attributes, path of open tags), and the texts of each tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str], tuple[str, ...]]] = []
        self.texts: list[tuple[str, str]] = []
        self.children: list[list[str]] = [[]]
        self.svgs: list[list[str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.children[-1].append(tag)
        self.elements.append((tag, {key: value or "" for key, value in attrs}, tuple(self.open)))
        if tag not in VOID:
            self.open.append(tag)
            self.children.append([])

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()
        inside = self.children.pop()
        if tag == "svg":
            self.svgs.append(inside)

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str) -> list[str]:
        return [text for place, text in self.texts if place == tag]

    @property
    def tags(self) -> Counter[str]:
        return Counter(tag for tag, _, _ in self.elements)


def model(blocks: int = 3, **facts: Any) -> dict[str, Any]:
    """A report of q_proj and up_proj in some blocks, each with errors of its own."""
    report = example()
    report["layers"] = [
        layer(
            f"model.layers.{i}.{kind}",
            **{"relative_error": (1 + i + j) / 50, "loss": 1 + i + j, "norm": 400.0, **facts},
        )
        for i in range(blocks)
        for j, kind in enumerate(("self_attn.q_proj", "mlp.up_proj"))
    ]
    return report


def mixture() -> dict[str, Any]:
    report = example()
    report["layers"] = [
        layer(f"model.layers.{i}.mlp.experts.{e}.up_proj", relative_error=(e + 1) / 20, loss=None)
        for i in range(2)
        for e in range(3)
    ]
    return report


def packed() -> dict[str, Any]:
    report = example()
    report.update(command="pack", calibration={}, phases={})
    report["layers"] = [{"name": "x", "shape": [4, 8], "scheme": "int4:g128", "digest": "0"}]
    return report


def pruned() -> dict[str, Any]:
    report = example()
    facts = {"method": "magnitude", "zeros": 50, "kept": 50, "relative_error": 0.3, "shape": [4, 8], "scheme": "2:4"}
    report.update(command="prune", calibration={}, layout="dense", scheme="2:4", layers=[{"name": "l.0.x", **facts}])
    return report


REPORTS = {
    "plain": example,
    "deep": model,
    "experts": mixture,
    "packed": packed,
    "pruned": pruned,
    "empty": dict,
    "failed": lambda: {**example(), "failed": "no space"},
}


@pytest.mark.parametrize("report", [make() for make in REPORTS.values()], ids=list(REPORTS))
def test_every_page_is_whole_and_stands_alone(report: dict[str, Any]) -> None:
    text = page(report)
    found = Page(text)
    assert text.startswith("<!doctype html>") and not found.open, "each tag must be closed"
    viewport = [attrs["content"] for tag, attrs, _ in found.elements if attrs.get("name") == "viewport"]
    assert viewport == ["width=device-width, initial-scale=1"]
    for tag, attrs, _ in found.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "srcset", "action", "onclick", "onload"} & attrs.keys()
    assert not re.search(r"://|@import|url\(", text)
    assert all(inside[0] == "title" for inside in found.svgs), "every drawing has a title"
    assert page(report) == text


def test_no_width_is_fixed_above_that_of_a_phone() -> None:
    found = Page(page(model()))
    styles = [*found.all("style"), *(attrs.get("style", "") for _, attrs, _ in found.elements)]
    widths = [float(px) for css in styles for px in re.findall(r"(?<![-\w])(?:min-)?width:[^;}]*?([\d.]+)px", css)]
    columns = [float(px) for css in styles for px in re.findall(r"minmax\((?:min\(100%, )?([\d.]+)px", css)]
    assert widths and columns and max(widths + columns) <= PHONE
    assert all(int(attrs.get("width", "0")) <= PHONE for _, attrs, _ in found.elements)
    wide = [path for tag, attrs, path in found.elements if tag == "table" and attrs["class"] == "dense"]
    boxes = [attrs for _, attrs, _ in found.elements if attrs.get("class") == "scroll"]
    assert wide and len(boxes) == len(wide), "a wide table scrolls in a box of its own"
    assert all(box["tabindex"] == "0" and box["aria-label"] for box in boxes)


def told() -> dict[str, Any]:
    report = {**model(), "opened_by": ["quantkit.load"], "device": "cpu", "not_tried": {"vLLM": "is not installed"}}
    report["totals"] |= {"share": 0.9876}
    tails = {"kld_low": 0.01, "kld_high": 0.02, "kld_p999": 3.5, "kld_above": 0.012}
    measured = {"data": "some text", "before": 20.0, "after": 20.5, "kld": 0.0123, "top1": 0.93, "windows": 4}
    return {**report, "environment": {"torch": "2.99"}, "evaluation": {**measured, **tails}}


def places() -> dict[str, Any]:
    names = ("layers.0.attn.out_proj", "layers.0.mamba.out_proj", "layers.0.mlp.up_proj", "lm_head")
    return {**example(), "layers": [layer(name, loss=None) for name in names]}


@pytest.mark.parametrize(
    ("make", "tag", "texts"),
    [
        (told, "h1", ["some/model"]),
        (told, "dd", ["4.125", "2.7 MB", "98.76 %", "5.0 s", "400.0 MB", "some/model abc", "int4:g128", "marlin"]),
        (told, "dd", ["gptq", "quantkit.load, tried on this folder", "one document a row", "2048", "2.99"]),
        (told, "li", ["something was left as it is", "vLLM was not tried on the folder: is not installed"]),
        (told, "li", ["left dense: lm_head"]),
        (told, "span", [example()["files"]["model-00001-of-00001.safetensors"], example()["layers"][0]["digest"]]),
        (told, "p", ["some text, 4 windows"]),
        (told, "td", ["20.0000", "20.5000", "+2.50 %", "0.012300", "93.00 %", "0.010000 to 0.020000", "3.500000"]),
        # The experts of a block are one mark, and kinds of one name in two places stay apart.
        (mixture, "title", ["Block 1, up_proj (experts): median 10.0 %, 5.00 % to 15.0 % (3 linears)"]),
        (places, "title", [f"Block 0, {kind}: 10.0 %" for kind in ("attn.out_proj", "mamba.out_proj", "up_proj")]),
    ],
)
def test_a_page_shows_what_the_report_says(make: Callable[[], dict[str, Any]], tag: str, texts: list[str]) -> None:
    found = Page(page(make()))
    assert set(texts) <= set(found.all(tag))
    assert "Quality" not in page(example())


def test_charts_and_their_tables_show_the_error_of_each_linear() -> None:
    report = model(blocks=4)
    found = Page(page(report))
    titles, cells = found.all("title"), found.all("td")
    for entry in report["layers"]:
        _, _, block, *kind = entry["name"].split(".")
        for error in (entry["relative_error"], math.sqrt(entry["loss"] / entry["norm"])):
            assert f"Block {block}, {kind[-1]}: {format_percent(error)}" in titles
            assert format_percent(error) in cells
    charts = [attrs for tag, attrs, _ in found.elements if tag == "svg" and attrs.get("role") == "img"]
    assert len(charts) == 2 and all("8 linears" in attrs["aria-label"] for attrs in charts)


def test_the_worst_linears_are_ranked_by_the_error_of_their_outputs() -> None:
    report = model(blocks=20)
    report["layers"][0].update(relative_error=0.001, loss=360.0, rtn_loss=400.0)
    found = Page(page(report))
    rows = [i for i, (tag, attrs, _) in enumerate(found.elements) if tag == "table" and "worst" in attrs["class"]]
    assert len(rows) == 1
    names = found.all("span")
    assert names[: 2 * WORST + 2].count("model.layers.0.self_attn.q_proj") == 1
    worst = [text for text in names if text.startswith("model.")][:WORST]
    assert len(worst) == WORST and worst[0] == "model.layers.0.self_attn.q_proj"
    assert worst[1] == "model.layers.19.mlp.up_proj" and "0.900" in found.all("td")


CAUSES: list[tuple[dict[str, Any], str]] = [
    ({"channel_peak": 40.4}, "outlier channel: 40 times the median input channel"),
    ({"tokens": 100}, "few tokens: 100 for 512 input channels"),
    ({"rungs": [0.01, 0.1]}, "damping raised from 0.01 to 0.1"),
    ({"dead_columns": 3}, "input channels that no token reached: 3"),
    ({"guard_rows": 4}, "rows where rounding was better, and kept: 4"),
    ({"reason": "no token came"}, "fallback to rounding: no token came"),
    ({"by_magnitude": "no token came"}, "fallback to pruning by magnitude: no token came"),
    ({"requantized_from": "fp6"}, "rounded a second time, from fp6"),
    ({"few_routed": "9 tokens for 99", "tokens": 9}, "few tokens routed to this expert: 9 tokens for 99 (calibrated"),
    ({"floored_scales": 5}, "scales raised to 2^-20: 5"),
    ({"rounded_scales": 6}, "scales rounded to the layout's type: 6"),
    ({"zeros": 75, "kept": 25}, "2:4 pruning: 75.0 % of the weights are zero"),
    ({"scheme": "int4:g128"}, "fewer bits: 4.12, elsewhere up to 6.03"),
]


@pytest.mark.parametrize(("facts", "words"), CAUSES, ids=[next(iter(facts)) for facts, _ in CAUSES])
def test_each_recorded_cause_is_told_in_words(facts: dict[str, Any], words: str) -> None:
    report = example()
    report["layers"] = [layer("model.layers.0.q_proj", scheme="fp6:channel", tokens=9999)]
    assert NO_CAUSE in page(report)
    told = {**report["layers"][0], **facts}
    report["layers"] = [told, layer("model.layers.1.q_proj", scheme="fp6:channel")]
    [cause] = causes(told, max(b for each in report["layers"] if (b := bits(each)) is not None))
    assert cause.startswith(words)
    assert cause in Page(page(report)).all("td")


@pytest.mark.parametrize(
    ("scheme", "width"),
    [("int4:g128", 4.125), ("int4:g128:asym", 4.15625), ("int4:g128:24", 3.125), ("fp6:channel", 6.03125), ("x", None)],
)
def test_bits_count_scales_zero_points_and_indices(scheme: str, width: float | None) -> None:
    assert bits(layer("x", scheme=scheme)) == width


VERIFIED = {"ok": True, "linears": 2, "weights": 1234567, "note": "no kernel ran", "hashes": {"a": "1"}}


@pytest.mark.parametrize(
    ("verification", "word", "sentence"),
    [
        (None, "not verified", "quantkit verify FOLDER"),
        (VERIFIED, "✓ verified", "2 linears and 1,234,567 weights bit by bit; no kernel ran"),
        ({**VERIFIED, "ok": False, "failures": ["a: was changed"]}, "✗ verification failed", "a: was changed"),
        ({**VERIFIED, "hashes": {"a": "2"}}, "not verified", "verify.json is about other files"),
        ({}, "✗ verification failed", "failed"),
    ],
)
def test_the_page_says_whether_the_folder_was_verified(
    verification: dict[str, Any] | None, word: str, sentence: str
) -> None:
    found = Page(page({**example(), "files": {"a": "1"}}, verification))
    assert found.all("li")[0] == word
    assert any(sentence in fact for fact in found.all("dd"))


def test_a_hostile_report_adds_no_element_and_no_script() -> None:
    def with_name(name: str) -> dict[str, Any]:
        report = copy.deepcopy(model())
        report.update(scheme=name, layout=name, command=name, dense=[name], notices=[name], readers=[name])
        report.update(quantkit=name, failed=name, opened_by=[name], phases={name: 1.0}, recipe={name: name})
        report.update(environment={name: name}, files={name: name}, calibration={name: name, "x": [name]})
        report.update(not_tried={name: name}, evaluation={"before": 1.0, "after": 2.0, "data": name})
        report["source"] = {"name": name, "revision": name, "files": {name: name}}
        report["base"] = {"name": name, "revision": name, "base_model": name}
        report["totals"]["peak_memory"] = {name: 1}
        report["layers"].append(layer(f"layers.0.{name}.q", method=name, digest=name, reason=name, scheme=name))
        return report

    def parsed(name: str) -> Page:
        return Page(page(with_name(name), {"ok": True, "note": name}))

    evil, plain = parsed(f'{HOSTILE}"><img src=x onerror=alert(1)></style></script>'), parsed("plain")
    assert evil.tags == plain.tags
    assert [attrs.keys() for _, attrs, _ in evil.elements] == [attrs.keys() for _, attrs, _ in plain.elements]
    assert evil.all("script") == plain.all("script") and evil.all("style") == plain.all("style")
    assert any("<script>alert(1)</script>" in text for text in evil.all("h1"))
    hidden = page(with_name("a\x00b\x1b[2J\u202ec\u2028d"))
    assert all(letter.isprintable() or letter == "\n" for letter in hidden)


def test_a_browser_runs_no_script_but_the_page_s_own() -> None:
    found = Page(page(example()))
    [policy] = [attrs["content"] for _, attrs, _ in found.elements if "http-equiv" in attrs]
    [script] = found.all("script")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy


def test_large_models_give_small_pages() -> None:
    report = model(blocks=252)
    for entry in report["layers"]:
        entry["digest"] = f"xxh3_128:{'0' * 32}"
    assert len(report["layers"]) == 504 and len(page(report).encode()) < 500_000
    report["layers"] = report["layers"][:1] * (LISTED + 1)
    assert f"The {LISTED + 1} linears are in quantkit_report.json" in page(report)


def test_units_are_short() -> None:
    said = ["0.0 s", "59.9 s", "1 min 1 s", "59 min 59 s", "2 h 2 min"]
    assert [format_seconds(s) for s in (0.04, 59.9, 61, 3599, 7325)] == said
    assert [format_percent(x) for x in (0.06, 0.1234, 1.0, 0.0)] == ["6.00 %", "12.3 %", "100 %", "0.00 %"]


@pytest.mark.parametrize("top", [1e-9, 0.0123, 0.1, 0.95, 7.3, 1e300])
def test_an_axis_has_a_few_round_ticks_up_to_its_largest_value(top: float) -> None:
    found = ticks(top)
    assert found[0] == 0 and found[-1] >= top * (1 - 1e-9) and 3 <= len(found) <= 6
    assert found[-2] < top
    assert float(f"{found[1]:.2g}") == pytest.approx(found[1]) and ticks(0) == [0, 1]
