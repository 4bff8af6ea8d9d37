"""Signals and closed pipes: the exit code, one line, and a run that resumes to the same bytes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quantkit.cli.exits import Stopped, catch_signals
from quantkit.pipeline import convert, quantize
from tests import command_line
from tests.command_line import ROOT, RTN, call
from tests.faults import faults, memory_path
from tests.pipeline.test_quantize import hashes

calib, int4, tmp_path = command_line.calib, command_line.int4, memory_path

GPTQ = ("--samples", 8, "--max-length", 128)
#: Runs the command line with a signal sent to itself when the third line goes into the journal. It goes through `exec`,
#: as it does where it meets an import that makes a named tuple: `python -m` would end with another code then.
KILLED = """
import os, signal, sys
from quantkit.io import files
from quantkit.cli import main
lines = 0
def fault(operation, path):
    global lines
    lines += operation == "fsync" and path.name == files.JOURNAL
    if lines == 3:
        exec("os.kill(os.getpid(), int(sys.argv[1]))")
files.FAULT = fault
main(sys.argv[2:])
"""


@pytest.fixture(scope="module")
def uninterrupted(small_llama: Path, calib: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("whole") / "out"
    call("quantize", small_llama, "-o", out, "--calib", calib, *GPTQ, "-q")
    return hashes(out)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_in_a_real_process_leaves_a_run_that_resumes(
    number: signal.Signals,
    code: int,
    small_llama: Path,
    calib: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    uninterrupted: dict[str, str],
) -> None:
    module = tmp_path_factory.mktemp("module") / "killed.py"
    module.write_text(KILLED)
    environment = os.environ | {"PYTHONPATH": f"{module.parent}{os.pathsep}{ROOT}"}
    out = tmp_path / "out"
    args = [str(arg) for arg in ("quantize", small_llama, "-o", out, "--calib", calib, *GPTQ)]
    command = [sys.executable, "-m", module.stem, str(int(number)), *args]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert done.stdout == "" and "--resume" in done.stderr and "Traceback" not in done.stderr
    assert not out.exists() and len(list(tmp_path.glob("out.partial-*"))) == 1
    assert "--resume" in call(*args, "-q", code=1).stderr
    call(*args, "--resume", "-q")
    assert hashes(out) == uninterrupted
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.fixture
def handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever started the tests with nohup ignores it
    catch_signals()
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 75), (signal.SIGINT, 130)])
def test_a_signal_before_anything_is_written_leaves_nothing(
    number: signal.Signals, code: int, small_llama: Path, tmp_path: Path
) -> None:
    with faults(lambda operation, path: signal.raise_signal(number) if operation == "mkdir" else None):
        result = call("quantize", small_llama, "-o", tmp_path / "out", *RTN, code=code)
    assert "run the same command again" in result.stderr
    assert not list(tmp_path.iterdir())


ENDING = """
import os, signal, sys
from quantkit.cli import main

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=int(sys.argv[1])):  # as the interpreter ends
        kill(pid, number)

late = Late()
main(["convert", "--list"])
"""


EARLY = """
import os, signal, sys
import click
from quantkit.cli import main

make = click.Group.make_context

def make_context(*args, **options):
    os.kill(os.getpid(), int(sys.argv[1]))
    return make(*args, **options)

click.Group.make_context = make_context
main(["convert", "--list"])
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_before_a_command_begins_has_its_exit_code(number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-c", EARLY, str(int(number))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert "nothing was written" in done.stderr and "Traceback" not in done.stderr and "Aborted" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGALRM])
def test_a_signal_behind_the_end_does_not_change_the_exit_code(number: signal.Signals) -> None:
    command = [sys.executable, "-c", ENDING, str(int(number))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and "lossless" in done.stdout


@pytest.mark.usefixtures("handlers")
def test_stopping_is_an_interruption_to_whatever_cleans_up() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        signal.raise_signal(signal.SIGTERM)
    assert caught.type is Stopped


class Lock:
    """A lock at whose taking or giving back a signal comes, as `threading` takes those that other threads wait for."""

    def __init__(self, when: str) -> None:
        self.when, self.real = when, threading.Lock()

    def __enter__(self) -> None:
        self.real.acquire()
        if self.when == "taken":
            signal.raise_signal(signal.SIGINT)

    def __exit__(self, *_: object) -> None:
        if self.when == "given back":
            signal.raise_signal(signal.SIGINT)
        self.real.release()


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("when", ["taken", "given back"])
def test_a_signal_leaves_no_lock_taken(when: str) -> None:
    """Else a thread that needs it, and whoever waits for that thread, would wait for ever."""
    lock = Lock(when)
    with pytest.raises(KeyboardInterrupt):
        with lock:
            pass
        time.sleep(5)
    assert not lock.real.locked()


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_an_object_dies_is_not_lost(number: signal.Signals) -> None:
    """Python drops what a finalizer raises."""

    class Memory:
        pass

    memory = Memory()
    weakref.finalize(memory, lambda: signal.raise_signal(number))
    with pytest.raises(KeyboardInterrupt):
        del memory
        time.sleep(5)


@pytest.mark.usefixtures("handlers")
def test_a_signal_while_a_lock_of_threads_is_taken_ends_a_conversion(
    int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any of the first times that the main thread takes one of `threading` there."""
    monkeypatch.setattr(convert, "TOGETHER", 1)
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
    for at in range(1, 40):
        seen = 0
        catch_signals()
        shown = call("pack", int4, "--layout", "gptq", "-o", tmp_path / "out", code=130).stderr
        assert "run the same command again" in shown and not list(tmp_path.iterdir())
        assert seen >= at


@pytest.mark.usefixtures("handlers")
@pytest.mark.filterwarnings("error")  # an exception that Python drops is a warning
def test_a_signal_while_garbage_is_collected_ends_a_conversion(
    int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library may have asked to be called then."""
    finish, collected = quantize.finish, []

    def collecting(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and not collected:
            collected.append(info)
            signal.raise_signal(signal.SIGINT)

    def collect(*args: Any, **options: Any) -> Any:
        gc.callbacks.append(collecting)
        gc.collect()
        time.sleep(1)
        return finish(*args, **options)

    monkeypatch.setattr(quantize, "finish", collect)
    try:
        catch_signals()
        call("pack", int4, "--layout", "gptq", "-o", tmp_path / "out", code=130)
    finally:
        gc.callbacks.remove(collecting)
    assert collected and not list(tmp_path.iterdir())


def test_a_reader_that_leaves_early_is_no_error() -> None:
    """Also: no HOME, an ASCII locale, and `python -m quantkit`."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
    command = [sys.executable, "-m", "quantkit", "convert", "--list"]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
