"""Inject a kill or a full disk at any disk operation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from quantkit.io import files


class Killed(BaseException):
    """Stands for a killed process: no operation happens after it."""


@contextmanager
def faults(hook: Callable[[str, Path], None] | None) -> Iterator[None]:
    files.FAULT = hook
    try:
        yield
    finally:
        files.FAULT = None


def killer(step: int) -> Callable[[str, Path], None]:
    seen = 0

    def hook(operation: str, path: Path) -> None:
        nonlocal seen
        seen += 1
        if seen >= step:
            raise Killed

    return hook


def stop_at(operation: str, name: str, number: int = 1) -> Callable[[str, Path], None]:
    """Return a hook that kills at the `number`-th operation on a file whose path contains `name`."""
    seen = 0

    def hook(did: str, path: Path) -> None:
        nonlocal seen
        seen += did == operation and name in str(path)
        if seen >= number:
            raise Killed

    return hook


def failing(step: int, error: int, once: bool, spared: Sequence[str] = ("unlink",)) -> Callable[[str, Path], None]:
    """Return a hook that fails at an operation, once or from then on; deleting works on a full disk."""
    seen = 0

    def hook(operation: str, path: Path) -> None:
        nonlocal seen
        if operation in spared:
            return
        seen += 1
        if seen == step or (seen > step and not once):
            raise OSError(error, os.strerror(error), str(path))

    return hook


def count(work: Callable[[], None]) -> int:
    seen = 0

    def hook(operation: str, path: Path) -> None:
        nonlocal seen
        seen += 1

    with faults(hook):
        work()
    return seen


def state(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
