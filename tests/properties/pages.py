"""Run the commands of a page and compare what they print."""

from __future__ import annotations

import math
import re
import shlex
import subprocess

from click.testing import CliRunner

from quantkit.cli.commands import quantkit

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


def agree(lines: list[str], shown: list[str]) -> bool:
    """Return True if the two differ in nothing but volatile figures and the last digits of fractions."""
    printed, expected = (VOLATILE.sub(r"\1", "\n".join(text)) for text in (lines, shown))
    if FRACTION.sub("#", printed) != FRACTION.sub("#", expected):
        return False
    pairs = zip(FRACTION.findall(printed), FRACTION.findall(expected), strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=0.05) for a, b in pairs)
