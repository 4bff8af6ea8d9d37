"""A report as one self-contained HTML page: no other file, no network, and nothing in it that a report could run."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.core.units import format_bytes, format_percent, format_seconds
from quantkit.reporting import charts, facts
from quantkit.reporting import layer_errors as errors
from quantkit.reporting.charts import Bar
from quantkit.reporting.layer_errors import Series, number
from quantkit.reporting.markup import Element, document, raw, tag

#: Linears in the table of the worst, and the most in the table of all: each takes some 300 bytes of the page.
WORST = 20
LISTED = 1000
#: Charts of more blocks have smaller marks.
MANY = 24
#: Pixels of a chart: where the values begin and end, and the line below.
_TOP, _BASE, _BELOW = 12.0, 250.0, 272.0
#: Percent of a chart's width that its first and last block are away from its sides.
_INSET = 3.0

_HERE = Path(__file__).parent


def page(report: Mapping[str, Any], verification: Mapping[str, Any] | None = None) -> str:
    """Write the page of a report; `verification` is the content of verify.json, None if there is none."""
    source = report.get("base") or report.get("source", {})
    name = str(source.get("name") or "unknown model")
    layers = report.get("layers", [])
    state, words = _verified(report, verification)
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    body = tag(
        "main",
        tag("p", f"quantkit report · {report.get('command', 'unknown command')}", class_="over"),
        tag("h1", name),
        _chips(report, state),
        tag("p", f"This run failed: {report['failed']}", class_="banner") if report.get("failed") else None,
        _tiles(report),
        _facts(report, source, words),
        _evaluation(report),
        _depth(layers),
        _worst(layers),
        _costs(report),
        _notices(report),
        _details(report, layers),
        tag("footer", f"Written by quantkit from quantkit_report.json of version {report.get('quantkit', 'unknown')}."),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{name}, {report.get('scheme')}, {report.get('layout')}"),
        raw("style", _style()),
    )
    return document(tag("html", head, tag("body", body, raw("script", script)), lang="en"))


def _policy(script: str) -> str:
    """Allow the page's own script and no other, so that a browser would not run one even if a name could add it."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"


def _style() -> str:
    def colours(values: Iterable[str]) -> str:
        return "".join(f".s{i}{{color:{value}}}" for i, value in enumerate(values))

    dark = f"@media (prefers-color-scheme: dark) {{{colours(charts.DARK)}}}"
    series = ".series{stroke:currentColor;fill:currentColor}.point,.legend path{stroke:none;fill:currentColor}"
    return f"\n{(_HERE / 'page.css').read_text(encoding='utf-8')}{colours(charts.LIGHT)}{dark}{series}\n"


def _verified(report: Mapping[str, Any], verification: Mapping[str, Any] | None) -> tuple[tuple[str, str], str]:
    """Give the state of the proof, as a class and a word, and a sentence about it."""
    if report.get("command") == "prune":
        return ("", "dense output"), "nothing is packed: compare its perplexity with quantkit eval ppl FOLDER"
    if verification is None:
        return ("warn", "not verified"), "no: run quantkit verify FOLDER, which writes verify.json, and draw this again"
    failures = verification.get("failures")
    if verification.get("ok") is not True:
        first = f", the first: {failures[0]}" if isinstance(failures, list) and failures else ""
        return ("bad", "verification failed"), f"failed{first}"
    hashes, files = verification.get("hashes"), report.get("files", {})
    if isinstance(hashes, dict) and any(files.get(name) != value for name, value in hashes.items()):
        return ("warn", "not verified"), "verify.json is about other files: run quantkit verify FOLDER again"
    count = (
        f"{number(verification.get('linears')) or 0:.0f} linears and {number(verification.get('weights')) or 0:,.0f}"
    )
    return ("good", "verified"), f"yes, {count} weights bit by bit; {verification.get('note', '')}"


