"""Parts of the texts that commands print. Each command's formatter is in the command's module."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress

from quantkit.names import JsonView
from quantkit.progress import Progress
from quantkit.reporting.tables import facts as facts, table as table


def as_json(result: JsonView) -> str:
    """Format a result as one JSON object."""
    return json.dumps(result, indent=1, allow_nan=False)


def of_level(progress: Progress, line: str, text: str, more: str = "") -> str:
    """Choose how much of a result is printed: one line (-q), its text, or more below it (-v)."""
    if progress.quiet:
        return line
    return f"{text}\n\n{more}" if progress.verbose and more else text


def report(found: JsonView, progress: Progress) -> str:
    """Format the report of a run."""
    from quantkit.reporting import summary

    header = ("linear", "shape", "scheme", "error", "loss/rtn", "seconds")
    return of_level(
        progress,
        summary.line(found),
        summary.summary(found, progress.noted if _is_one_output() else ()),
        table(header, summary.rows(found)),
    )


def _is_one_output() -> bool:
    """Return True if results and notes go to the same terminal or file."""
    with suppress(OSError, ValueError, AttributeError):
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    return False
