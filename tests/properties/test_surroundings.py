"""The threads, locale, umask, time zone and working folder of a process change no byte of its outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from quantkit.io.hashing import hash_of_file
from quantkit.reporting.report import REPORT
from tests.command_line import ROOT, calib

__all__ = ["calib"]

#: Runs the command line once for each list of arguments that it gets as JSON, after the number of threads.
SCRIPT = """
import json, os, sys, torch
from quantkit.cli import main
os.umask(int(sys.argv[1], 8))
for threads, arguments in json.loads(sys.argv[2]):
    torch.set_num_threads(threads)
    try:
        main(arguments)
    except SystemExit as ended:
        if ended.code:
            raise
"""
COMMANDS = {
    "searched": "quantize {model} --method rtn --clip search",
    "fp6": "quantize {model} --format fp6",
    "pruned": "prune {model} --method magnitude",
    "marlin": "pack {out}/searched --layout marlin",
    "gptq": "convert marlin-to-gptq {out}/marlin",
}
CALIBRATED = {"calibrated": "quantize {model} --calib {calib} --samples 8 --max-length 64"}


def run(umask: str, commands: list[tuple[int, list[str]]], folder: Path, **variables: str) -> None:
    """Run commands, each with a number of threads, in one process with a working folder of its own."""
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"} | variables
    command = [sys.executable, "-c", SCRIPT, umask, json.dumps(commands)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert not any(folder.iterdir())


def hashes(out: Path) -> dict[str, str]:
    """Return folder/file -> hash, without the report and the model card, which have times in them."""
    paths = [path for path in sorted(out.glob("*/*")) if path.name not in (REPORT, "README.md")]
    return {str(path.relative_to(out)): hash_of_file(path) for path in paths}


def test_surroundings_change_no_byte(tiny_llama: Path, calib: Path, tmp_path: Path) -> None:
    """The threads of calibrated runs are not compared: the solver has tests of its own, the forward may differ."""

    def line(folder: str, name: str, command: str) -> list[str]:
        out = tmp_path / folder
        out.mkdir(exist_ok=True)
        words = [word.format(model=tiny_llama, calib=calib, out=out) for word in command.split()]
        return [*words, "-o", str(out / name), "-q"]

    everything = (CALIBRATED | COMMANDS).items()
    plain = [(1, line("1", name, command)) for name, command in everything]
    run("022", plain, tmp_path / "here", LC_ALL="C", TZ="UTC")
    other = [(1, line("other", name, command)) for name, command in everything]
    other += [(n, line(str(n), name, command)) for n in (2, 4) for name, command in COMMANDS.items()]
    surroundings = {"LC_ALL": "tr_TR.UTF-8", "TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "7", "COLUMNS": "40"}
    run("077", other, tmp_path / "another folder", **surroundings)

    expected = hashes(tmp_path / "1")
    for name in CALIBRATED | COMMANDS:
        assert any(file.startswith(f"{name}/model-") for file in expected)
    assert hashes(tmp_path / "other") == expected
    uncalibrated = {file: digest for file, digest in expected.items() if not file.startswith("calibrated/")}
    assert hashes(tmp_path / "2") == uncalibrated
    assert hashes(tmp_path / "4") == uncalibrated
