"""A shell completes commands, options, choices, conversions and files, and the scripts ask in the right way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantkit.cli.commands import quantkit
from quantkit.core.formats import FORMATS
from quantkit.layouts import LAYOUTS
from tests.command_line import ROOT, call


def completed(words: str, incomplete: str) -> list[str]:
    """Complete a word as the script for fish asks: `incomplete` is the last of `words`."""
    env = {"_QUANTKIT_COMPLETE": "fish_complete", "COMP_WORDS": f"quantkit {words}", "COMP_CWORD": incomplete}
    result = CliRunner().invoke(quantkit, [], prog_name="quantkit", env=env)
    assert result.exit_code == 0 and result.stderr == ""
    return [line.split("\t")[0] for line in result.stdout.splitlines()]


def test_choices_are_completed() -> None:
    assert completed("quantize m --layout ", "") == [f"plain,{name}" for name in LAYOUTS]
    assert completed("pack c --layout mar", "mar") == ["plain,marlin", "plain,marlin24", "plain,marlin24-ct"]
    assert completed("plan m --format ", "") == [f"plain,{name}" for name in FORMATS]


def test_commands_options_and_conversions_are_completed() -> None:
    assert completed("pr", "pr") == ["plain,prune"]
    assert completed("eval p", "p") == ["plain,ppl"]
    assert completed("quantize m --over", "--over") == ["plain,--override", "plain,--overwrite"]
    assert completed("quantize m --set gptq.re", "gptq.re") == ["plain,gptq.refit="]
    assert completed("quantize m --set clip=", "clip=") == ["plain,clip=", "plain,clip=none", "plain,clip=search"]
    assert completed("convert awq-to-mar", "awq-to-mar") == [
        "plain,awq-to-marlin",
        "plain,awq-to-marlin24",
        "plain,awq-to-marlin24-ct",
    ]
    assert len(completed("convert ", "")) == len(LAYOUTS) * (len(LAYOUTS) - 1)
    assert completed("completion ", "") == ["plain,bash", "plain,zsh", "plain,fish"]


def test_folders_and_files_are_completed_by_the_shell() -> None:
    assert completed("quantize ./mod", "./mod") == ["dir,./mod"]
    assert completed("verify ./mod", "./mod") == ["file,./mod"]
    assert completed("quantize m --calib wiki", "wiki") == ["plain,wikitext2", "file,wiki"]
    assert completed("compare m --recipes ./my", "./my") == ["file,./my"]


def test_zsh_asks_with_the_index_of_the_word() -> None:
    env = {"_QUANTKIT_COMPLETE": "zsh_complete", "COMP_WORDS": "quantkit plan m --format fp6", "COMP_CWORD": "4"}
    result = CliRunner().invoke(quantkit, [], prog_name="quantkit", env=env)
    assert result.stdout.split("\n")[:6] == ["plain", "fp6", "_", "plain", "fp6-e2m3", "_"]


def test_the_scripts_name_quantkit_and_its_variable() -> None:
    for shell, line in (("bash", "complete -o"), ("zsh", "#compdef quantkit"), ("fish", "complete --no-files")):
        script = call("completion", shell).stdout
        assert line in script and f"_QUANTKIT_COMPLETE={shell}_complete" in script and "quantkit" in script


def test_the_script_completes_in_bash(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    (tmp_path / "quantkit").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m quantkit "$@"\n')
    (tmp_path / "quantkit").chmod(0o755)
    program = """
eval "$(quantkit completion bash)"
COMP_WORDS=(quantkit pack model --layout tc) COMP_CWORD=4
_quantkit_completion quantkit
echo "${COMPREPLY[@]}"
"""
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([bash, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "tcfpx\n", done.stderr


def test_completion_imports_no_torch() -> None:
    env = {**os.environ, "_QUANTKIT_COMPLETE": "bash_complete", "COMP_WORDS": "quantkit convert ", "COMP_CWORD": "2"}
    timed = [sys.executable, "-X", "importtime", "-m", "quantkit"]
    done = subprocess.run(timed, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "plain,gptq-to-marlin" in done.stdout.splitlines()
    assert "click" in imported and not {"torch", "numpy", "transformers"} & imported
