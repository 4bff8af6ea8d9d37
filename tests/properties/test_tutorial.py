"""Run the commands of docs/tutorial.md in order and compare their outputs with the page.

Times, memory, free space and tails of few tokens are not compared. Other fractions may differ by 5 %, since devices and
libraries round differently. `python -m tests.properties.test_tutorial` writes a run's outputs into the page and README.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from pathlib import Path

import pytest
import torch

from tests.properties.pages import Typist, agree, prepare, shell

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/tutorial.md"
#: A block of shell commands with their output, or a Python program and the block of its output.
BLOCKS = re.compile(r"```console\n(.*?)```|```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
#: Where the page says that its reader works.
HOME = "/home/you/quantkit"


def python(program: str) -> str:
    """Run a program and return what it prints on stdout."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        Typist().type(program)
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
