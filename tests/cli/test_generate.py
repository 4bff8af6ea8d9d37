"""`generate` prints as it writes, converses on a pipe and on a terminal, and has one object of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantkit.cli.commands import quantkit
from tests.command_line import ROOT, call
from tests.reliability.forks import command, run

FEW = ("--max-new-tokens", 4, "--device", "cpu", "-q")


def converse(model: Path, lines: str, *more: str) -> str:
    args = ["generate", str(model), "--chat", *map(str, FEW), *more]
    result = CliRunner().invoke(quantkit, args, input=lines)
    assert result.exit_code == 0 and result.stderr == "", result.output
    return result.stdout


def test_the_stream_is_the_prompt_and_the_text(tiny_llama: Path) -> None:
    found = json.loads(call("generate", tiny_llama, "abc", *FEW, "--json").stdout)
    assert call("generate", tiny_llama, "abc", *FEW).stdout == f"abc{found['text']}\n"


def test_each_line_of_a_pipe_is_a_turn(templated: Path) -> None:
    turns = json.loads(converse(templated, "one\n\n  two\n", "--json"))["turns"]
    assert [turn["prompt"] for turn in turns] == ["one", "two"]
    assert converse(templated, "one\n\n  two") == "".join(f"{turn['text']}\n" for turn in turns)
    assert converse(templated, "") == ""
    assert call("generate", templated, "one", "--chat", *FEW).stdout == f"{turns[0]['text']}\n"


def test_a_terminal_is_asked_for_each_turn_until_its_end(templated: Path, tmp_path: Path) -> None:
    pty = pytest.importorskip("pty")
    leader, follower = pty.openpty()
    args = ["generate", templated, "--chat", *FEW]
    os.write(leader, b"one\ntwo\n\x04")

    def on_the_terminal() -> int | None:
        os.dup2(follower, 0)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(i, "rw"[i > 0], closefd=False) for i in range(3))
        return command(*args)()

    process = run(on_the_terminal, tmp_path)
    os.close(leader)
    os.close(follower)
    turns = json.loads(converse(templated, "one\ntwo\n", "--json"))["turns"]
    assert (process.code, process.stderr) == (0, "> > > \n")
    assert process.stdout == "".join(f"{turn['text']}\n" for turn in turns)


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
        (["{model}", "abc", "--system", "be brief"], "--system begins a conversation: add --chat"),
        (["{model}", "abc", "--seed", "1"], "add --temperature 0.7, or drop --seed and --top-p"),
        (["{model}", "abc", "--top-p", "0"], "0.0 is not in the range 0<x<=1."),
        (["{model}", "ab\udcff"], "the text is not UTF-8 (character 2): convert it first"),
        (["{model}", "--chat"], "has no chat template: use quantkit generate without --chat"),
    ],
)
def test_wrong_usage_of_generate(args: list[str], error: str, tiny_llama: Path) -> None:
    result = call("generate", *(arg.format(model=tiny_llama) for arg in args), code=2)
    assert result.stdout == "" and result.stderr.rstrip().endswith(error)
