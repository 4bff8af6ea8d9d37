"""Rows of compared recipes as CSV, Markdown, and a self-contained HTML page with plots of quality
against size.

A row is flat: `text:NAME:ppl`, `tasks:value`.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypeAlias

from quantkit.core.threads import grouped
from quantkit.core.units import format_bytes, format_seconds
from quantkit.reporting import charts

Row: TypeAlias = dict[str, Any]
#: The name of the unquantized model, and the layout of a scheme that no layout stores.
UNQUANTIZED, UNSTORED = "unquantized", "none"
#: Columns whose values are words.
WORDS = (
    "recipe",
    "precision",
    "grouping",
    "method",
    "calibration",
    "stored",
    "device",
    "quantkit",
    "command",
)
#: Columns that identify a row, in this order before all others.
NAMED = (
    "recipe",
    "precision",
    "grouping",
    "method",
    "calibration",
    "seed",
    "stored",
    "bits",
    "bytes",
    "seconds",
)
DASH = "–"
#: Titles of the tables.
QUALITY, TAILS, TASKS = "Quality and size", "Tails of the KL divergence", "Tasks"


class Column(NamedTuple):
    """A column of a table: its head, its key in a row, and how a value is written; `spreads` over
    seeds.
    """

    head: str
    key: str
    write: Callable[[float], str]
    spreads: bool = True


def as_csv(rows: Sequence[Row]) -> str:
    """Write rows as CSV, every column that a row has."""
    keys = [
        *NAMED,
        *(key for row in rows for key in row if key not in (*NAMED, "command")),
        "command",
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(keys)), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def read_csv(path: Path) -> list[Row]:
    """Read a table of `as_csv`, without empty values."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {
                key: value if key in WORDS else float(value)
                for key, value in row.items()
                if value or key in WORDS
            }
            for row in csv.DictReader(file)
        ]


def as_markdown(rows: Sequence[Row]) -> str:
    """Write rows as tables: quality, tails of the divergence, tasks, and the command of
    each row.
    """
    if not rows:
        return "No row is finished.\n"
    parts = [
        f"## {title}\n\n{table(rows, columns)}"
        for title, columns in sections(rows).items()
        if columns
    ]
    lines = "\n".join(
        f"{name(row)}: {format_seconds(float(row['seconds']))}\n  {row['command']}"
        for row in rows[1:]
    )
    return "\n".join([notes(rows), *parts, f"## Commands\n\n```\n{lines}\n```\n"])


def sections(rows: Sequence[Row]) -> dict[str, list[Column]]:
    """List the columns of each table that the rows have values for, by its title.

    The tails of the divergence are those of the first text; of the others only the 99th percentile.
    """
    texts, tasks = labels(rows, "text"), labels(rows, "task")
    columns = {
        QUALITY: [
            Column("bits", "bits", "{:.3f}".format),
            Column("size", "bytes", format_bytes),
            *(Column(f"ppl {text}", f"text:{text}:ppl", "{:.3f}".format) for text in texts),
            *(Column(f"KL {text}", f"text:{text}:kld", _thousandths) for text in texts),
            Column("tasks", "tasks:value", _percent),
        ],
        TAILS: [
            *(Column(f"p99 {text}", f"text:{text}:kld_p99", _thousandths) for text in texts),
            *(
                Column(f"{head} {text}", f"text:{text}:{key}", write)
                for text in texts[:1]
                for head, key, write in (
                    ("p99.9", "kld_p999", _thousandths),
                    ("above 0.1 nat, %", "kld_above", _percent),
                    ("top-1, %", "top1", _percent),
                )
            ),
        ],
        TASKS: [
            *(Column(task, f"task:{task}:value", _percent) for task in tasks),
            Column("mean", "tasks:value", _percent),
            Column("std error", "tasks:stderr", _percent, False),
            Column("difference", "tasks:difference", _points),
            Column("95 % from", "tasks:difference_low", _points, False),
            Column("to", "tasks:difference_high", _points, False),
        ],
    }
    return {
        title: [each for each in found if any(_has(row, each.key) for row in rows)]
        for title, found in columns.items()
    }


def notes(rows: Sequence[Row]) -> str:
    """Write the legend: thousandths, the origin of deviations, and rows that were judged without
    being packed.
    """
    unpacked = dict.fromkeys(row["recipe"] for row in rows if row["stored"] == UNSTORED)
    legend = "KL divergence from the unquantized model is in thousandths of a nat.\n"
    if len({row["seed"] for row in rows if _has(row, "seed")}) > 1:
        legend += "Mean ± standard deviation over seeds of the calibration text.\n"
    if unpacked:
        legend += (
            f"No layout stores {', '.join(unpacked)}: judged without packing, bits and bytes are "
            "as if packed.\n"
        )
    return legend


