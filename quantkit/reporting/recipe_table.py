"""Rows of compared recipes as CSV and Markdown. A row is flat: `text:NAME:ppl`, `tasks:value`."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypeAlias

from quantkit.core.units import format_bytes, format_seconds

Row: TypeAlias = dict[str, Any]
#: The name of the model that was not quantized, and the layout of a scheme that no layout stores.
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
#: Columns that say which row it is, in front of all others in this order.
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
    """Read what `as_csv` wrote; an empty value is left out."""
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
    parts = [f"## {title}\n\n{table(rows, columns)}" for title, columns in sections(rows)]
    lines = "\n".join(
        f"{name(row)}: {format_seconds(float(row['seconds']))}\n  {row['command']}"
        for row in rows[1:]
    )
    return "\n".join([notes(rows), *parts, f"## Commands\n\n```\n{lines}\n```\n"])


def sections(rows: Sequence[Row]) -> list[tuple[str, list[Column]]]:
    """List the tables of rows that have columns, each with its title."""
    found = [
        ("Quality and size", quality(rows)),
        ("Tails of the KL divergence", tails(rows)),
        ("Tasks", tasks(rows)),
    ]
    return [(title, columns) for title, columns in found if columns]


def notes(rows: Sequence[Row]) -> str:
    """Say what stands for a thousandth, over what a deviation is, and which rows were judged
    without being packed.
    """
    unpacked = dict.fromkeys(row["recipe"] for row in rows if row["stored"] == UNSTORED)
    told = "KL divergence from the unquantized model is in thousandths of a nat.\n"
    if len({row["seed"] for row in rows if _has(row, "seed")}) > 1:
        told += "Mean ± standard deviation over seeds of the calibration text.\n"
    if unpacked:
        told += (
            f"No layout stores {', '.join(unpacked)}: judged without packing, bits and bytes are "
            "as if packed.\n"
        )
    return told


def quality(rows: Sequence[Row]) -> list[Column]:
    """List the columns of quality and size."""
    found = [
        Column("bits", "bits", lambda value: f"{value:.3f}"),
        Column("size", "bytes", format_bytes),
    ]
    texts = labels(rows, "text")
    found += [
        Column(f"ppl {text}", f"text:{text}:ppl", lambda value: f"{value:.3f}") for text in texts
    ]
    found += [Column(f"KL {text}", f"text:{text}:kld", _thousandths) for text in texts]
    found += [Column("tasks", "tasks:value", _percent)]
    return _known(rows, found)


def tails(rows: Sequence[Row]) -> list[Column]:
    """List the columns of the divergence's tails: all of the first text, of others the 99th
    percentile.
    """
    texts = labels(rows, "text")
    found = [Column(f"p99 {text}", f"text:{text}:kld_p99", _thousandths) for text in texts]
    for head, key, write in (
        ("p99.9", "kld_p999", _thousandths),
        ("above 0.1 nat, %", "kld_above", _percent),
        ("top-1, %", "top1", _percent),
    ):
        found += [Column(f"{head} {text}", f"text:{text}:{key}", write) for text in texts[:1]]
    return _known(rows, found)


def tasks(rows: Sequence[Row]) -> list[Column]:
    """List the columns of tasks: each value, and the mean difference to the unquantized model with
    its interval.
    """
    found = [Column(task, f"task:{task}:value", _percent) for task in labels(rows, "task")]
    found += [
        Column("mean", "tasks:value", _percent),
        Column("std error", "tasks:stderr", _percent, False),
    ]
    found += [Column("difference", "tasks:difference", _points)]
    found += [Column("95 % from", "tasks:difference_low", _points, False)]
    found += [Column("to", "tasks:difference_high", _points, False)]
    return _known(rows, found)


def cells(rows: Sequence[Row], columns: Sequence[Column]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table, in which seeds are one row, without rows that have
    no value.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if any(_has(row, each.key) for each in columns):
            groups.setdefault((row["recipe"], row["calibration"]), []).append(row)
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
    """List the columns that name a row: the recipe too if the others do not tell recipes apart."""
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
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _known(rows: Sequence[Row], columns: Sequence[Column]) -> list[Column]:
    return [column for column in columns if any(_has(row, column.key) for row in rows)]


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
