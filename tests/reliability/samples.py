"""The models, texts and folders that families attack; the same bytes on every call."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from quantkit.checkpoint.report import VOLATILE, load
from tests.promises.model import TEXT, write_model
from tests.reliability.forks import Ended, command, run


def model(folder: Path, blocks: int = 2, **changes: object) -> Path:
    """Write a Llama of hidden size 128 with `blocks` blocks, in two shards."""
    return write_model(folder, num_hidden_layers=blocks, **changes)


def text(path: Path) -> Path:
    """Write a calibration text."""
    path.write_text(TEXT)
    return path


#: A short calibration without the search of scales, which is half of such a run and writes nothing.
SHORT = ("--samples", 4, "--max-length", 64, "--set", "clip=none", "-q")


def calibrated(source: Path, words: Path, out: Path | str, *options: object) -> tuple[object, ...]:
    """Return the arguments of a short GPTQ run."""
    return ("quantize", source, "--calib", words, *SHORT, "-o", out, *options)


def quantkit(folder: Path, *arguments: object, code: int | None = 0, limit: float = 120.0) -> Ended:
    """Run the command line in a fork, and ask for an exit code (None: any) and for no traceback."""
    ended = run(command(*arguments), folder, limit=limit)
    assert "Traceback" not in ended.stderr, ended.stderr
    assert code is None or ended.code == code, f"exit {ended.code}: {ended.stderr}"
    return ended


def digests(out: Path) -> dict[str, str]:
    """Hash every file of an output; the report and the card, which have times in them, are left out."""
    paths = [path for path in sorted(out.rglob("*")) if path.is_file()]
    return {
        path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
        if path.name not in ("quantkit_report.json", "README.md")
    }


def report(out: Path) -> Any:
    """Load the report of an output without what differs from run to run."""
    return _constant(load(out))


def _constant(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _constant(held) for key, held in value.items() if key not in VOLATILE}
    return [_constant(held) for held in value] if isinstance(value, list) else value


def one_line(ended: Ended) -> None:
    """Ask for an error of one line, as every refusal has."""
    lines: list[Any] = ended.stderr.strip().splitlines()
    assert ended.code != 0 and len(lines) == 1 and lines[0].startswith("Error: "), f"{ended.code}: {ended.stderr}"
