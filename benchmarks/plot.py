"""Draw CSVs of `quantkit bench kernels`: speedup over cuBLAS against tokens, a panel for each scheme, floors dashed."""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment

from quantkit.reporting.charts import LIGHT, ticks

COLOURS = (*LIGHT, "#17202a")
#: Pixels of a panel, of its plot, and of a line of the legend.
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM, LINE = 700, 400, 50, 36, 470, 350, 16
PAGE = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{{ width }}" height="{{ height }}"\
 viewBox="0 0 {{ width }} {{ height }}" font-family="sans-serif" font-size="11" fill="#17202a">
<rect width="100%" height="100%" fill="#fff"/>
{% for panel in panels %}
<g transform="translate({{ panel.left }} {{ panel.top }})">
<text x="{{ left }}" y="20" font-size="14">{{ panel.title }}; dashed: its floor</text>
{% for at, label in panel.across %}
<path d="M{{ left }} {{ at }}H{{ right }}" stroke="{{ '#888' if label == '1' else '#dfe4e8' }}"/>
<text x="{{ left - 6 }}" y="{{ at }}" dy="4" text-anchor="end">{{ label }}</text>
{% endfor %}
{% for at, label in panel.below %}
<text x="{{ at }}" y="{{ bottom + 18 }}" text-anchor="middle">{{ label }}</text>
{% endfor %}
<text x="{{ (left + right) / 2 }}" y="{{ bottom + 38 }}" text-anchor="middle">tokens</text>
<text transform="translate(14 {{ (top + bottom) / 2 }}) rotate(-90)" text-anchor="middle">speedup over cuBLAS</text>
{% for line in panel.lines %}
<g stroke="{{ line.colour }}" fill="none">
<polyline points="{{ line.floor }}" stroke-dasharray="5 4"/>
<polyline points="{{ line.reached }}" stroke-width="1.8"/>
</g>
<path d="M{{ right + 12 }} {{ line.at }}h18" stroke="{{ line.colour }}" stroke-width="3"/>
<text x="{{ right + 36 }}" y="{{ line.at + 4 }}">{{ line.label }}</text>
{% endfor %}
</g>
{% endfor %}
</svg>
"""


class Point(NamedTuple):
    """Tokens, the speedup, and that of the floor."""

    m: int
    reached: float
    floor: float


def panels(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, list[Point]]]:
    """Arrange rows of a CSV: layout and scheme -> shape -> points, sorted by tokens."""
    found: dict[str, dict[str, list[Point]]] = {}
    for row in rows:
        lines = found.setdefault(f"{row['layout']} {row['scheme']} ({row['kernel']})", {})
        point = Point(int(row["M"]), float(row["speedup_vs_cublas"]), float(row["floor_speedup"]))
        shape = f"{row['N']}x{row['K']}"
        lines.setdefault(shape if row["layer"] == shape else f"{row['layer']} {shape}", []).append(point)
    return {title: {shape: sorted(line) for shape, line in lines.items()} for title, lines in found.items()}


def panel(number: int, title: str, lines: dict[str, list[Point]]) -> dict[str, Any]:
    """Place the lines of one panel; tokens are on a logarithmic axis."""
    points = [point for line in lines.values() for point in line]
    tokens = sorted({point.m for point in points})
    axis = ticks(max(1.0, *(max(point.reached, point.floor) for point in points)))

    def x(m: int) -> float:
        share = math.log(m / tokens[0]) / (math.log(tokens[-1] / tokens[0]) or 1.0)
        return round(LEFT + 12 + (RIGHT - LEFT - 24) * share, 1)

    def y(speedup: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * speedup / axis[-1], 1)

    return {
        "title": title,
        "left": number % 2 * WIDTH,
        "top": number // 2 * HEIGHT,
        "across": [(y(value), f"{value:g}") for value in sorted({1.0, *axis})],
        "below": [(x(m), m) for m in tokens],
        "lines": [
            {
                "label": label,
                "colour": COLOURS[i % len(COLOURS)],
                "at": TOP + 8 + LINE * i,
                "reached": " ".join(f"{x(point.m)},{y(point.reached)}" for point in line),
                "floor": " ".join(f"{x(point.m)},{y(point.floor)}" for point in line),
            }
            for i, (label, line) in enumerate(lines.items())
        ],
    }


def draw(rows: Iterable[dict[str, Any]]) -> str:
    """Draw the panels of the rows as one SVG."""
    found = [panel(number, title, lines) for number, (title, lines) in enumerate(panels(rows).items())]
    page = Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    size = {"width": WIDTH * min(2, len(found)), "height": HEIGHT * -(-len(found) // 2)}
    return page.render(panels=found, left=LEFT, top=TOP, right=RIGHT, bottom=BOTTOM, **size)


def main() -> None:
    """Read the arguments and write the drawing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("-o", "--out", type=Path, required=True, help="a .svg file")
    args = parser.parse_args()
    rows = []
    for path in args.csv:
        with path.open(newline="") as file:
            rows += list(csv.DictReader(file))
    args.out.write_text(draw(rows))


if __name__ == "__main__":
    main()
