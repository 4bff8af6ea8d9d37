"""Signals and closed pipes: the exit code, one line, and a run that resumes to the same bytes."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from quantkit.algorithms import hessian
from quantkit.cli.process import STOP, Stopped, catch_signals
from quantkit.io.staging import JOURNAL
from quantkit.pipeline import convert
from quantkit.progress import Progress
from tests.command_line import ROOT, RTN, call
from tests.faults import faults
from tests.reliability.forks import command, run


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 75), (signal.SIGINT, 130)])
def test_a_signal_before_anything_is_written_leaves_nothing(
    number: signal.Signals, code: int, small_llama: Path, tmp_path: Path
) -> None:
    with faults(lambda operation, path: signal.raise_signal(number) if operation == "mkdir" else None):
        result = call("quantize", small_llama, "-o", tmp_path / "out", *RTN, code=code)
    assert "run the same command again" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_comparison_that_is_stopped_before_its_first_row_promises_no_kept_part(
    small_llama: Path, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "LICENSE", tmp_path / "text.txt")
    words = ("-o", tmp_path / "out", "--recipes", "int4:g64:rtn", "--text", tmp_path / "text.txt", "--device", "cpu")
    with faults(lambda operation, path: signal.raise_signal(signal.SIGINT) if operation == "mkdir" else None):
        result = call("compare", small_llama, *words, code=130)
    assert "run the same command again" in result.stderr and "kept" not in result.stderr


def test_a_signal_inside_exec_has_the_right_exit_code(small_llama: Path, tmp_path: Path) -> None:
    """An import that makes a named tuple goes through `exec`, which would end with another code."""
    out, lines = tmp_path / "out", itertools.count(1)

    def fault(operation: str, path: Path) -> None:
        if operation == "fsync" and path.name == JOURNAL and next(lines) == 3:
            exec("os.kill(os.getpid(), signal.SIGINT)")

    def work() -> int | None:
        with faults(fault):
            return command("quantize", small_llama, "-o", out, *RTN, "-q")()

    ended = run(work, tmp_path)
    assert ended.code == 130 and len(ended.stderr.splitlines()) == 1, ended.stderr
    assert ended.stderr.startswith("Interrupted: ") and "--resume" in ended.stderr
    assert not out.exists() and len(list(tmp_path.glob("out.partial-*"))) == 1


#: Prints the exit code of one fork a signal, and then ends well. One process, so that the imports are done once.
#: tests/promises/test_stopped.py sends signals half-way.
EARLY_AND_LATE = """
import os, signal, time
import click
import quantkit.cli.commands
from quantkit.cli import main, process

process.GRACE = 0.2
make = click.Group.make_context

class Lost:  # an exception in its finalizer is lost
    def __del__(self):
        os.kill(os.getpid(), number)

def make_context(*args, **options):
    if in_finalizer:
        Lost()
        time.sleep(60)
    os.kill(os.getpid(), number)
    return make(*args, **options)

click.Group.make_context = make_context
for number, in_finalizer in ((signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGINT, True)):
    child = os.fork()
    if child == 0:
        main(["--version"])
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
click.Group.make_context = make

class Late:  # deleted as the interpreter ends
    def __del__(self, kill=os.kill, pid=os.getpid(), numbers=(signal.SIGINT, signal.SIGTERM)):
        for number in numbers:
            kill(pid, number)

