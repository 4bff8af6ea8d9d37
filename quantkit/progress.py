"""What a user sees while waiting: bars, notes and warnings, all on stderr, so that stdout holds results only."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


class Progress:
    """Bars with an ETA (on a terminal, from the third second on), notes and warnings.

    `quiet` silences bars and notes; warnings always appear. `verbose` lets details through.
    """

    def __init__(self, quiet: bool = False, verbose: bool = False) -> None:
        self.quiet = quiet
        self.verbose = verbose

    def bar(self, work: Iterable[Any] | int, label: str, total: int | None = None) -> Any:
        """Return a bar: an iterator over `work`, or for a number of steps an object with `update(n)` and `close()`."""
        from tqdm import tqdm

        steps = work if isinstance(work, int) else total
        return tqdm(
            None if isinstance(work, int) else work,
            total=steps,
            desc=label,
            file=sys.stderr,
            disable=self.quiet or not sys.stderr.isatty(),
            delay=2,
            leave=False,
            dynamic_ncols=True,
        )

    def detail(self, text: str) -> None:
        """Say what only a curious user wants to know (-v)."""
        if self.verbose and not self.quiet:
            _say(text)

    def note(self, text: str) -> None:
        """Say what a user should know, unless they asked for quiet (-q)."""
        if not self.quiet:
            _say(text)

    def warn(self, text: str) -> None:
        """Say what a user must know, always."""
        _say(f"Warning: {text}")


def _say(text: str) -> None:
    from tqdm import tqdm

    tqdm.write(text, file=sys.stderr)  # goes above a bar that is being drawn
