"""Run the commands of docs/tutorial.md in order and compare their outputs with the page.

Times, memory and free space are not compared. Other decimal fractions may differ by 5 %, since devices and library
versions round differently. `python -m tests.properties.test_tutorial` writes a run's outputs into the page and README.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from quantkit.cli.commands import quantkit

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/tutorial.md"
#: A block of shell commands with their output, or a Python program and the block of its output.
BLOCKS = re.compile(r"```console\n(.*?)```|```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
#: Where the page says that its reader works.
HOME = "/home/you/quantkit"
VOLATILE = re.compile(
    r"^(time|memory|peak memory|disk free) .*|(?<= tokens) in [\d.]+ s, [\d.]+ a second", re.MULTILINE
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


def python(program: str) -> str:
    """Run a program and return what it prints on stdout."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, PAGE.name, "exec"), {})
    return printed.getvalue()


def steps(block: re.Match[str]) -> list[tuple[str, list[str]]]:
    """Split a block into commands and the output lines below each; a Python program is one command."""
    if block[1] is None:
        return [(block[2], block[3].splitlines())]
    commands = re.split(r"^\$ ", block[1], flags=re.MULTILINE)[1:]
    return [(command, shown) for command, *shown in (text.rstrip("\n").splitlines() for text in commands)]


def output(block: re.Match[str], command: str, shown: list[str]) -> list[str]:
    """Run a command and return its output lines, shortened by `...` where the page shortens them."""
    printed = shell(command) if block[1] is not None else python(command)
    lines = [line.rstrip() for line in printed.replace(os.getcwd(), HOME).splitlines() if line.strip()]
    if "..." not in shown:
        return lines
    head = shown.index("...")
    tail = len(lines) - (len(shown) - head - 1)
    return [*lines[:head], "...", *lines[tail:]]


def agree(lines: list[str], shown: list[str]) -> bool:
    """Return True if the two differ in nothing but volatile figures and the last digits of fractions."""
    printed, expected = (VOLATILE.sub(r"\1", "\n".join(text)) for text in (lines, shown))
    if FRACTION.sub("#", printed) != FRACTION.sub("#", expected):
        return False
    pairs = zip(FRACTION.findall(printed), FRACTION.findall(expected), strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=0.05) for a, b in pairs)


def prepare(folder: Path) -> None:
    """Give `folder` what the page's reader has in a clone: the licence's text and the packaged model."""
    (folder / "LICENSE").symlink_to(ROOT / "LICENSE")
    (folder / "quantkit").mkdir()
    (folder / "quantkit/demo_model").symlink_to(ROOT / "quantkit/demo_model")


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)


def test_every_output_of_the_tutorial_is_real(clone: None) -> None:
    pytest.importorskip("compressed_tensors")
    if torch.cuda.is_available():
        pytest.skip("the page shows a machine without a GPU")
    blocks = list(BLOCKS.finditer(PAGE.read_text(encoding="utf-8")))
    assert len(blocks) > 5
    for block in blocks:
        for command, shown in steps(block):
            lines = output(block, command, shown)
            assert agree(lines, shown), f"{command}\n" + "\n".join(lines)


def test_the_readme_shows_outputs_of_the_tutorial() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = [step for block in BLOCKS.finditer(readme) for step in steps(block)]
    tested = [step for block in BLOCKS.finditer(PAGE.read_text(encoding="utf-8")) for step in steps(block)]
    assert shown and all(step in tested for step in shown)


def renew() -> None:
    """Write the outputs of a run into the tutorial, and from there into README."""
    readme = ROOT / "README.md"
    seen: dict[str, list[str]] = {}

    def renewed(block: re.Match[str]) -> str:
        for command, shown in steps(block):
            if command not in seen:
                seen[command] = output(block, command, shown)
        if block[1] is None:
            return f"```python\n{block[2]}```\n\n```text\n" + "\n".join(seen[block[2]]) + "\n```"
        return "```console\n" + "".join("\n".join([f"$ {c}", *seen[c]]) + "\n" for c, _ in steps(block)) + "```"

    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        os.chdir(folder)
        for page in (PAGE, readme):
            page.write_text(BLOCKS.sub(renewed, page.read_text(encoding="utf-8")), encoding="utf-8")
        os.chdir(ROOT)


if __name__ == "__main__":
    renew()
