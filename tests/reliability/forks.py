"""Run work in a fork of this process, which has all imports loaded: a tenth of a second in place of four."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

# tqdm's lock is one of all forks: one that is killed within a bar would keep it for ever. Nor may its thread hold a
# lock when this process forks.
tqdm.set_lock(threading.RLock())
tqdm.monitor_interval = 0

#: The exit code of work that raised an exception.
BROKE = 70
#: Signals that a fork meets as a new process does: one that the campaign's own shell ignores would end nothing.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Ended:
    """How a fork ended: its exit code (negative for a signal), what it printed, and its seconds.

    `queued` are the seconds in which its main thread could run and other processes had all cores; `seconds` are without
    them, so that a busy machine does not fail a limit of time.
    """

    code: int
    stdout: str
    stderr: str
    seconds: float
    queued: float


def start(work: Callable[[], int | None], folder: Path, name: str = "fork") -> int:
    """Run `work` in a fork, with its streams in files of `folder`; returns the process id. It must not be threaded."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = BROKE
    try:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.setpgid(0, 0)
        # torch makes its pool of threads anew at the first call in a fork, and two threads must not be that first one.
        torch.set_num_threads(torch.get_num_threads())
        for stream, ending in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{name}.{ending}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), stream)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", 1, closefd=False) for stream in (1, 2))  # not pytest's
        code = work() or 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            code = BROKE  # nobody reads it, as an interpreter would say too
        finally:
            os._exit(code)


def wait(pid: int, folder: Path, name: str = "fork", limit: float = 120.0) -> Ended:
    """Wait for a fork; one that hangs is killed, and is a TimeoutError: it must not look like a kill of a case."""
    began, hung = time.monotonic(), False
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        passed = time.monotonic() - began
        if passed > limit and passed - queued_seconds(pid) > limit and not hung:
            os.kill(pid, signal.SIGKILL)
            hung = True
        time.sleep(0.002)
    seconds, queued = time.monotonic() - began, queued_seconds(pid)
    _, status = os.waitpid(pid, 0)
    said = [(folder / f"{name}.{ending}").read_text(errors="replace") for ending in ("out", "err")]
    if hung:
        raise TimeoutError(f"did not end within {limit} seconds: {said[1]}")
    return Ended(os.waitstatus_to_exitcode(status), said[0], said[1], seconds - queued, queued)


def queued_seconds(pid: int) -> float:
    """Read how long the main thread of a process waited for a core; 0 where the system does not count it."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def run(work: Callable[[], int | None], folder: Path, name: str = "fork", limit: float = 120.0) -> Ended:
    """Run `work` in a fork and wait for it."""
    return wait(start(work, folder, name), folder, name, limit)


def command(*arguments: object) -> Callable[[], int | None]:
    """Return the work of the command line with these arguments, as a shell would start it."""

    def work() -> int | None:
        from quantkit.cli import main

        sys.argv = ["quantkit", *map(str, arguments)]
        return main(list(map(str, arguments)))  # type: ignore[func-returns-value]

    return work
