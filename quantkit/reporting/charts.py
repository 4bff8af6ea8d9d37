"""Colours, marks, ticks and bars that the page and the PNG share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from quantkit.core.units import format_bytes, format_seconds
from quantkit.reporting.layer_errors import bits, number, weights

#: Colours of series on a light and on a dark page, after Okabe and Ito, who chose them for colour-blind readers. They
#: are darkened or lightened to a contrast of 3 to 1; marks differ too, so that no reader needs the colours.
LIGHT = ("#0072b2", "#d55e00", "#008766", "#b0578b", "#a06e00", "#3d8fc4", "#5b4b9e", "#6b7480")
DARK = ("#4fa8e0", "#ff8a4c", "#2fc49a", "#e39ac3", "#f0b429", "#8fd0ff", "#a99bea", "#a9b4bf")
#: Marks of series as SVG paths around the origin, and as matplotlib names them.
MARKS = (
    ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "o"),
    ("M-3.6-3.6h7.2v7.2h-7.2z", "s"),
    ("M0-4.8 4.6 3.6H-4.6z", "^"),
    ("M0-5 5 0 0 5-5 0z", "D"),
    ("M0 4.8 4.6-3.6H-4.6z", "v"),
    ("M-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z", "P"),
    ("M-4.6-1 0-5 4.6-1 2.9 4.4H-2.9z", "p"),
    ("M-4.5-2.6 0-5.2 4.5-2.6V2.6L0 5.2-4.5 2.6z", "h"),
)


class Bar(NamedTuple):
    """One bar of a chart: its name, its length, and the length in words."""

    name: str
    value: float
    label: str


def ticks(top: float) -> list[float]:
    """Choose three to six round values from 0 to at least `top`, for an axis; `[0, 1]` if all is about 0."""
    if top < 1e-12:
        return [0.0, 1.0]
    unit = 10.0 ** math.floor(math.log10(top / 4))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if 5 * unit * factor >= top)
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]


def times(report: Mapping[str, Any]) -> list[Bar]:
    """List the time of each phase, and the rest of the run."""
    phases = [(str(name), number(value) or 0.0) for name, value in report.get("phases", {}).items()]
    total = number(report.get("totals", {}).get("seconds"))
    rest = 0.0 if total is None else total - sum(seconds for _, seconds in phases)
    phases += [("everything else", rest)] if phases and rest > 0 else []
    return [Bar(name, seconds, format_seconds(seconds)) for name, seconds in phases]


def sizes(report: Mapping[str, Any]) -> list[Bar]:
    """List the bytes of the weights before and after."""
    found = [
        (name, report.get("totals", {}).get(key)) for name, key in (("before", "source_bytes"), ("after", "bytes"))
    ]
    return [Bar(name, float(count), format_bytes(count)) for name, count in found if number(count)]


def memory(report: Mapping[str, Any]) -> list[Bar]:
    """List the peak of each kind of memory."""
    peak = report.get("totals", {}).get("peak_memory", {})
    return [Bar(str(kind).upper(), float(count), format_bytes(count)) for kind, count in peak.items() if number(count)]


def widths(report: Mapping[str, Any]) -> list[Bar]:
    """List the weights of each scheme, fewest bits first."""
    found: dict[tuple[float, str], tuple[int, int]] = {}
    for layer in report.get("layers", []):
        width = bits(layer)
        if width is not None:
            key = (round(width, 3), str(layer.get("scheme")))
            linears, count = found.get(key, (0, 0))
            found[key] = (linears + 1, count + weights(layer))
    return [
        Bar(f"{scheme}, {width:.3f} bits", float(count), f"{count / 1e6:,.1f} M weights, {linears} linears")
        for (width, scheme), (linears, count) in sorted(found.items())
    ]
