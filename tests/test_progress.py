"""Progress stays off stdout, draws on terminals only, and hides no warning."""

from __future__ import annotations

import io
import os
import re
import struct
import subprocess
import sys
from contextlib import suppress
from unicodedata import east_asian_width

import pytest
import torch

from quantkit.progress import Clock, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "quiet"), [(io.StringIO, False), (Terminal, False), (Terminal, True)])
def test_a_short_wait_a_file_and_quiet_draw_nothing(
    stream: type[io.StringIO], quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stderr = stream()
    monkeypatch.setattr(sys, "stderr", stderr)
    assert list(Progress(quiet).bar("ab", "work")) == ["a", "b"]
    assert stderr.getvalue() == capsys.readouterr().out == ""


def test_a_long_wait_has_a_bar_with_an_eta(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = Progress().bar(4, "work")
    bar.start_t -= 10  # as if it had begun ten seconds ago
    bar.update(1)
    bar.refresh()
    bar.close()
    assert "work:  25%" in terminal.getvalue() and "<00:30" in terminal.getvalue()


@pytest.mark.parametrize(
    ("quiet", "verbose", "expected"),
    [(False, False, "n\nWarning: w\n"), (False, True, "d\nn\nWarning: w\n"), (True, True, "Warning: w\n")],
)
def test_quiet_never_hides_a_warning_and_a_note_is_printed_once(
    quiet: bool, verbose: bool, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(quiet, verbose)
    progress.detail("d")
    progress.note("n", "n")
    progress.note("n")
    progress.warn("w")
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == expected


#: A bar that began ten seconds ago, in a process whose stderr is a terminal.
BAR = """
import sys
from quantkit.progress import Progress
bar = Progress().bar(4, sys.argv[1])
bar.start_t -= 10
bar.update(1)
bar.refresh()
bar.close()
"""


def drawn(columns: int, rows: int, label: str, **variables: str) -> list[str]:
    """Draw a bar on a pseudo-terminal of a size; return what stood on its line, one string a drawing."""
    pty, fcntl, termios = (pytest.importorskip(name) for name in ("pty", "fcntl", "termios"))
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with os.fdopen(leader, "rb", buffering=0) as screen:
        process = subprocess.Popen(
            [sys.executable, "-c", BAR, label], stdout=subprocess.DEVNULL, stderr=follower, env={**env, **variables}
        )
        os.close(follower)
        data = b""
        with suppress(OSError):  # Linux reports the end of a pseudo-terminal so
            while part := screen.read(4096):
                data += part
    assert process.wait() == 0, data
    return [line for line in re.split(r"[\r\n]", data.decode()) if line.strip()]


def width(line: str) -> int:
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in line)


@pytest.mark.parametrize(
    ("size", "variables", "room"),
    [
        ((0, 0), {}, 80),
        ((0, 0), {"COLUMNS": "33"}, 33),
        ((120, 40), {"COLUMNS": "200"}, 120),
        ((10, 4), {}, 10),
        ((1, 1), {}, 2),
    ],
)
def test_a_bar_is_drawn_on_every_terminal_and_fits_it(
    size: tuple[int, int], variables: dict[str, str], room: int
) -> None:
    lines = drawn(*size, "a label of 漢字 and more", **variables)
    assert lines and lines[0].startswith("a label "[: room - 1])
    assert all(width(line) < room for line in lines)
    assert room < 80 or ("25%" in lines[0] and "<00:30" in lines[0] and "█" in lines[0])


class GpuEvent:
    """An event of a GPU that is at once where the clock below is; `waits` counts how often one was waited for."""

    now, waits = 0.0, 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.at = GpuEvent.now

    def synchronize(self) -> None:
        GpuEvent.waits += 1

    def elapsed_time(self, end: GpuEvent) -> float:
        return 1000 * (end.at - self.at)


def test_phases_of_a_gpu_are_told_apart_without_waiting_inside_of_the_outermost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", GpuEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    clock = Clock(torch.device("cuda"))
    with clock.phase("forward"):
        for _ in range(3):
            GpuEvent.now += 2
            with clock.phase("hessian"):
                GpuEvent.now += 0.5
    GpuEvent.now += 10  # claimed by no phase
    with clock.phase("solve"):
        GpuEvent.now += 1
    assert GpuEvent.waits == 2
    assert clock.take() == {"forward": 6.0, "hessian": 1.5, "solve": 1.0}
