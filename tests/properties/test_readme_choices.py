"""Run every command of README's table of formats on a small model, and compare the programs that the row names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from quantkit.checkpoint.report import load
from quantkit.cli.commands import quantkit

ROOT = Path(__file__).resolve().parents[2]
#: Programs that open folders. A row's second column says where its output runs.
PROGRAMS = ("vLLM", "SGLang", "GPTQModel", "transformers", "quantkit.load")
THRIFTY = ("--samples", "8", "--max-length", "32", "--set", "clip=none", "--set", "gptq.descent=0")


class Choice(NamedTuple):
    where: str
    words: list[str]


def choices() -> list[Choice]:
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Which format")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| `quantkit ([^|]+)` \|$", section, re.MULTILINE)
    assert 8 <= len(rows) <= 10, "one for each need"
    return [Choice(where, shlex.split(command)) for where, command in rows]


def run(words: list[str], **places: Path) -> Path:
    """Run a command with folders in place of the words in capitals; return OUT."""
    result = CliRunner().invoke(quantkit, [str(places.get(word, word)) for word in words])
    assert result.exit_code == 0, result.output
    return places["OUT"]


@pytest.mark.parametrize("choice", choices(), ids=lambda choice: " ".join(choice.words))
def test_each_row_of_the_table_gives_what_its_programs_open(
    choice: Choice, small_llama: Path, calib: Path, tmp_path: Path
) -> None:
    text = ("--calib", str(calib), *THRIFTY)
    places = {"MODEL": small_llama, "OUT": tmp_path / "out"}
    words = choice.words
    if words[0] == "quantize":
        tuned = {"int4-best", "int4-marlin24"} & {*words}
        steps = ("--set", "tune=2") if tuned else ()  # the recipes' own numbers take a minute
        words = [*words, *text, *steps, "-q"]
    else:
        source = next(other.words for other in choices() if other.words[-1] == "gptq")
        places["FOLDER"] = run([*source, *text, "-q"], **{**places, "OUT": tmp_path / "gptq"})
    readers = load(run(words, **places))["readers"]
    named = [program for program in PROGRAMS if program in choice.where]
    assert named
    for program in named:
        assert any(reader.startswith(program) and "up to" not in reader for reader in readers), (program, readers)
