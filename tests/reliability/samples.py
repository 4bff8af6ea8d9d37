"""The models, texts and folders that families attack, the same bytes on every call, and how they are changed."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit.checkpoint.origin import checked
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import VOLATILE, load
from quantkit.errors import QuantkitError
from tests.promises.model import TEXT, write_model
from tests.reliability.forks import Ended, command, run


def model(folder: Path, blocks: int = 2, **changes: object) -> Path:
    """Write a Llama of hidden size 128 with `blocks` blocks, in two shards."""
    return write_model(folder, num_hidden_layers=blocks, **changes)


def text(path: Path) -> Path:
    """Write a calibration text."""
    path.write_text(TEXT)
    return path


#: A short calibration, and one without the search of scales and the descent, most of such a run, which write nothing.
FEW = ("--samples", 4, "--max-length", 64, "-q")
SHORT = (*FEW, "--set", "clip=none", "--set", "gptq.descent=0")


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


def one_line(ended: Ended, *says: str) -> None:
    """Ask for an error of one line, as every refusal has, with some words."""
    lines: list[Any] = ended.stderr.strip().splitlines()
    assert ended.code != 0 and len(lines) == 1 and lines[0].startswith("Error: "), f"{ended.code}: {ended.stderr}"
    assert all(words in lines[0] for words in says), f"not {says}: {lines[0]}"


def refused(work: Callable[[], object], words: str) -> None:
    """Ask for an error of one line with some words."""
    try:
        work()
    except QuantkitError as error:
        assert words in str(error) and "\n" not in str(error), str(error)
    else:
        raise AssertionError(f"accepted, expected: {words}")


def opened(folder: Path) -> None:
    """Open a checkpoint and compare each file with what is known of it."""
    with checked(Checkpoint(folder)):
        pass


def weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@contextmanager
def changed(path: Path, data: bytes) -> Iterator[None]:
    """Give a file other bytes in the block."""
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


#: The pieces of a JSON text that a mutant replaces, repeats, drops or exchanges: bytes, words, lists, entries.
PIECES = [
    re.compile(pattern, re.DOTALL)
    for pattern in (rb".", rb'"[^"]*"|[\w.+-]+|.', rb'"[^"]*"|\[[^\[\]]*\]|.', rb'"[^"]*": ?[\[{][^\[\]{}]*[\]}],?|.')
]


def mutated(data: bytes, rng: random.Random, odd: Sequence[bytes]) -> bytes:
    """Change pieces of a JSON text once to five times; those of `odd` replace others."""
    parts = rng.choice(PIECES).findall(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at, other, what = rng.randrange(len(parts)), rng.randrange(len(parts)), rng.randrange(5)
        if what < 2:
            parts[at] = rng.choice(odd)
        elif what == 2:
            parts[at:at] = parts[other : other + rng.randrange(1, 20)]
        elif what == 3:
            parts[at], parts[other] = parts[other], parts[at]
        else:
            del parts[at : at + rng.randrange(1, 9)]
            parts = parts or [b" "]
    return b"".join(parts)
