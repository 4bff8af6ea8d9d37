"""The weight files of a folder: the division of tensors into files, the joining of small files, the
final names.

A run writes at least one file a commit, such as a block. In the end neighbours are joined into
files of at least LEAST_BYTES, and files are numbered `1 of N`. Each step is a line of the journal,
whose `replaced` files give way to its `files`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError, Option, Words
from quantkit.io import files
from quantkit.io.safetensors_files import (
    FileSize,
    SafetensorsWriter,
    TensorInfo,
    header_bytes,
    read_header,
    stated_digests,
)

#: The most bytes of tensors in one file, unless a single tensor has more.
SHARD_BYTES = 2 * 2**30
#: The fewest bytes of tensors in a file, where the model and SHARD_BYTES allow it.
LEAST_BYTES = 256 * 2**20


def committed_files(lines: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return name -> hash of the files that the lines of a journal leave, in the order of their
    tensors.
    """
    found: list[tuple[str, str]] = []
    for line in lines:
        replaced = line.get("replaced", [])
        first = [name for name, _ in found].index(replaced[0]) if replaced else len(found)
        found[first : first + len(replaced)] = line["files"].items()
    return dict(found)


def renamings(lines: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return old -> new name of the files that a journal says have another name now."""
    found: dict[str, str] = {}
    for line in lines:
        before, after = line.get("replaced", []), list(line["files"])
        found |= zip(before, after, strict=True) if len(before) == len(after) else ()
    return found


def groups(sizes: Sequence[int], most: int) -> list[range]:
    """Divide files of these `sizes`, in order, into those that are joined: of at least LEAST_BYTES,
    at most `most`.
    """
    found: list[range] = []
    first = total = 0
    for number, size in enumerate(sizes):
        if number > first and (total >= LEAST_BYTES or total + size > most):
            found.append(range(first, number))
            first, total = number, 0
        total += size
    if found and total < LEAST_BYTES and sum(sizes[i] for i in found[-1]) + total <= most:
        first = found.pop().start
    return [*found, range(first, len(sizes))] if sizes else []


def join(paths: Sequence[Path], into: Path) -> str:
    """Copy the tensors of several files into a new one, durably, and return its hash; one tensor is
    in memory.

    CheckpointError for a tensor whose digest differs from the digest in its file.
    """
    headers = [read_header(path) for path in paths]
    joined = SafetensorsWriter(
        into, header_bytes(name for tensors, _ in headers for name in tensors)
    )
    for path, (tensors, metadata) in zip(paths, headers, strict=True):
        stated = stated_digests(tensors, metadata)
        with files.open_regular(path) as file:
            for name, info in tensors.items():
                data = files.read_exactly(file, info.start, info.end - info.start, path)
                if joined.add(name, data.view(info.dtype).reshape(info.shape)) != stated.get(name):
                    raise changed(path)
    return joined.close()


def changed(path: Path) -> CheckpointError:
    """Make the error for a committed file that has changed."""
    return CheckpointError(
        "changed since it was written",
        Words("start over with", Option("overwrite", True)),
        subject=path,
    )


def tensor_bytes(tensors: Mapping[str, TensorInfo]) -> int:
    """Add up the bytes of the tensors of a file."""
    return sum(info.end - info.start for info in tensors.values())


def planned_shards(units: Iterable[Mapping[str, int]]) -> dict[str, tuple[int, list[str]]]:
    """Return the bytes and the tensors of each file that a CheckpointWriter makes of `units`, by
    the file's name.

    One commit writes a unit: tensor name -> bytes, in order.
    """
    written: list[tuple[FileSize, list[str]]] = []
    for unit in units:
        begins = True
        for name, size in unit.items():
            if begins or is_full(written[-1][0], name, size, SHARD_BYTES):
                written.append((FileSize(), []))
            begins = False
            written[-1][0].add(name, size)
            written[-1][1].append(name)
    found: list[tuple[int, list[str]]] = []
    for group in groups([size.tensors for size, _ in written], SHARD_BYTES):
        names = [name for i in group for name in written[i][1]]
        total = sum(written[i][0].tensors for i in group) + header_bytes(names)
        found.append((written[group[0]][0].total if len(group) == 1 else total, names))
    return dict(zip(final_names(len(found)), found, strict=True))


def is_full(file: FileSize, name: str, size: int, most: int) -> bool:
    """Return True if a tensor begins a new file."""
    return not file.fits(name) or 0 < file.tensors > most - size


def final_names(count: int) -> list[str]:
    """Return the names of the files of a finished folder."""
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
