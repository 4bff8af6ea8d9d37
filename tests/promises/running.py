"""Running commands in a folder of their own, and digests of what they write."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
from click.testing import CliRunner, Result
from safetensors import safe_open

import quantkit

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FROZEN, HELP, ERROR_TEXTS = HERE / "frozen.json", HERE / "help.txt", HERE / "errors.txt"
WIDTH = 100  # columns of help texts
REPORT = "quantkit_report.json"
#: Entries of a report that differ from run to run or from machine to machine.
VOLATILE = {"environment", "phases", "peak_memory", "seconds", "opened_by", "not_opened_by", "not_tried"}


def group() -> click.Group:
    """Return the click group behind `quantkit.cli.main`: the only place that knows where it is."""
    from quantkit.cli import commands

    return commands.quantkit


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


class Work:
    """A folder in which commands run, so that every path in them is relative and the same on every machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def run(self, line: str | list[str]) -> Result:
        """Run a command line without the word `quantkit`; an exception that is no exit is raised."""
        args = line.split() if isinstance(line, str) else line
        with inside(self.folder):
            result = CliRunner().invoke(group(), args, prog_name="quantkit", terminal_width=WIDTH)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def done(self, line: str) -> Result:
        """Run a command line that must succeed."""
        result = self.run(line)
        assert result.exit_code == 0, f"quantkit {line}\n{result.output}"
        return result

    def make(self, name: str, line: str) -> None:
        """Run `line` if the folder `name` that it writes is not there yet."""
        if not (self / name).exists():
            self.done(line)

    def gone(self, name: str) -> None:
        for path in self.folder.glob(f"{name}*"):
            shutil.rmtree(path)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digests(folder: Path, source: Path) -> dict[str, Any]:
    """Return what must stay of an output folder.

    `files` has the SHA-256 of each file, without versions, times and machine, or that it is a copy of one in `source`.
    `tensors` is a digest of names, dtypes, shapes and bytes, whatever file and place they are in. `headers` is the same
    without the bytes.
    """
    tensors, headers = hashlib.sha256(), hashlib.sha256()
    for name, tensor in sorted(all_tensors(folder).items()):
        said = f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode()
        headers.update(said)
        tensors.update(said + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name, data = path.relative_to(folder).as_posix(), constant(path)
        is_copy = (source / name).is_file() and (source / name).read_bytes() == data
        files[name] = "a copy" if is_copy else sha256(data)
    return {"files": files, "tensors": tensors.hexdigest(), "headers": headers.hexdigest()}


def weights_alone(found: dict[str, Any]) -> dict[str, Any]:
    """Return the digests of a calibrated output, without those of the files whose bytes depend on the arithmetic.

    `tensors` has the weights. The metadata of their files are those of other outputs, whose files are compared.
    """
    endings = (".md", REPORT, ".safetensors")
    return found | {"files": {name: "any" if name.endswith(endings) else it for name, it in found["files"].items()}}


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def constant(path: Path) -> bytes:
    """Return the bytes of a file with what may change between versions, runs and machines taken out."""
    data = path.read_bytes()
    if path.name == REPORT:
        return json.dumps(_constant(json.loads(data)), indent=1).encode()
    if path.name == "README.md":
        text = re.sub(r"\| loads in \|.*", "| loads in | ... |", data.decode())
        return re.sub(r"\d+\.\d[\d.]*(e-\d+)?", "#", text).encode()
    if path.suffix == ".json":
        return data.replace(f'"version": "{quantkit.__version__}"'.encode(), b'"version": "VERSION"')
    return data


def _constant(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: "..." if name in VOLATILE else _constant(held, name or key) for name, held in value.items()}
    if isinstance(value, list):
        return [_constant(held) for held in value]
    if isinstance(value, float):
        return "a float"
    if isinstance(value, str):  # hashes of files that hold a version
        return "VERSION" if value == quantkit.__version__ else re.sub("(?<=^blake3:).*", "...", value)
    return value


def key_paths(value: Any, path: str = "") -> set[str]:
    """Return a line for each key of a JSON value: where it is and its type; members of lists and files are one."""
    if isinstance(value, dict):
        parts = [
            (f"{path}.{'*' if set(name) & set('./ ') else name}".lstrip("."), held) for name, held in value.items()
        ]
        return {f"{path}: object"} - {": object"} | {line for name, held in parts for line in key_paths(held, name)}
    if isinstance(value, list):
        return {f"{path}: list"} | {line for held in value for line in key_paths(held, f"{path}[]")}
    return {f"{path}: {type(value).__name__}"}


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """Return (found, expected) for each key whose values differ, deeper where both are mappings."""
    apart: dict[str, Any] = {}
    for key in [*expected, *(key for key in found if key not in expected)]:
        one, other = found.get(key), expected.get(key)
        if one != other:
            both = isinstance(one, dict) and isinstance(other, dict)
            apart[key] = differences(one, other) if both else (one, other)
    return apart


def frozen() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FROZEN.read_text())
    return found


def write_blocks(path: Path, blocks: dict[str, str]) -> None:
    """Write commands and their texts for people to read."""
    path.write_text("\n".join(f"$ quantkit {command}\n{text}\n" for command, text in blocks.items()))


def read_blocks(path: Path) -> dict[str, str]:
    parts = path.read_text().removeprefix("$ quantkit ").split("\n$ quantkit ")
    return {command: text.rstrip("\n") for command, text in (part.split("\n", 1) for part in parts)}
