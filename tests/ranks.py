"""Run work on several ranks, each a fork of this process: no imports, and gloo between them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.reliability import forks
from tests.reliability.forks import Ended

#: Seconds after which ranks that wait for each other are killed.
LIMIT = 60.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(works: Sequence[Callable[[], int | None]], folder: Path) -> list[int]:
    """Start a fork for each rank, with what torchrun tells it; returns the process ids."""
    port = free_port()

    def launched(rank: int) -> int | None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(works))}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(len(works))}
        try:
            return works[rank]()
        except Exception:
            sys.excepthook(*sys.exc_info())
            return 1

    return [forks.start(lambda rank=rank: launched(rank), folder, f"rank{rank}") for rank in range(len(works))]  # type: ignore[misc]


def wait(pids: Sequence[int], folder: Path, limit: float = LIMIT) -> list[Ended]:
    return [forks.wait(pid, folder, f"rank{rank}", limit) for rank, pid in enumerate(pids)]


def run(works: Sequence[Callable[[], int | None]], folder: Path, limit: float = LIMIT) -> list[Ended]:
    """Run one work on each rank."""
    return wait(start(works, folder), folder, limit)


def command(count: int, folder: Path, *arguments: object, limit: float = LIMIT) -> list[Ended]:
    """Run the command line on `count` ranks."""
    return run([forks.command(*arguments)] * count, folder, limit)
