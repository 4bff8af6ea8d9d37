"""Results in a terminal: the closing table of a run, and a one-line repr."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from quantkit.core.units import counted, format_bytes
from quantkit.names import JsonView
from quantkit.reporting import facts, tables
from quantkit.reporting.charts import printable


def summary(report: JsonView, above: Collection[str] = ()) -> str:
    """Format the closing table for a terminal: figures, then one line for each event that must not
    be silent. Notes that stand `above` in the same output are only counted.
    """
    notes = [*facts.explained_size(report), *facts.events(report)]
    new = [note for note in notes if note not in above]
    layers, totals = report.get("layers", []), report.get("totals", {})
    peak, ranks = totals.get("peak_memory", {}), report.get("ranks", [])
    rows = [
        ("failed", report.get("failed", "")),
        (
            "so far" if "failed" in report else "done",
            f"{report.get('command')}: {len(layers)} linears, {facts.schemes(report)}, "
            f"{report.get('layout')}",
        ),
        facts.same_values(report),
        ("size", facts.sizes(totals)),
        ("dense", facts.dense(totals)),
        ("share", facts.share(report)),
        *facts.readers(report),
        ("2:4", facts.sparsity(layers)),
        ("weight error", facts.weight_error(layers)),
        ("output loss", facts.losses(layers)),
        ("held out", facts.held_out(layers)),
        ("scales", facts.tuned_scales(report)),
        ("calibration", facts.protocol(report) if report.get("calibration") else ""),
        ("target", facts.fit(report)),
        ("evaluation", facts.evaluation(report)),
        ("left out", facts.left_out(report)),
        ("processes", ", then ".join(map(str, ranks if isinstance(ranks, list) else [ranks]))),
        ("time", _times(report, totals)),
        (
            "memory",
            ", ".join(f"{format_bytes(value)} {kind.upper()}" for kind, value in peak.items()),
        ),
        *(("note", note) for note in new),
        ("note", f"{len(notes) - len(new)} more, above" if len(notes) > len(new) else ""),
    ]
    return tables.facts([(label, printable(text)) for label, text in rows], 13)


def line(report: JsonView) -> str:
    """Format a report as one line: action, size, mean error, and the number of notes."""
    layers, notes = report.get("layers", []), [*facts.explained_size(report), *facts.events(report)]
    head = (
        f"{report.get('command')}: {len(layers)} linears, {facts.schemes(report)}, "
        f"{report.get('layout')}"
    )
    error = facts.weight_error(layers).partition(", worst")[0]
    parts = [
        head,
        facts.sizes(report.get("totals", {})),
        f"weight error {error}" if error else "",
        f"{counted(len(notes), 'note')}, which quantkit report prints" if notes else "",
    ]
    return printable("; ".join(filter(None, parts)))


def rows(report: JsonView) -> Iterator[tuple[str, ...]]:
    """List each layer: name, shape, scheme, relative error, loss relative to rounding, seconds."""
    for layer in report.get("layers", []):
        loss, rounded = layer.get("loss"), layer.get("rtn_loss")
        ratio = loss / rounded if loss is not None and rounded else None
        numbers = [layer.get("relative_error"), ratio, layer.get("seconds")]
        cells = [layer.get("name"), layer.get("shape"), layer.get("scheme")]
        yield (
            *(printable(str(cell)) for cell in cells),
            *("-" if x is None else f"{x:.4g}" for x in numbers),
        )


def _times(report: JsonView, totals: JsonView) -> str:
    found = report.get("phases", {}).items()
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found if seconds >= 0.05)
    total = totals.get("seconds")
    return "" if total is None else f"{total:.1f} s" + (f" ({phases})" if phases else "")


def short_repr(value: object, /, **shown: Any) -> str:
    """Format the repr of a dataclass with only the facts that are `shown`."""
    facts = ", ".join(f"{name}={each!r}" for name, each in shown.items())
    return f"{type(value).__name__}({facts})"
