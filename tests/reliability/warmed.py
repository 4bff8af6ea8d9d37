"""Run what families run, once: each family is a fork of a process that has imported this, and imports nothing more."""

from __future__ import annotations

import io
import signal
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import torch

from tests.reliability import samples
from tests.reliability.forks import SIGNALS, command


def warm(folder: Path) -> None:
    source, words, int4 = samples.model(folder / "source", 1), samples.text(folder / "text.txt"), folder / "int4"
    few = ("--data", words, "--window", 64, "--tokens", 256)
    for line in (
        ("plan", source, "--method", "rtn"),
        ("quantize", source, "--method", "rtn", "-o", int4),
        samples.calibrated(source, words, folder / "calibrated"),
        samples.calibrated(source, words, folder / "fp6", "--format", "fp6"),
        ("prune", source, "--calib", words, *samples.FEW, "-o", folder / "pruned"),
        ("pack", int4, "--layout", "marlin", "-o", folder / "marlin"),
        ("verify", int4),
        ("inspect", int4),
        ("eval", "ppl", source, *few),
        ("generate", source, "Hi", "--chat", "--max-new-tokens", 2),
    ):
        try:
            command(*line, *(() if "-q" in line else ("-q",)))()
        except SystemExit as left:
            assert not left.code, line


torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as place, redirect_stdout(io.StringIO()):
    warm(Path(place))
for number in SIGNALS:
    signal.signal(number, signal.SIG_DFL)
