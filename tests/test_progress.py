"""Progress stays off stdout, draws on terminals only, and hides no warning."""

from __future__ import annotations

import io
import sys

import pytest

from quantkit.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_is_drawn_when_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(Progress().bar(range(3), "work")) == [0, 1, 2]
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_a_short_wait_draws_nothing_on_a_terminal_either(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    list(Progress().bar(range(3), "work"))
    assert "work" not in terminal.getvalue()


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
def test_quiet_never_hides_a_warning(
    quiet: bool, verbose: bool, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(quiet, verbose)
    progress.detail("d")
    progress.note("n")
    progress.warn("w")
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == expected


def test_quiet_draws_no_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = Progress(quiet=True).bar(iter("ab"), "work", total=2)
    assert list(bar) == ["a", "b"] and terminal.getvalue() == ""
