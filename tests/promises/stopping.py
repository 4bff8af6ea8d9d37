"""Run commands that stop in the middle, each in a fork of this process.

Events of Python's audit count the changes of the disk, so no module of quantkit is named.
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from tests.reliability.forks import Ended, run

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}


def is_change(event: str, args: tuple[Any, ...]) -> bool:
    if event not in CHANGES or ".partial-" not in str(args[0]):
        return False
    return event != "open" or (isinstance(args[2], int) and bool(args[2] & (os.O_WRONLY | os.O_RDWR)))


def stopped(folder: Path, words: str, number: int, at: int) -> tuple[Ended, int]:
    """Run a command in `folder` that sends itself the signal `number` at a change; without one, count its changes."""

    def work() -> None:
        seen = itertools.count(1)  # its numbers differ in all threads

        def count(event: str, args: tuple[Any, ...]) -> None:
            if is_change(event, args) and next(seen) == at and number:
                os.kill(os.getpid(), number)

        os.chdir(folder)
        sys.argv = ["quantkit", *words.split()]
        sys.addaudithook(count)
        try:
            runpy.run_module("quantkit", run_name="__main__", alter_sys=True)
        finally:
            Path("changes.txt").write_text(str(next(seen) - 1))

    ended = run(work, folder)
    counted = folder / "changes.txt"
    return ended, int(counted.read_text()) if counted.exists() else 0
