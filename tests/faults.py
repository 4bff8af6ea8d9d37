"""Inject a kill or a full disk at any disk operation, and give a folder in memory, where fsync is free."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from quantkit.io import files


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """Return a folder in memory if it has enough space, because tests of every operation need thousands of fsyncs."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < 2**29:  # containers often have 64 MiB
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


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
