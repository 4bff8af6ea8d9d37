"""Draw panels of lines or of marks over names as one SVG, in the colours, marks and axes of quantkit's reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jinja2 import Environment

from quantkit.reporting.charts import LIGHT, MARKS, ticks

COLOURS = (*LIGHT, "#17202a")
#: Pixels of a panel, of its plot, and of a line of the legend.
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM, LINE = 760, 420, 60, 36, 470, 350, 16
PAGE = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{{ width }}" height="{{ height }}"\
 viewBox="0 0 {{ width }} {{ height }}" font-family="sans-serif" font-size="11" fill="#17202a">
<rect width="100%" height="100%" fill="#fff"/>
{% for panel in panels %}
<g transform="translate({{ panel.left }} {{ panel.top }})">
<text x="{{ left }}" y="20" font-size="14">{{ panel.title }}</text>
{% for at, label in panel.across %}
<path d="M{{ left }} {{ at }}H{{ right }}" stroke="#dfe4e8"/>
<text x="{{ left - 6 }}" y="{{ at }}" dy="4" text-anchor="end">{{ label }}</text>
{% endfor %}
{% for at, label in panel.below %}
{% if panel.named %}
<text transform="translate({{ at }} {{ bottom + 12 }}) rotate(20)">{{ label }}</text>
{% else %}
<text x="{{ at }}" y="{{ bottom + 18 }}" text-anchor="middle">{{ label }}</text>
{% endif %}
{% endfor %}
{% if not panel.named %}
<text x="{{ (left + right) / 2 }}" y="{{ bottom + 38 }}" text-anchor="middle">{{ panel.x }}</text>
{% endif %}
<text transform="translate(14 {{ (top + bottom) / 2 }}) rotate(-90)" text-anchor="middle">{{ panel.y }}</text>
{% for line in panel.lines %}
<g stroke="{{ line.colour }}" fill="none">
{% if not panel.named %}
<polyline points="{{ line.path }}" stroke-width="1.8"{% if line.dashed %} stroke-dasharray="5 4"{% endif %}/>
{% endif %}
{% if not line.dashed %}
{% for x, y in line.points %}
<path d="{{ line.mark }}" transform="translate({{ x }} {{ y }})" fill="{{ line.colour }}"/>
{% endfor %}
{% endif %}
</g>
<path d="M{{ right + 12 }} {{ line.at }}h18" stroke="{{ line.colour }}" stroke-width="3"\
{% if line.dashed %} stroke-dasharray="5 4"{% endif %}/>
<text x="{{ right + 36 }}" y="{{ line.at + 4 }}">{{ line.label }}</text>
{% endfor %}
</g>
{% endfor %}
</svg>
"""


class Panel(NamedTuple):
    """A panel: label -> its points, x being a number on a logarithmic axis, or a name if any x is one.

    Lines in `dashed` are bounds; "A: bound" has the colour of "A". `log_y` is for values over several powers of ten.
    """

    title: str
    x: str
    y: str
    lines: dict[str, list[tuple[Any, float]]]
    dashed: frozenset[str] = frozenset()
    log_y: bool = False


def draw(panels: Sequence[Panel]) -> str:
    """Draw panels as one SVG, two side by side."""
    page = Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    size = {"width": WIDTH * min(2, len(panels)), "height": HEIGHT * -(-len(panels) // 2)}
    placed = [_placed(number, panel) for number, panel in enumerate(panels)]
    return page.render(panels=placed, left=LEFT, top=TOP, right=RIGHT, bottom=BOTTOM, **size)


def _placed(number: int, panel: Panel) -> dict[str, Any]:
    """Place the lines of one panel in pixels."""
    points = [point for line in panel.lines.values() for point in line]
    named = any(isinstance(x, str) for x, _ in points)
    places = list(dict.fromkeys(x for x, _ in points)) if named else sorted({x for x, _ in points})
    low, high = min(y for _, y in points), max(y for _, y in points)
    axis = _powers(low, high) if panel.log_y else ticks(high)

    def x(value: Any) -> float:
        if named:
            share = (places.index(value) + 0.5) / len(places)
        else:
            share = math.log(value / places[0]) / (math.log(places[-1] / places[0]) or 1.0)
        return round(LEFT + 12 + (RIGHT - LEFT - 24) * share, 1)

    def y(value: float) -> float:
        share = math.log(value / axis[0]) / math.log(axis[-1] / axis[0]) if panel.log_y else value / axis[-1]
        return round(BOTTOM - (BOTTOM - TOP) * share, 1)

    shown = places if named else _spread(places)
    lines = []
    of_line = {label: label.split(": ")[0] if label.split(": ")[0] in panel.lines else label for label in panel.lines}
    order = list(dict.fromkeys(of_line.values()))
    for i, (label, line) in enumerate(panel.lines.items()):
        spots = [(x(at), y(value)) for at, value in (line if named else sorted(line))]
        lines.append(
            {
                "label": label,
                "colour": COLOURS[order.index(of_line[label]) % len(COLOURS)],
                "mark": MARKS[i % len(MARKS)],
                "at": TOP + 8 + LINE * i,
                "dashed": label in panel.dashed,
                "points": spots,
                "path": " ".join(f"{across},{up}" for across, up in spots),
            }
        )
    return panel._asdict() | {
        "left": number % 2 * WIDTH,
        "top": number // 2 * HEIGHT,
        "named": named,
        "across": [(y(value), f"{value:g}") for value in axis],
        "below": [(x(value), value if named else f"{value:g}") for value in shown],
        "lines": lines,
    }


def _powers(low: float, high: float) -> list[float]:
    """List the powers of ten around values."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def _spread(places: Sequence[float]) -> list[float]:
    """Select labels that do not overlap on a logarithmic axis: some of whole numbers, powers of ten of others."""
    if any(place != int(place) for place in places):
        powers = [10.0**power for power in range(-6, 7)]
        return [power for power in powers if places[0] <= power <= places[-1]] or [places[0], places[-1]]
    shown = [places[0]]
    for place in places[1:]:
        if math.log(place / shown[-1]) >= math.log(places[-1] / places[0]) / 13:
            shown.append(place)
    return shown