def _chips(report: Mapping[str, Any], state: tuple[str, str]) -> Element:
    kind, word = state
    words = [str(report[key]) for key in ("scheme", "layout") if report.get(key)]
    words += [facts.methods(report.get("layers", []))]
    chips = [tag("li", word) for word in dict.fromkeys(words)]
    return tag("ul", tag("li", {"good": "✓ ", "bad": "✗ "}.get(kind, "") + word, class_=kind), *chips, class_="chips")


def _tiles(report: Mapping[str, Any]) -> Element:
    """Show the headline figures that the report has."""
    totals, layers = report.get("totals", {}), report.get("layers", [])
    before, after = number(totals.get("source_bytes")), number(totals.get("bytes"))
    found: list[tuple[str, str, str]] = []
    if (width := number(totals.get("bits_per_weight"))) is not None:
        found.append(("Bits per weight", f"{width:.3f}", "of quantized weights, with scales"))
    if before and after:
        found.append(("Size", format_bytes(after), f"{before / after:.2f} times smaller than {format_bytes(before)}"))
    if (share := number(totals.get("share"))) is not None:
        done = "pruned" if report.get("command") == "prune" else "quantized"
        found.append((f"Decoder {done}", f"{100 * share:.2f} %", f"of its weights, in {len(layers)} linears"))
    error = errors.leading_error(layers)
    worst = errors.worst(layers, error, len(layers))
    if worst:
        label = "Output error" if error is errors.output_error else "Weight error"
        middle = worst[len(worst) // 2][0]
        found.append((label, format_percent(middle), f"median of linears, worst {format_percent(worst[0][0])}"))
    if (seconds := number(totals.get("seconds"))) is not None:
        device = report.get("device")
        found.append(("Time", format_seconds(seconds), f"on {device}" if device else "in all"))
    peak = charts.memory(report)
    if peak:
        found.append(
            ("Peak memory", peak[0].label, ", ".join([peak[0].name, *(f"{b.label} {b.name}" for b in peak[1:])]))
        )
    return tag(
        "dl",
        *(
            tag("div", tag("dt", label), tag("dd", value, class_="value"), tag("dd", note, class_="note"))
            for label, value, note in found
        ),
        class_="tiles",
    )


def _facts(report: Mapping[str, Any], source: Mapping[str, Any], verified: str) -> Element:
    layers = report.get("layers", [])
    return _section(
        "At a glance",
        None,
        _definitions(
            [
                ("Model", " ".join(str(source[key]) for key in ("name", "revision") if source.get(key))),
                ("Scheme", report.get("scheme")),
                ("Layout", report.get("layout")),
                ("Method", facts.methods(layers)),
                ("2:4 sparsity", facts.sparsity(layers)),
                ("Output loss", facts.losses(layers)),
                ("Opened by", facts.openings(report) or "not recorded"),
                ("Loads in", ", ".join(map(str, report.get("readers", [])))),
                ("Verified", verified),
            ]
        ),
    )


def _evaluation(report: Mapping[str, Any]) -> Element | None:
    """Compare quality before and after, if the run measured it."""
    found = report.get("evaluation")
    if not isinstance(found, Mapping):
        return None
    before, after, kld, top1 = (number(found.get(key)) for key in ("before", "after", "kld", "top1"))
    rows = []
    if before and after is not None:
        change = f"{100 * (after / before - 1):+.2f} %"
        rows.append(("Perplexity", f"{before:.4f}", f"{after:.4f}", change))
    if kld is not None:
        rows.append(("KL divergence, nats", "0", f"{kld:.6f}", "–"))
    if top1 is not None:
        rows.append(("Same first choice", "100 %", f"{100 * top1:.2f} %", "–"))
    if not rows:
        return None
    shown = (("data", "{}"), ("windows", "{} windows"), ("window", "of {} tokens"), ("tokens", "{} predictions"))
    about = ", ".join(words.format(found[key]) for key, words in (*shown, ("weights", "{}")) if found.get(key))
    return _section("Quality", about, _table(("", "before", "after", "change"), rows, "cards", (1, 2, 3)))


def _depth(layers: Sequence[errors.Layer]) -> Element | None:
    """Chart the errors over the blocks, those of the outputs first."""
    found = [
        (title, about, series)
        for title, about, error in (
            ("Output error", "How far the outputs on the calibration text moved: relative, RMS.", errors.output_error),
            ("Weight error", "How far the stored weights are from the original: relative, RMS.", errors.weight_error),
        )
        if (series := errors.by_depth(layers, error))
    ]
    if not found:
        return None
    about = "Each mark is one linear; choose a kind to see it alone."
    if any(line.experts for _, _, series in found for line in series):
        about += " Experts: the mark is the median of a block, the bar reaches from the least to the largest."
    charted = (element for title, words, series in found for element in _chart(title, words, series))
    return _section("Error by depth", about, *charted)


def _chart(title: str, about: str, series: Sequence[Series]) -> list[Element]:
    axis = charts.ticks(max(point.high for line in series for point in line.points))
    blocks = [point.block for line in series for point in line.points]
    first, last = min(blocks), max(blocks)

    def x(block: int) -> str:
        return f"{_INSET + (100 - 2 * _INSET) * ((block - first) / (last - first) if last > first else 0.5):.2f}%"

    def y(value: float) -> str:
        return f"{_BASE - (_BASE - _TOP) * value / axis[-1]:.1f}"

    grid = [tag("line", x1="0", x2="100%", y1=y(value), y2=y(value)) for value in axis]
    marked = range(first, last + 1, max(1, -(-(last - first) // 8)))
    labels = [tag("text", str(block), x=x(block), y=_BELOW, text_anchor="middle") for block in marked]
    ranges = [line for line in series if line.experts]
    name = f"{title} of {sum(point.count for line in series for point in line.points)} linears over the blocks"
    svg = tag(
        "svg",
        tag("title", name),
        tag("g", *grid, class_="grid"),
        *labels,
        tag("text", "block", x="50%", y=_BELOW + 20, text_anchor="middle"),
        *(
            _line(i, line, x, y, 5.0 * (ranges.index(line) - (len(ranges) - 1) / 2) if line in ranges else 0.0)
            for i, line in enumerate(series)
        ),
        role="img",
        class_="many" if last - first > MANY else None,
        tabindex="0",
        aria_label=f"{name}. Arrow keys read the values; a table follows.",
    )
    marks = (tag("span", f"{100 * value:.3g} %", style=f"top:{y(value)}px") for value in axis)
    scale = tag("div", *marks, class_="y", aria_hidden="true")
    tip = tag("div", class_="tip", role="status", hidden="hidden")
    return [
        tag("h3", title),
        tag(
            "div",
            tag("p", about, class_="soft"),
            tag("ul", *(_key(i, line.kind) for i, line in enumerate(series)), class_="legend"),
            tag("div", scale, svg, tip, class_="chart"),
            tag("details", tag("summary", f"{title} as a table"), _scroll(_depth_table(series), f"{title} by block")),
        ),
    ]


def _line(i: int, line: Series, x: Callable[[int], str], y: Callable[[float], str], shift: float) -> Element:
    """Draw one kind: lines between its blocks, or for experts the range in each, and a mark for each block."""
    drawn = []
    if line.experts:
        for p in line.points:
            drawn.append(tag("line", x1=x(p.block), x2=x(p.block), y1=y(p.low), y2=y(p.high), class_="span"))
    else:
        for a, b in zip(line.points, line.points[1:], strict=False):
            drawn.append(tag("line", x1=x(a.block), x2=x(b.block), y1=y(a.mid), y2=y(b.mid)))
    for p in line.points:
        title = tag("title", f"Block {p.block}, {line.kind}: {_errors(p)}")
        mark = tag("svg", title, tag("path", d=_mark(i)), x=x(p.block), y=y(p.mid), overflow="visible")
        mark.set("class", "point")
        mark.set("data-block", str(p.block))
        drawn.append(mark)
    return tag(
        "g",
        *drawn,
        class_=f"series {_colour(i)}",
        data_series=i,
        transform=f"translate({shift:.1f} 0)" if shift else None,
    )


def _errors(point: errors.Point) -> str:
    if point.count == 1:
        return format_percent(point.mid)
    low, mid, high = (format_percent(value) for value in (point.low, point.mid, point.high))
    return f"median {mid}, {low} to {high} ({point.count} linears)"


def _key(i: int, kind: str) -> Element:
    sign = tag(
        "svg", tag("title", f"mark of {kind}"), tag("path", d=_mark(i)), viewBox="-6 -6 12 12", class_=_colour(i)
    )
    return tag("li", tag("button", sign, kind, type="button", aria_pressed="false", data_series=i))


def _mark(i: int) -> str:
    return charts.MARKS[i % len(charts.MARKS)][0]


def _colour(i: int) -> str:
    return f"s{i % len(charts.LIGHT)}"


def _depth_table(series: Sequence[Series]) -> Element:
    blocks = sorted({point.block for line in series for point in line.points})
    found = [{point.block: _errors(point) for point in line.points} for line in series]
    rows = [(str(block), *(line.get(block, "–") for line in found)) for block in blocks]
    return _table(("block", *(line.kind for line in series)), rows, "dense", range(1, len(series) + 1))


def _worst(layers: Sequence[errors.Layer]) -> Element | None:
    """List the worst linears with the recorded reasons."""
    error = errors.leading_error(layers)
    found = errors.worst(layers, error, WORST)
    if not found:
        return None
    outputs = error is errors.output_error
    most_bits = max((bits for layer in layers if (bits := errors.bits(layer)) is not None), default=None)
    over_rounding = {name: ratio for ratio, name in facts.ratios(layers)}
    rows: list[Sequence[str | Element]] = []
    for value, layer in found:
        name = str(layer.get("name"))
        bar = tag("span", _bar(value / (found[0][0] or 1.0)), class_="track")
        weight, ratio = errors.weight_error(layer), over_rounding.get(name)
        rows.append(
            (
                tag("span", name, class_="mono"),
                tag("span", format_percent(value), bar),
                *([format_percent(weight) if weight is not None else "–"] if outputs else []),
                *([f"{ratio:.3f}" if ratio is not None else "–"] if over_rounding else []),
                "; ".join(errors.causes(layer, most_bits)),
            )
        )
    head = ("linear", "output error" if outputs else "weight error", *(["weight error"] if outputs else []))
    head += ("loss vs rounding",) if over_rounding else ()
    count = min(WORST, len(found))
    about = f"The {count} largest of {len(layers)}, ranked by the error of their {'outputs' if outputs else 'weights'}."
    return _section("Worst linears", about, _table((*head, "why"), rows, "cards worst", range(1, len(head))))


def _costs(report: Mapping[str, Any]) -> Element | None:
    """Draw sizes, widths, time and memory as bars."""
    found = [
        (title, about, bars)
        for title, about, bars in (
            ("Size of the weights", "", charts.sizes(report)),
            ("Bits per weight", "Codes, scales, zero points and 2:4 indices.", charts.widths(report)),
            ("Time", "", charts.times(report)),
            ("Peak memory", "", charts.memory(report)),
        )
        if bars
    ]
    if not found:
        return None
    parts = [
        tag("div", tag("h3", title), tag("p", about, class_="soft") if about else None, _bars(bars))
        for title, about, bars in found
    ]
    return _section("Size, time and memory", None, tag("div", *parts, class_="pair"))


def _bars(bars: Sequence[Bar]) -> Element:
    top = max(bar.value for bar in bars) or 1.0
    return tag(
        "dl",
        *(
            tag("div", tag("dt", bar.name), tag("dd", bar.label), tag("dd", _bar(bar.value / top), class_="track"))
            for bar in bars
        ),
        class_="bars",
    )


def _bar(share: float) -> Element:
    return tag("span", class_="bar", style=f"width:{100 * max(0.0, share):.1f}%")


def _notices(report: Mapping[str, Any]) -> Element:
    lines = facts.events(report)
    for key, what in (("not_opened_by", "did not open the folder"), ("not_tried", "was not tried on the folder")):
        lines += [f"{reader} {what}: {why}" for reader, why in report.get(key, {}).items()]
    shown = tag("ul", *(tag("li", line) for line in lines), class_="plain") if lines else tag("p", "Nothing was noted.")
    return _section("Notices", "Everything that was done otherwise than plainly asked, or left undone.", shown)


def _details(report: Mapping[str, Any], layers: Sequence[errors.Layer]) -> Element:
    environment = report.get("environment")
    versions = [("quantkit", report.get("quantkit")), ("compute type", report.get("compute_dtype"))]
    versions += list(environment.items()) if isinstance(environment, dict) else []
    recipe = report.get("recipe")
    parts = [("Calibration", _definitions(list(_calibration(report))))]
    parts.append(("Versions and machine", _definitions(versions)))
    if isinstance(recipe, dict) and recipe:
        written = raw("pre", json.dumps(recipe, indent=1))
        parts.append(("Recipe", tag("div", tag("p", f"SHA-256 {report.get('recipe_sha256')}", class_="mono"), written)))
    for title, files in (("Files", report.get("files", {})), ("Source files", report.get("source", {}).get("files"))):
        if isinstance(files, dict) and files:
            rows = [(str(name), tag("span", str(digest), class_="mono")) for name, digest in sorted(files.items())]
            parts.append((f"{title}: {len(files)} digests", _scroll(_table(("file", "digest"), rows, "dense"), title)))
    if layers:
        parts.append((f"Linears: all {len(layers)}" if len(layers) <= LISTED else "Linears", _linears(layers)))
    blocks = (tag("details", tag("summary", title), content) for title, content in parts)
    return _section("Details", None, *blocks)


def _calibration(report: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    found = report.get("calibration", {})
    if not found:
        yield "text", facts.protocol(report)
    for key, value in found.items():
        yield str(key).replace("_", " "), value if isinstance(value, (str, int, float)) else json.dumps(value)


def _linears(layers: Sequence[errors.Layer]) -> Element:
    if len(layers) > LISTED:
        return tag("p", f"The {len(layers)} linears are in quantkit_report.json, with the digest of each.")
    rows: list[Sequence[str | Element]] = []
    for layer in layers:
        error, shape = errors.weight_error(layer), layer.get("shape")
        size = " × ".join(map(str, shape)) if isinstance(shape, list) else "–"
        shown = (layer.get("name"), size, layer.get("scheme"), layer.get("method"))
        digest = tag("span", str(layer.get("digest") or "–"), class_="mono")
        rows.append((*(str(x or "–") for x in shown), "–" if error is None else format_percent(error), digest))
    head = ("linear", "shape", "scheme", "method", "weight error", "digest")
    return _scroll(_table(head, rows, "dense", (4,)), "All linears")


def _section(title: str, about: str | None, *content: Element) -> Element:
    return tag("section", tag("h2", title), tag("p", about, class_="soft") if about else None, *content)


def _definitions(rows: Iterable[tuple[str, Any]]) -> Element:
    shown = [(key, str(value)) for key, value in rows if value not in (None, "")]
    return tag("dl", *(item for key, value in shown for item in (tag("dt", key), tag("dd", value))), class_="facts")


def _scroll(table: Element, label: str) -> Element:
    """Let a wide table scroll inside its own box, by keyboard too."""
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=label)


def _table(
    head: Sequence[str], rows: Iterable[Sequence[str | Element]], kind: str, numeric: Iterable[int] = ()
) -> Element:
    """Make a table whose rows begin with a heading; `numeric` columns align right, and the label is kept for cards."""
    right = set(numeric)
    body = []
    for row in rows:
        cells = [tag("th", row[0], scope="row")]
        for i, cell in enumerate(row[1:], 1):
            kept = head[i] if head and i in right else None
            cells.append(tag("td", cell, class_="num" if i in right else "text", data_label=kept))
        body.append(tag("tr", *cells))
    titles = (
        tag("th", title, scope="col", class_="num" if i in right else "text" if i else None)
        for i, title in enumerate(head)
    )
    return tag("table", tag("thead", tag("tr", *titles)) if head else None, tag("tbody", *body), class_=kind)