def cells(rows: Sequence[Row], columns: Sequence[Column]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table. Seeds share a row, and rows without values are left
    out.
    """
    groups = grouped(
        ((row["recipe"], row["calibration"]), row)
        for row in rows
        if any(_has(row, each.key) for each in columns)
    )
    heads = [key for key in identity(rows) if any(_has(group[0], key) for group in groups.values())]
    body = [
        [
            *(str(group[0].get(key) or DASH) for key in heads),
            *(
                _cell([row[each.key] for row in group if _has(row, each.key)], each)
                for each in columns
            ),
        ]
        for group in groups.values()
    ]
    return [*heads, *(each.head for each in columns)], body


def identity(rows: Sequence[Row]) -> list[str]:
    """List the columns that name a row. The recipe is included if the others do not distinguish
    recipes.
    """
    usual = ["precision", "grouping", "method"]
    recipes = {row["recipe"]: tuple(row.get(key) for key in usual) for row in rows}
    return [
        *(["recipe"] if len(set(recipes.values())) < len(recipes) else []),
        *usual,
        "calibration",
    ]


def name(row: Row) -> str:
    """Name a row in a list."""
    seed = row.get("seed")
    about = [row["calibration"], "" if seed in ("", None) else f"seed {float(seed or 0):.0f}"]
    return ", ".join([row["recipe"], *filter(None, about)])


def labels(rows: Sequence[Row], kind: str) -> list[str]:
    """List the names of the texts, tasks or scores that rows have."""
    return list(
        dict.fromkeys(
            key.split(":")[1] for row in rows for key in row if key.startswith(f"{kind}:")
        )
    )


def table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Write columns of rows as a Markdown table."""
    head, body = cells(rows, columns)
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *body])


def _has(row: Mapping[str, Any], key: str) -> bool:
    return row.get(key) not in ("", None)


def _cell(values: Sequence[float], column: Column) -> str:
    if not values:
        return DASH
    spread = (
        f" ± {column.write(stdev(values)).lstrip('+')}"
        if column.spreads and len(set(values)) > 1
        else ""
    )
    return column.write(fmean(values)) + spread


def _thousandths(value: float) -> str:
    return f"{1000 * value:.3g}" if value < 1 else f"{1000 * value:.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


def _points(value: float) -> str:
    return f"{100 * value:+.2f}"


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
    return charts.render(
        "compare.html.jinja",
        model=model,
        css=charts.raw("page.css"),
        light=charts.LIGHT,
        dark=charts.DARK,
        size=(WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM),
        series=[(*charts.style(i), name) for i, name in enumerate(names)],
        plots=[plot for text in labels(rows, "text") for plot in plots(rows, text, names)],
        tables=[(title, _table(rows, found)) for title, found in sections(rows).items() if found],
        notes=notes(rows),
        commands=[(name(row), row["command"]) for row in rows if row["command"]],
    )


def series(rows: Sequence[Row]) -> list[str]:
    """List the labels of marks: the method with its calibration text."""
    return list(dict.fromkeys(_series(row) for row in rows if row["recipe"] != UNQUANTIZED))


def plots(rows: Sequence[Row], text: str, names: Sequence[str]) -> Iterator[Plot]:
    """Plot the divergence on a text, on a logarithmic axis, against bits a weight and against
    bytes.
    """
    key = f"text:{text}:kld"
    shown = [row for row in rows if isinstance(row.get(key), float) and row[key] > 0]
    if not shown:
        return
    y, bottom, top = _scale([math.log10(row[key]) for row in shown], HEIGHT - BOTTOM, TOP)
    y_ticks = [(y(math.log10(each)), f"{1000 * each:g}") for each in _decades(bottom, top)]
    about = f"KL divergence on {text}, thousandths of a nat"
    for size, x_name in (("bits", "bits a weight"), ("bytes", "bytes of all tensors")):
        x, left, right = _scale([float(row[size]) for row in shown], LEFT, WIDTH - RIGHT)
        marks = [
            (
                x(float(row[size])),
                y(math.log10(row[key])),
                names.index(_series(row)),
                f"{name(row)}: {1000 * row[key]:.3g} thousandths of a nat, {row['bits']:.3f} bits, "
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
        yield Plot(f"{text}: {x_name}", x_name, about, x_ticks, y_ticks, marks)


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
    return [
        part * 10.0**power
        for power in range(math.floor(bottom), math.ceil(top) + 1)
        for part in (1, 2, 5)
        if bottom <= math.log10(part) + power <= top
    ]


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> charts.Table:
    head, body = cells(rows, columns)
    return charts.Table(head, body, "dense", range(len(head) - len(columns), len(head)))
