"""Tables and labelled facts as text, wrapped in a terminal. A file gets whole lines, to search."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from quantkit.errors import printable

#: The most characters of a cell on a terminal, and the fewest that a narrow one leaves to a cell.
MOST, FEWEST = 100, 8
#: Columns of the labels of facts.
LABELS = 14


def columns() -> int | None:
    """Find the width to write in: `COLUMNS`, else that of the terminal; None for a file."""
    is_known = os.environ.get("COLUMNS") or (sys.stdout is not None and sys.stdout.isatty())
    return shutil.get_terminal_size().columns if is_known else None


def pieces(text: str, width: int | None = MOST) -> list[str]:
    """Split a text into lines of at most `width` characters, between words if it can be."""
    if width is None or len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, break_on_hyphens=False)


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Align columns: to the right if all cells are numbers, else to the left.

    In a narrow terminal the widest columns wrap.
    """
    every, limit = [list(header), *([_cell(value) for value in row] for row in rows)], columns()
    down = list(zip(*every, strict=True))
    numeric = [all(cell[:1] in "+-0123456789" for cell in cells) for _, *cells in down]
    widths = [max(map(len, cells)) for cells in down]
    if limit is not None:
        widths = [min(MOST, width) for width in widths]
    words = [max(len(word) for cell in cells for word in ["", *cell.split()]) for cells in down]
    while limit and sum(widths) + 2 * (len(widths) - 1) > limit and max(widths) > FEWEST:
        # No word is cut while another column can wrap between words.
        widest = max(range(len(widths)), key=lambda i: (widths[i] > words[i], widths[i]))
        widths[widest] -= 1
    lines = []
    for row in every:
        wrapped = [pieces(cell, width) for cell, width in zip(row, widths, strict=True)]
        for line in zip_longest(*wrapped, fillvalue=""):
            padded = [
                part.rjust(width) if right else part.ljust(width)
                for part, width, right in zip(line, widths, numeric, strict=True)
            ]
            lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return printable(f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value))


def facts(pairs: Iterable[tuple[str, Any]], labels: int = LABELS) -> str:
    """Format a label and a value for each pair, the value on as many lines as it needs.

    Pairs with an empty value are left out.
    """
    limit, lines = columns(), []
    width = None if limit is None else max(FEWEST, min(MOST, limit - labels - 1))
    for label, value in pairs:
        if value not in (None, "", [], {}):
            first, *more = pieces(printable(str(value)), width)
            lines += [f"{label:<{labels}} {first}", *(f"{'':<{labels}} {piece}" for piece in more)]
    return "\n".join(lines)
