"""The rows of compared recipes as one self-contained HTML page: plots of quality against size, and the tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quantkit.core.units import format_bytes
from quantkit.reporting import charts, recipe_table
from quantkit.reporting.charts import MARKS, Table
from quantkit.reporting.recipe_table import Row
from quantkit.reporting.templates import raw, render

#: Pixels of a plot and of the margins around its values.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520, 300, 62, 14, 12, 40
#: The part of the range of values that stays free on both sides.
FREE = 0.06


class Mark(NamedTuple):
    """A row in a plot: its place in pixels, its series, and its values in words."""

    x: float
    y: float
    series: int
    text: str


class Plot(NamedTuple):
    """A plot of divergence against size, both in words; ticks are places in pixels with their text."""

    title: str
    x_name: str
    y_name: str
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    marks: Sequence[Mark]


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
        series=[(f"s{i % len(charts.LIGHT)}", MARKS[i % len(MARKS)], name) for i, name in enumerate(names)],
        plots=[plot for text in recipe_table.labels(rows, "text") for plot in plots(rows, text, names)],
        tables=[(title, _table(rows, columns)) for title, columns in recipe_table.sections(rows)],
        notes=recipe_table.notes(rows),
        commands=[(recipe_table.name(row), row["command"]) for row in rows if row["command"]],
    )


def series(rows: Sequence[Row]) -> list[str]:
    """List what marks are told apart by: the method with its calibration text."""
    return list(dict.fromkeys(_series(row) for row in rows if row["recipe"] != recipe_table.UNQUANTIZED))


def plots(rows: Sequence[Row], text: str, names: Sequence[str]) -> list[Plot]:
    """Plot the divergence on a text, on a logarithmic axis, against bits a weight and against bytes."""
    key = f"text:{text}:kld"
    shown = [row for row in rows if isinstance(row.get(key), float) and row[key] > 0]
    if not shown:
        return []
    ys = [math.log10(row[key]) for row in shown]
    bottom, top = _range(ys)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - bottom) / (top - bottom) * (HEIGHT - BOTTOM - TOP)

    y_ticks = [(y(math.log10(each)), f"{1000 * each:g}") for each in _decades(bottom, top)]
    found = []
    sizes: list[tuple[str, str, Callable[[float], str]]] = [
        ("bits", "bits a weight", lambda value: f"{value:g}"),
        ("bytes", "bytes of all tensors", format_bytes),
    ]
    for size, x_name, write in sizes:
        left, right = _range([float(row[size]) for row in shown])

        def x(value: float, left: float = left, right: float = right) -> float:
            return LEFT + (value - left) / (right - left) * (WIDTH - LEFT - RIGHT)

        marks = [
            Mark(
                x(float(row[size])),
                y(at),
                names.index(_series(row)),
                f"{recipe_table.name(row)}: {1000 * row[key]:.3g} thousandths of a nat, {row['bits']:.3f} bits, "
                f"{format_bytes(row['bytes'])}",
            )
            for row, at in zip(shown, ys, strict=True)
        ]
        steps = [left + (right - left) * part / 4 for part in range(5)]
        ticks = [each for each in charts.ticks(right) if left <= each <= right]
        chosen = ticks if len(ticks) > 2 else [float(f"{each:.3g}") for each in steps[1:4]]
        about = f"KL divergence on {text}, thousandths of a nat"
        found.append(
            Plot(f"{text}: {x_name}", x_name, about, [(x(each), write(each)) for each in chosen], y_ticks, marks)
        )
    return found


def _series(row: Row) -> str:
    return f"{row['method']}, {row['calibration']}" if row["calibration"] else str(row["method"])


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    free = FREE * (high - low) or 0.5 * (abs(high) or 1.0)
    return low - free, high + free


def _decades(bottom: float, top: float) -> list[float]:
    """Return the values 1, 2 and 5 of each power of ten in a range of logarithms."""
    powers = range(math.floor(bottom), math.ceil(top) + 1)
    return [part * 10.0**power for power in powers for part in (1, 2, 5) if bottom <= math.log10(part) + power <= top]


def _table(rows: Sequence[Row], columns: Sequence[recipe_table.Column]) -> Table:
    head, body = recipe_table.cells(rows, columns)
    return Table(head, body, "dense", range(len(head) - len(columns), len(head)))
