"""`generate` prints as it writes, and has one object of JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.command_line import call
from tests.reliability.forks import command, start, wait

FEW = ("--max-new-tokens", 4, "--device", "cpu", "-q")


def test_the_stream_is_the_prompt_and_the_text(tiny_llama: Path) -> None:
    found = json.loads(call("generate", tiny_llama, "abc", *FEW, "--json").stdout)
    assert call("generate", tiny_llama, "abc", *FEW).stdout == f"abc{found['text']}\n"


def test_an_answer_is_printed_without_its_prompt(templated: Path) -> None:
    found = json.loads(call("generate", templated, "one", "--chat", *FEW, "--json").stdout)
    assert found["prompt"] == "one"
    assert call("generate", templated, "one", "--chat", *FEW).stdout == f"{found['text']}\n"


def test_a_reader_that_has_seen_enough_ends_the_command(tiny_llama: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()

    def into_the_pipe() -> int | None:
        os.close(reading)
        os.dup2(writing, 1)
        sys.stdout = os.fdopen(1, "w", closefd=False)  # the one at hand is that of a file, which it seeks in
        return command("generate", tiny_llama, "abc", "--max-new-tokens", 100, "-q", "--device", "cpu")()

    process = start(into_the_pipe, tmp_path)
    os.close(writing)
    seen = os.read(reading, 3)
    os.close(reading)
    ended = wait(process, tmp_path)
    assert (seen, ended.code, ended.stderr) == (b"abc", 0, "")


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["{model}"], "Missing argument 'PROMPT'."),
        (["{model}", "abc", "--seed", "1"], "add --temperature 0.7, or drop --seed and --top-p"),
        (["{model}", "abc", "--top-p", "0"], "0.0 is not in the range 0<x<=1."),
        (["{model}", "ab\udcff"], "the text is not UTF-8 (character 2): convert it first"),
        (["{model}", "abc", "--chat"], "has no chat template: use quantkit generate without --chat"),
    ],
)
def test_wrong_usage_of_generate(args: list[str], error: str, tiny_llama: Path) -> None:
    result = call("generate", *(arg.format(model=tiny_llama) for arg in args), code=2)
    assert result.stdout == "" and result.stderr.rstrip().endswith(error)
