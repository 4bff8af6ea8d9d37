"""Parts of the texts that commands print. Each command's formatter is in the command's module."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quantkit.progress import Progress


def as_json(result: Mapping[str, Any]) -> str:
    """Format a result as one JSON object."""
    return json.dumps(result, indent=1, allow_nan=False)


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Align columns: to the right if all cells are numbers, else to the left."""
    cells = [[_cell(value) for value in row] for row in rows]
    numeric = [all(row[i][:1] in "+-0123456789" for row in cells) for i in range(len(header))]
    widths = [max(len(row[i]) for row in (list(header), *cells)) for i in range(len(header))]
    lines = []
    for row in (list(header), *cells):
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def facts(pairs: Iterable[tuple[str, Any]]) -> str:
    """Format one `label  value` line for each pair. Pairs with an empty value are left out."""
    return "\n".join(
        f"{label:<14} {value}" for label, value in pairs if value not in (None, "", [], {})
    )


def of_level(progress: Progress, line: str, text: str, more: str = "") -> str:
    """Choose how much of a result is printed: one line (-q), its text, or more below it (-v)."""
    if progress.quiet:
        return line
    return f"{text}\n\n{more}" if progress.verbose and more else text


def report(found: Mapping[str, Any], progress: Progress) -> str:
    """Format the report of a run."""
    from quantkit.reporting import summary

    header = ("linear", "shape", "scheme", "error", "loss/rtn", "seconds")
    return of_level(
        progress, summary.line(found), summary.summary(found), table(header, summary.rows(found))
    )
