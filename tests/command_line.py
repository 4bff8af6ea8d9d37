"""Run the command line in this process, and make the folders that its tests need."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from quantkit.cli.commands import quantkit

#: Without the search of scales, which takes a third of such a run: tests/algorithms and tests/promises have it.
RTN = ("--method", "rtn", "--set", "clip=none")
ROOT = Path(__file__).resolve().parents[1]


def call(*args: object, code: int | None = 0) -> Result:
    """Run the command line in this process and ask for an exit code (None: any); other exceptions fail the test."""
    result = CliRunner().invoke(quantkit, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert code is None or result.exit_code == code, result.output
    return result


def refused(*args: object, code: int = 1, lines: int = 1, out: Path | None = None) -> str:
    """Return the error of a command that must fail: `lines` lines, nothing on stdout, no `out` and no part of it."""
    result = call(*args, *(("-o", out) if out else ()), "-q", code=code)
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ") and len(result.stderr.splitlines()) == lines, result.stderr
    if out is not None:
        assert not list(out.parent.glob(f"{out.name}*"))
    return result.stderr


@pytest.fixture
def copy(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
