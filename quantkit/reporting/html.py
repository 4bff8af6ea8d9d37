"""A report as one self-contained HTML page: no other file, no network, and nothing in it that a
report could run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from quantkit.core.units import format_bytes, format_percent, format_seconds
from quantkit.names import JsonView
from quantkit.reporting import charts, facts, layer_errors as errors
from quantkit.reporting.charts import Bar, Cell, Chart, Table, raw, render
from quantkit.reporting.layer_errors import Layer, number

#: Linears in the table of the worst, and the most in the table of all: each takes some 300 bytes of
#: the page.
WORST = 20
LISTED = 1000


def page(report: JsonView, verification: JsonView | None = None) -> str:
    """Write the page of a report; `verification` is the content of verify.json, if it is there."""
    from markupsafe import escape

    source = report.get("base") or report.get("source", {})
    layers, recipe = report.get("layers", []), report.get("recipe")
    (*chip, verified), (quality, measured_on) = _proof(report, verification), _quality(report)
    script = raw("page.js")
    return render(
        "page.html.jinja",
        report=report,
        name=source.get("name") or "unknown model",
        css=raw("page.css"),
        script=script,
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        light=charts.LIGHT,
        dark=charts.DARK,
        proof=chip,
        chips=dict.fromkeys(
            [
                *(str(report[key]) for key in ("scheme", "layout") if report.get(key)),
                facts.methods(layers),
            ]
        ),
        tiles=list(_tiles(report, layers)),
        facts=_facts(report, source, layers, verified),
        quality=quality,
        measured_on=measured_on,
        fitted=(facts.fit(report), _sizes(report)),
        charts=_charts(layers),
        layers=len(layers),
        worst=_worst(layers),
        ranked_by="outputs" if errors.leading_error(layers) is errors.output_error else "weights",
        costs=_costs(report),
        notices=[*facts.explained_size(report), *facts.events(report), *_unopened(report)],
        calibration=list(_calibration(report)),
        versions=_versions(report),
        recipe=escape(json.dumps(recipe, indent=1))
        if isinstance(recipe, dict) and recipe
        else None,
        digests=list(_digests(report)),
        linears=_linears(layers) if len(layers) <= LISTED else None,
    )


def _proof(report: JsonView, verification: JsonView | None) -> tuple[str, str, str]:
    """Say how the verification stands: the class of its chip, the chip, and a sentence."""
    if report.get("command") == "prune":
        return (
            "",
            "dense output",
            "nothing is packed: compare its perplexity with quantkit eval ppl FOLDER",
        )
    if verification is None:
        return (
            "warn",
            "not verified",
            "no: run quantkit verify FOLDER, which writes verify.json, and draw this again",
        )
    failures = verification.get("failures")
    if verification.get("ok") is not True:
        first = f", the first: {failures[0]}" if isinstance(failures, list) and failures else ""
        return "bad", "✗ verification failed", f"failed{first}"
    hashes, files = verification.get("hashes"), report.get("files", {})
    if isinstance(hashes, dict) and any(files.get(name) != value for name, value in hashes.items()):
        return (
            "warn",
            "not verified",
            "verify.json is about other files: run quantkit verify FOLDER again",
        )
    linears, weights = (number(verification.get(key)) or 0 for key in ("linears", "weights"))
    return (
        "good",
        "✓ verified",
        f"yes, {linears:.0f} linears and {weights:,.0f} weights bit by bit; "
        f"{verification.get('note', '')}",
    )


def _tiles(report: JsonView, layers: Sequence[Layer]) -> Iterator[tuple[str, str, str]]:
    """Yield the headline figures that the report has, each with a label and a note."""
    totals = report.get("totals", {})
    before, after = number(totals.get("source_bytes")), number(totals.get("bytes"))
    if (width := number(totals.get("bits_per_weight"))) is not None:
        yield "Bits per weight", f"{width:.3f}", "of quantized weights, with scales"
    if before and after:
        ratio = f"{before / after:.2f} times smaller than"
        if after >= before:
            ratio = f"{after / before:.2f} times as large as"
        yield "Size", format_bytes(after), f"{ratio} {format_bytes(before)}"
    if (share := number(totals.get("share"))) is not None:
        done = "pruned" if report.get("command") == "prune" else "quantized"
        yield f"Decoder {done}", f"{100 * share:.2f} %", f"of its weights, in {len(layers)} linears"
    error = errors.leading_error(layers)
    if worst := errors.worst(layers, error, len(layers)):
        label = "Output error" if error is errors.output_error else "Weight error"
        middle = format_percent(worst[len(worst) // 2][0])
        yield label, middle, f"median of linears, worst {format_percent(worst[0][0])}"
    if (seconds := number(totals.get("seconds"))) is not None:
        device = report.get("device")
        yield "Time", format_seconds(seconds), f"on {device}" if device else "in all"
    if peak := charts.memory(report):
        others = ", ".join([peak[0].name, *(f"{bar.label} {bar.name}" for bar in peak[1:])])
        yield "Peak memory", peak[0].label, others


def _facts(
    report: JsonView, source: JsonView, layers: Sequence[Layer], verified: str
) -> list[tuple[str, Any]]:
    return [
        ("Model", " ".join(str(source[key]) for key in ("name", "revision") if source.get(key))),
        ("Scheme", report.get("scheme") and facts.schemes(report)),
        ("Layout", report.get("layout")),
        ("Method", facts.methods(layers)),
        ("2:4 sparsity", facts.sparsity(layers)),
        ("Output loss", facts.losses(layers)),
        ("Held out", facts.held_out(layers)),
        *((label.capitalize(), text) for label, text in facts.readers(report)),
        ("Verified", verified),
    ]


def _quality(report: JsonView) -> tuple[Table | None, str]:
    """Compare quality before and after, if the run measured it, and name the text."""
    found = report.get("evaluation", {})
    before, after, kld, top1 = (
        number(found.get(key)) for key in ("before", "after", "kld", "top1")
    )
    rows = []
    if before and after is not None:
        rows.append(
            ("Perplexity", f"{before:.4f}", f"{after:.4f}", f"{100 * (after / before - 1):+.2f} %")
        )
    if kld is not None:
        rows.append(("KL divergence, nats", "0", f"{kld:.6f}", "–"))
        rows += [
            (f"KL divergence, {label}", "–", value, "–") for label, value in facts.tails(found)
        ]
    if top1 is not None:
        rows.append(("Same first choice", "100 %", f"{100 * top1:.2f} %", "–"))
    shown = (
        ("data", "{}"),
        ("windows", "{} windows"),
        ("window", "of {} tokens"),
        ("tokens", "{} predictions"),
    )
    about = ", ".join(
        words.format(found[key]) for key, words in (*shown, ("weights", "{}")) if found.get(key)
    )
    return Table(
        ("", "before", "after", "change"), rows, "cards", (1, 2, 3)
    ) if rows else None, about


def _sizes(report: JsonView) -> Table:
    """Tabulate the schemes for a target size in the layout of the output, by predicted loss and, of
    some, measured.
    """
    fit, totals = report.get("fit", {}), report.get("totals", {})
    increases, kld = fit.get("predicted", {}), fit.get("kld", {})
    made = {
        "scheme": "chosen",
        **totals,
        "bits": totals.get("bits_per_weight"),
        "harm": increases.get("mixed"),
        "fits": True,
    }
    rows = []
    for row in [*([made] if fit.get("chosen") == "mixed" else []), *fit.get("curve", [])]:
        size, bits, increase = (number(row.get(key)) for key in ("bytes", "bits", "harm"))
        judged = number(
            kld.get("mixed" if row is made else row["scheme"] if row["scheme"] != "mixed" else None)
        )
        if row is made or row["layout"] == report.get("layout"):
            figures = [
                (size, format_bytes),
                (bits, "{:.3f}".format),
                (increase, "{:.6f}".format),
                (judged, "{:.6f}".format),
            ]
            shown = ("–" if value is None else form(value) for value, form in figures)
            rows.append((row["scheme"], *shown, "yes" if row.get("fits") else "no"))
    head = ("scheme", "size", "bits/weight", "predicted loss increase", "KL divergence", "fits")
    return Table(head, rows, "dense", range(1, 5))


def _charts(layers: Sequence[Layer]) -> list[Chart]:
    """Chart the errors over the blocks, output errors first."""
    kinds = (
        (
            "Output error",
            "How far the outputs on the calibration text moved: relative, RMS.",
            errors.output_error,
        ),
        (
            "Weight error",
            "How far the stored weights are from the original: relative, RMS.",
            errors.weight_error,
        ),
    )
    return [
        Chart(title, about, series)
        for title, about, error in kinds
        if (series := errors.by_depth(layers, error))
    ]


def _worst(layers: Sequence[Layer]) -> Table | None:
    """List the worst linears with the recorded reasons."""
    error = errors.leading_error(layers)
    found = errors.worst(layers, error, WORST)
    if not found:
        return None
    shows_both = error is errors.output_error
    widths = [width for layer in layers if (width := errors.bits(layer)) is not None]
    over_rounding = {name: f"{ratio:.3f}" for ratio, name in facts.ratios(layers)}
    rows: list[list[str | Cell]] = []
    more: dict[str, str] = {}
    for value, layer in found:
        name = str(layer.get("name"))
        if shows_both:
            more["weight error"] = _percent(errors.weight_error(layer))
        if over_rounding:
            more["loss vs rounding"] = over_rounding.get(name, "–")
        why = "; ".join(errors.causes(layer, max(widths, default=None)))
        share = Cell(format_percent(value), value / (found[0][0] or 1.0))
        rows.append([Cell(name), share, *more.values(), why])
    head = ("linear", "output error" if shows_both else "weight error", *more, "why")
    return Table(head, rows, "cards worst", range(1, len(head) - 1))


def _costs(report: JsonView) -> list[tuple[str, str, list[Bar]]]:
    """List the charts of sizes, widths, time and memory."""
    found = (
        ("Size of the weights", "", charts.sizes(report)),
        ("Bits per weight", "Codes, scales, zero points and 2:4 indices.", charts.widths(report)),
        ("Time", "", charts.times(report)),
        ("Peak memory", "", charts.memory(report)),
    )
    return [(title, about, bars) for title, about, bars in found if bars]


def _unopened(report: JsonView) -> Iterator[str]:
    for key, what in (
        ("not_opened_by", "did not load the folder"),
        ("not_tried", "was not tried on the folder"),
    ):
        yield from (f"{reader} {what}: {why}" for reader, why in report.get(key, {}).items())


def _versions(report: JsonView) -> list[tuple[str, Any]]:
    environment = report.get("environment")
    known = [("quantkit", report.get("quantkit")), ("compute type", report.get("compute_dtype"))]
    return known + (list(environment.items()) if isinstance(environment, dict) else [])


def _calibration(report: JsonView) -> Iterator[tuple[str, Any]]:
    found = report.get("calibration", {})
    if not found:
        yield "text", facts.protocol(report)
    for key, value in found.items():
        yield (
            str(key).replace("_", " "),
            value if isinstance(value, (str, int, float)) else json.dumps(value),
        )


def _digests(report: JsonView) -> Iterator[tuple[str, Table]]:
    for title, files in (
        ("Files", report.get("files", {})),
        ("Source files", report.get("source", {}).get("files")),
    ):
        if isinstance(files, dict) and files:
            rows = [(str(name), Cell(str(digest))) for name, digest in sorted(files.items())]
            yield title, Table(("file", "digest"), rows, "dense")


def _linears(layers: Sequence[Layer]) -> Table | None:
    rows: list[list[str | Cell]] = []
    for layer in layers:
        shape = layer.get("shape")
        size = " × ".join(map(str, shape)) if isinstance(shape, list) else "–"
        shown = (layer.get("name"), size, layer.get("scheme"), layer.get("method"))
        error, digest = _percent(errors.weight_error(layer)), Cell(str(layer.get("digest") or "–"))
        rows.append([*(str(x or "–") for x in shown), error, digest])
    head = ("linear", "shape", "scheme", "method", "weight error", "digest")
    return Table(head, rows, "dense", (4,)) if rows else None


def _percent(value: float | None) -> str:
    return "–" if value is None else format_percent(value)
