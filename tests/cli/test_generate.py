"""`generate` prints as it writes, and has one object of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import ROOT, call

FEW = ("--max-new-tokens", 4, "--device", "cpu", "-q")


def test_the_stream_is_the_prompt_and_the_text(tiny_llama: Path) -> None:
    found = json.loads(call("generate", tiny_llama, "abc", *FEW, "--json").stdout)
    assert call("generate", tiny_llama, "abc", *FEW).stdout == f"abc{found['text']}\n"


def test_an_answer_is_printed_without_its_prompt(templated: Path) -> None:
    found = json.loads(call("generate", templated, "one", "--chat", *FEW, "--json").stdout)
    assert found["prompt"] == "one"
    assert call("generate", templated, "one", "--chat", *FEW).stdout == f"{found['text']}\n"


def test_a_reader_that_has_seen_enough_ends_the_command(tiny_llama: Path) -> None:
    line = f"{sys.executable} -m quantkit generate {tiny_llama} abc --max-new-tokens 400 -q --device cpu"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line} | head -c 3"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout == "abc"


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
