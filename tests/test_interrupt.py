"""Signals and closed pipes: the exit code, one line, and a run that resumes to the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantkit.cli.exits import Stopped, catch_signals
from tests import command_line
from tests.command_line import ROOT, RTN, call
from tests.faults import faults, memory_path
from tests.test_pipeline import hashes

calib, tmp_path = command_line.calib, memory_path

GPTQ = ("--samples", 8, "--max-length", 128)
#: Runs the command line with a signal sent to itself when the third line goes into the journal.
KILLED = """
import os, signal, sys
from quantkit import storage
from quantkit.cli import main
lines = 0
def fault(operation, path):
    global lines
    lines += operation == "fsync" and path.name == storage.JOURNAL
    if lines == 3:
        os.kill(os.getpid(), int(sys.argv[1]))
storage.FAULT = fault
main(sys.argv[2:])
"""


@pytest.fixture(scope="module")
def uninterrupted(small_llama: Path, calib: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("whole") / "out"
    call("quantize", small_llama, "-o", out, "--calib", calib, *GPTQ, "-q")
    return hashes(out)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_in_a_real_process_leaves_a_run_that_resumes(
    number: signal.Signals, code: int, small_llama: Path, calib: Path, tmp_path: Path, uninterrupted: dict[str, str]
) -> None:
    out = tmp_path / "out"
    args = [str(arg) for arg in ("quantize", small_llama, "-o", out, "--calib", calib, *GPTQ)]
    command = [sys.executable, "-c", KILLED, str(int(number)), *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert done.stdout == "" and "--resume" in done.stderr and "Traceback" not in done.stderr
    assert not out.exists() and len(list(tmp_path.glob("out.partial-*"))) == 1
    assert "--resume" in call(*args, "-q", code=1).stderr
    call(*args, "--resume", "-q")
    assert hashes(out) == uninterrupted
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.fixture
def handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever started the tests with nohup ignores it
    catch_signals()
    yield
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


@pytest.mark.usefixtures("handlers")
def test_stopping_is_an_interruption_to_whatever_cleans_up() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        signal.raise_signal(signal.SIGTERM)
    assert caught.type is Stopped


def test_a_reader_that_leaves_early_is_no_error() -> None:
    """Also: no HOME, an ASCII locale, and `python -m quantkit`."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
    command = [sys.executable, "-m", "quantkit", "convert", "--list"]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
