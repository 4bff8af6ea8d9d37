"""The rows of compared recipes as one self-contained HTML page: plots of quality against size, and
the tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quantkit.core.units import format_bytes
from quantkit.reporting import charts, recipe_table
from quantkit.reporting.charts import Table
from quantkit.reporting.recipe_table import Row
from quantkit.reporting.templates import raw, render

#: Pixels of a plot and of the margins around its values.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520, 300, 62, 14, 12, 40
#: The part of the range of values that stays free on both sides.
FREE = 0.06


class Plot(NamedTuple):
    """A plot of divergence against size, both in words; ticks are places in pixels with their text.

    A mark is a row: its place in pixels, its series, and its values in words.
    """

    title: str
    x_name: str
    y_name: str
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    marks: Sequence[tuple[float, float, int, str]]


def page(model: str, rows: Sequence[Row]) -> str:
    """Write the page."""
    names = series(rows)
    return render(
        "compare.html.jinja",
        model=model,
        css=raw("page.css"),
        light=charts.LIGHT,
        dark=charts.DARK,
        size=(WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM),
        series=[(*charts.style(i), name) for i, name in enumerate(names)],
        plots=[
            plot for text in recipe_table.labels(rows, "text") for plot in plots(rows, text, names)
        ],
        tables=[(title, _table(rows, columns)) for title, columns in recipe_table.sections(rows)],
        notes=recipe_table.notes(rows),
        commands=[(recipe_table.name(row), row["command"]) for row in rows if row["command"]],
    )


def series(rows: Sequence[Row]) -> list[str]:
    """List the labels of marks: the method with its calibration text."""
    return list(
        dict.fromkeys(_series(row) for row in rows if row["recipe"] != recipe_table.UNQUANTIZED)
    )


def plots(rows: Sequence[Row], text: str, names: Sequence[str]) -> list[Plot]:
    """Plot the divergence on a text, on a logarithmic axis, against bits a weight and against
    bytes.
    """
    key = f"text:{text}:kld"
    shown = [row for row in rows if isinstance(row.get(key), float) and row[key] > 0]
    if not shown:
        return []
    y, bottom, top = _scale([math.log10(row[key]) for row in shown], HEIGHT - BOTTOM, TOP)
    y_ticks = [(y(math.log10(each)), f"{1000 * each:g}") for each in _decades(bottom, top)]
    about, found = f"KL divergence on {text}, thousandths of a nat", []
    for size, x_name in (("bits", "bits a weight"), ("bytes", "bytes of all tensors")):
        x, left, right = _scale([float(row[size]) for row in shown], LEFT, WIDTH - RIGHT)
        marks = [
            (
                x(float(row[size])),
                y(math.log10(row[key])),
                names.index(_series(row)),
                f"{recipe_table.name(row)}: {1000 * row[key]:.3g} thousandths of a nat, "
                f"{row['bits']:.3f} bits, "
                f"{format_bytes(row['bytes'])}",
            )
            for row in shown
        ]
        ticks = [each for each in charts.ticks(right) if left <= each <= right]
        if len(ticks) < 3:
            ticks = [float(f"{left + (right - left) * part / 4:.3g}") for part in (1, 2, 3)]
        x_ticks = [
            (x(each), format_bytes(each) if size == "bytes" else f"{each:g}") for each in ticks
        ]
        found.append(Plot(f"{text}: {x_name}", x_name, about, x_ticks, y_ticks, marks))
    return found


def _series(row: Row) -> str:
    return f"{row['method']}, {row['calibration']}" if row["calibration"] else str(row["method"])


def _scale(
    values: Sequence[float], start: float, end: float
) -> tuple[Callable[[float], float], float, float]:
    """Return the place in pixels of a value on an axis from `start` to `end`, and the values at
    these.
    """
    low, high = min(values), max(values)
    free = FREE * (high - low) or 0.5 * (abs(high) or 1.0)
    low, high = low - free, high + free
    return lambda value: start + (value - low) / (high - low) * (end - start), low, high


def _decades(bottom: float, top: float) -> list[float]:
    """Return the values 1, 2 and 5 of each power of ten in a range of logarithms."""
    powers = range(math.floor(bottom), math.ceil(top) + 1)
    return [
        part * 10.0**power
        for power in powers
        for part in (1, 2, 5)
        if bottom <= math.log10(part) + power <= top
    ]


def _table(rows: Sequence[Row], columns: Sequence[recipe_table.Column]) -> Table:
    head, body = recipe_table.cells(rows, columns)
    return Table(head, body, "dense", range(len(head) - len(columns), len(head)))