late = Late()
main(["--version"])
"""


def test_a_signal_before_a_command_or_behind_its_end_has_the_right_exit_code(tmp_path: Path) -> None:
    (tmp_path / "signalled.py").write_text(EARLY_AND_LATE)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "signalled"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("130\n75\n130\n") and "quantkit" in done.stdout, done.stderr
    said = [*filter(None, done.stderr.split("\n"))]
    assert [line.split(":")[0] for line in said] == ["Interrupted", "Stopped", "Interrupted"]
    assert done.stderr.count("nothing was written") == 3


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&-"])
def test_a_closed_stdout_changes_no_outcome(closed: str, small_llama: Path, tmp_path: Path) -> None:
    for words, code in (("--method rtn --set clip=none", 0), ("--method rtn --format none", 2)):
        line = f"{sys.executable} -m quantkit quantize {small_llama} -o {tmp_path}/{code} {words} {closed}"
        done = subprocess.run(line, shell=True, stderr=subprocess.PIPE, text=True, timeout=120)
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
        assert (tmp_path / f"{code}" / "config.json").exists() == (code == 0)


def test_a_signal_within_a_long_step_ends_a_command_soon_and_keeps_the_finished_blocks(
    small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factorization of a wide weight takes a minute, and Python runs no handler meanwhile."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    shutil.copy(ROOT / "LICENSE", text)
    words = ("quantize", small_llama, "-o", out, "--calib", text, "--samples", 4, "--max-length", 32, "-q")
    factorize, calls = hessian.factorize, itertools.count(1)

    def slow(*args: Any, **options: Any) -> hessian.Factor:
        if next(calls) == at:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)  # goes on after the handler
        return factorize(*args, **options)

    monkeypatch.setattr("quantkit.calibration.stages.solve.factorize", slow)
    monkeypatch.setattr("quantkit.cli.process.GRACE", 0.2)
    for number, kept in ((1, False), (6, True)):
        at = number
        ended = run(command(*words), tmp_path)
        assert ended.code == 75 and ended.seconds < 10, ended
        assert ended.stderr.splitlines() == [
            "Stopped: the finished part is kept, the same command with --resume continues"
            if kept
            else "Stopped: nothing was written, run the same command again"
        ]
    at = 0
    assert call(*words, "--resume").exit_code == 0


@pytest.mark.usefixtures("handlers")
def test_stopping_is_an_interruption_to_whatever_cleans_up() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        signal.raise_signal(signal.SIGTERM)
    assert caught.type is Stopped


@pytest.mark.usefixtures("handlers")
def test_a_signal_inside_a_loop_waits_for_the_next_item() -> None:
    """An exception at any instruction of an item could leave a lock taken."""
    seen = []
    with pytest.raises(Stopped):
        for item in Progress(quiet=True, stop=STOP).bar(range(5), "work"):
            if item == 2:
                signal.raise_signal(signal.SIGTERM)
            seen.append(item)
    assert seen == [0, 1, 2]
    STOP.clear()
    assert list(Progress(quiet=True, stop=STOP).bar(range(3), "work")) == [0, 1, 2]


@pytest.mark.usefixtures("handlers")
def test_a_signal_inside_the_last_item_is_not_lost() -> None:
    with pytest.raises(Stopped):
        for _ in Progress(quiet=True, stop=STOP).bar(range(1), "work"):
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.usefixtures("handlers")
def test_a_signal_while_a_lock_of_threads_is_taken_ends_a_conversion(
    int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the main thread takes one of `threading`: else whoever needs it would wait for ever."""
    monkeypatch.setattr(convert, "BATCH", 1)
    enter = threading.Condition.__enter__
    seen = 0

    def __enter__(self: threading.Condition) -> bool:
        nonlocal seen
        taken = enter(self)
        if threading.get_ident() == threading.main_thread().ident:
            seen += 1
            if seen == at:
                signal.raise_signal(signal.SIGINT)
        return taken

    monkeypatch.setattr(threading.Condition, "__enter__", __enter__)
    stopped = 0
    for at in range(1, 40, 2):
        seen = 0
        catch_signals()
        done = call("pack", int4, "--layout", "gptq", "-o", tmp_path / "out", "--overwrite", code=None)
        assert done.exit_code in (0, 130)
        stopped += done.exit_code == 130
        assert done.exit_code == 0 or "run the same command again" in done.stderr
        assert done.exit_code == 0 or not list(tmp_path.iterdir()) or stopped < at
    assert stopped > 5
