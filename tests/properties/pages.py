"""Run the commands and programs of a page, and compare what they print."""

from __future__ import annotations

import code
import math
import re
import shlex
import subprocess
from pathlib import Path
from typing import NoReturn

from click.testing import CliRunner

from quantkit.cli.commands import quantkit

ROOT = Path(__file__).resolve().parents[2]
#: What differs from run to run, and tails that hang on a few tokens, which differ from processor to processor.
VOLATILE = re.compile(
    r"^(time|memory|peak memory|disk free) .*|(?<= tokens) in [\d.]+ s, [\d.]+ a second|(?<=, )p99(?:\.9)? [\d.]+",
    re.MULTILINE,
)
FRACTION = re.compile(r"-?\d+\.\d+")


def shell(line: str) -> str:
    """Run one line of a console block: quantkit's own in this process, any other in a shell."""
    words = shlex.split(line)
    if words[0] != "quantkit":
        return subprocess.run(line, shell=True, check=True, capture_output=True, text=True).stdout
    result = CliRunner().invoke(quantkit, words[1:])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


class Typist(code.InteractiveConsole):
    """A Python prompt into which programs are typed line by line; an error is raised."""

    def showtraceback(self) -> NoReturn:
        raise

    def showsyntaxerror(self, *_: object, **__: object) -> NoReturn:
        raise

    def type(self, program: str) -> None:
        """Type a program. An empty line ends a block, at the prompt as on a page."""
        waits = [self.push(line) for line in [*program.splitlines(), ""]][-1]
        assert not waits, f"the prompt waits for more of:\n{program}"


def prepare(folder: Path) -> None:
    """Give `folder` what a page's reader has in a clone: the licence's text and the packaged model."""
    (folder / "LICENSE").symlink_to(ROOT / "LICENSE")
    (folder / "quantkit").mkdir()
    (folder / "quantkit/demo_model").symlink_to(ROOT / "quantkit/demo_model")


def agree(lines: list[str], shown: list[str]) -> bool:
    """Return True if the two differ in nothing but volatile figures and the last digits of fractions."""
    printed, expected = (VOLATILE.sub(r"\1", "\n".join(text)) for text in (lines, shown))
    if FRACTION.sub("#", printed) != FRACTION.sub("#", expected):
        return False
    pairs = zip(FRACTION.findall(printed), FRACTION.findall(expected), strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=0.05) for a, b in pairs)
