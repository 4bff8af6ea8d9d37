"""Pages of Jinja2 templates, and the parts that they draw: tables, bars, charts over the blocks.

Values are data: none is taken for markup.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quantkit.core.threads import grouped
from quantkit.core.units import format_bytes, format_seconds
from quantkit.names import JsonView
from quantkit.reporting.layer_errors import Point, Series, bits, weights

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).parent

#: Colours of series on a light and on a dark page, after Okabe and Ito, who chose them for
#: colour-blind readers. They are darkened or lightened to a contrast of 3 to 1; marks differ too,
#: so that no reader needs the colours.
LIGHT = ("#0072b2", "#d55e00", "#008766", "#b0578b", "#a06e00", "#3d8fc4", "#5b4b9e", "#6b7480")
DARK = ("#4fa8e0", "#ff8a4c", "#2fc49a", "#e39ac3", "#f0b429", "#8fd0ff", "#a99bea", "#a9b4bf")
#: Marks of series as SVG paths around the origin: circle, square, triangles, diamond, cross,
#: pentagon, hexagon.
MARKS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
    "M-3.6-3.6h7.2v7.2h-7.2z",
    "M0-4.8 4.6 3.6H-4.6z",
    "M0-5 5 0 0 5-5 0z",
    "M0 4.8 4.6-3.6H-4.6z",
    "M-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
    "M-4.6-1 0-5 4.6-1 2.9 4.4H-2.9z",
    "M-4.5-2.6 0-5.2 4.5-2.6V2.6L0 5.2-4.5 2.6z",
)
#: Charts of more blocks have smaller marks.
MANY = 24
#: Pixels of a chart: where the values begin and end, and the line below.
TOP, BASE, BELOW = 12.0, 250.0, 272.0
#: Percent of a chart's width between its sides and its first and last block.
INSET = 3.0


def style(i: int) -> tuple[str, str]:
    """Choose the class of a series' colour, and its mark."""
    return f"s{i % len(LIGHT)}", MARKS[i % len(MARKS)]


class Cell(NamedTuple):
    """A table cell in the font of code, or with a bar of length `share`."""

    text: str
    share: float | None = None


class Table(NamedTuple):
    """A table: its rows, of a class `kind`, and the columns that hold numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    kind: str
    numeric: Collection[int] = ()


class Bar(NamedTuple):
    """One bar of a chart: its name, its length, and the length in words."""

    name: str
    value: float
    label: str


@dataclass(frozen=True)
class Chart:
    """A chart of errors over the blocks: where its marks lie, and how they look."""

    title: str
    about: str
    series: Sequence[Series]
    below: float = BELOW
    style = staticmethod(style)

    @property
    def name(self) -> str:
        """The chart in words."""
        return (
            f"{self.title} of {sum(point.count for point in self._points)} linears over the blocks"
        )

    @cached_property
    def axis(self) -> list[float]:
        """The values of the lines across the chart."""
        return ticks(max(point.high for point in self._points))

    @property
    def marked(self) -> range:
        """The blocks that get a number below the chart."""
        first, last = self._ends
        return range(first, last + 1, max(1, -(-(last - first) // 8)))

    @property
    def many(self) -> bool:
        """Whether the marks are small."""
        first, last = self._ends
        return last - first > MANY

    @cached_property
    def ranges(self) -> list[Series]:
        """The kinds of experts; each has a range for each block."""
        return [line for line in self.series if line.experts]

    @property
    def table(self) -> Table:
        """The values in words, a row for each block."""
        found = [{point.block: point.text for point in line.points} for line in self.series]
        blocks = sorted({point.block for point in self._points})
        rows = [(str(block), *(line.get(block, "–") for line in found)) for block in blocks]
        return Table(
            ("block", *(line.kind for line in self.series)), rows, "dense", range(1, len(found) + 1)
        )

    def x(self, block: int) -> str:
        """Place a block, in percent of the width."""
        first, last = self._ends
        place = (block - first) / (last - first) if last > first else 0.5
        return f"{INSET + (100 - 2 * INSET) * place:.2f}%"

    def y(self, value: float) -> str:
        """Place a value, in pixels."""
        return f"{BASE - (BASE - TOP) * value / self.axis[-1]:.1f}"

    def shift(self, line: Series) -> float:
        """Place the ranges of several kinds of experts side by side, in pixels."""
        return 5.0 * (self.ranges.index(line) - (len(self.ranges) - 1) / 2) if line.experts else 0.0

    @cached_property
    def _points(self) -> list[Point]:
        return [point for line in self.series for point in line.points]

    @cached_property
    def _ends(self) -> tuple[int, int]:
        blocks = [point.block for point in self._points]
        return min(blocks), max(blocks)


def ticks(top: float) -> list[float]:
    """Choose three to six round values from 0 to at least `top`, for an axis; `[0, 1]` if all is
    about 0.
    """
    if top < 1e-12:
        return [0.0, 1.0]
    unit = 10.0 ** math.floor(math.log10(top / 4))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if 5 * unit * factor >= top)
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]


def times(report: JsonView) -> list[Bar]:
    """List the time of each phase, and the rest of the run."""
    phases = list(report.get("phases", {}).items())
    total = report.get("totals", {}).get("seconds")
    rest = 0.0 if total is None else total - sum(seconds for _, seconds in phases)
    phases += [("everything else", rest)] if phases and rest > 0 else []
    return [Bar(name, seconds, format_seconds(seconds)) for name, seconds in phases]


def sizes(report: JsonView) -> list[Bar]:
    """List the bytes of the weights before and after."""
    totals = report.get("totals", {})
    found = {"before": totals.get("source_bytes"), "after": totals.get("bytes")}
    return [Bar(name, float(count), format_bytes(count)) for name, count in found.items() if count]


def memory(report: JsonView) -> list[Bar]:
    """List the peak of each kind of memory."""
    return [
        Bar(str(kind).upper(), float(count), format_bytes(count))
        for kind, count in report.get("totals", {}).get("peak_memory", {}).items()
        if count
    ]


def widths(report: JsonView) -> list[Bar]:
    """List the weights of each scheme, fewest bits first."""
    counts = grouped(
        ((round(width, 3), str(layer.get("scheme"))), weights(layer))
        for layer in report.get("layers", [])
        if (width := bits(layer)) is not None
    )
    return [
        Bar(
            f"{scheme}, {width:.3f} bits",
            float(sum(linears)),
            f"{sum(linears) / 1e6:,.1f} M weights, {len(linears)} linears",
        )
        for (width, scheme), linears in sorted(counts.items())
    ]


def render(name: str, /, **values: Any) -> str:
    """Fill a template."""
    return _environment().get_template(name).render(values)


def raw(file: str) -> str:
    """Read a file of this package that a page includes verbatim."""
    return verbatim((HERE / file).read_text(encoding="utf-8"))


def verbatim(text: str) -> str:
    """Mark a text that a template writes as it is, with its line ends."""
    from markupsafe import Markup

    return Markup(text)


def printable(text: str) -> str:
    """Join untrusted text into one line without control characters, which could hide or reorder
    text.
    """
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    return Environment(
        loader=FileSystemLoader(HERE),
        autoescape=lambda name: name != "card.md.jinja",  # Markdown
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
