"""Tensors in the safetensors files of a model folder: known by their headers, read one at a time.

A tensor can also be computed from others, and takes their place (`derived`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.core.formats import FLOATS
from quantkit.core.threads import grouped
from quantkit.errors import CheckpointError
from quantkit.io import files
from quantkit.io.json_files import shown
from quantkit.io.model_folder import inside
from quantkit.io.safetensors_files import TensorInfo, read_header

#: Read a tensor by name, or only an entry or a range of its first dimension.
Read = Callable[[str, "int | slice | None"], Tensor]
Compute = Callable[[Read, "int | slice | None"], Tensor]


class Derived(NamedTuple):
    """A tensor that replaces its `inputs`, from which it is computed (`Checkpoint.derive`).

    `compute(read, index)` returns the tensor, or an entry or a range of its first dimension. `read`
    gives the stored inputs; with an index it reads only the bytes of that part. `restore` inverts
    the computation when the tensor is written dense. Without `restore`, the computed tensor is
    written.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    inputs: tuple[str, ...]
    compute: Compute
    restore: Callable[[Tensor], Tensor] | None = None


class StoredFile(NamedTuple):
    """Name a file of a model folder, with its real path and numbers that change with
    its contents.
    """

    name: str
    path: Path
    identity: tuple[int, ...]


class _Place(NamedTuple):
    """Hold shape, dtype and reader of a tensor, and the names of the files that it is read from;
    `stored` is its place in a file, unless it is derived.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int | slice | None], Tensor]
    files: frozenset[str]
    stored: tuple[StoredFile, TensorInfo] | None = None
    restore: Callable[[Tensor], Tensor] | None = None


class StoredTensors:
    """Read the tensors of the weight files `shards` in the folder `path`, a real path.

    `weight_map` is the index, tensor -> file, and decides which copy is read. `absent` are names in
    it that no file holds; `unlisted` are stored tensors that it lacks, which `admit` adds.
    `notices` get a line for each difference. `beside` are other files that must not change. An
    output stores dense floats as `written_dtype`, except the tensors `never_cast`; None: unchanged.
    CheckpointError for a damaged header, or copies of a tensor that the index has in another file.
    """

    written_dtype: torch.dtype | None = None
    never_cast: Collection[str] = ()

    def __init__(
        self,
        path: Path,
        shards: Sequence[str],
        weight_map: Mapping[str, str] | None,
        beside: Sequence[StoredFile] = (),
        notices: list[str] | None = None,
    ) -> None:
        self.path = path
        self._shards = [file_in(path, name) for name in shards]
        self._beside = tuple(beside)
        self._supplied: dict[str, Path] = {}
        headers = {shard: read_header(shard.path)[0] for shard in self._shards}
        holders = grouped(
            (name, shard.name) for shard, header in headers.items() for name in header
        )
        index = weight_map or {name: held[0] for name, held in holders.items()}
        chosen = _by_index(path, holders, index, [] if notices is None else notices)
        self.absent = [name for name in index if name not in holders]
        self._where: dict[str, _Place] = {}
        self.unlisted: dict[str, _Place] = {}
        for shard, header in headers.items():
            for name, info in header.items():
                if chosen.get(name, shard.name) == shard.name:
                    where = self._where if name in chosen else self.unlisted
                    where[name] = _Place(
                        info.shape,
                        info.dtype,
                        partial(_read, path, shard, info),
                        frozenset([shard.name]),
                        (shard, info),
                    )

    def admit(self, names: Iterable[str]) -> None:
        """Read these `unlisted` tensors too."""
        self._where |= {name: self.unlisted.pop(name) for name in names}

    def supply(self, files: Sequence[StoredFile], tensors: Mapping[str, Derived]) -> None:
        """Add tensors that are computed from weight files of another format."""
        self._shards += files
        self._supplied |= {file.name: file.path for file in files}
        held = frozenset(file.name for file in files)
        for name, derived in tensors.items():
            self._where[name] = _Place(
                derived.shape,
                derived.dtype,
                partial(derived.compute, self.get),  # which has no inputs to read
                held,
            )

    def derive(self, tensors: Mapping[str, Derived], drop: Collection[str] = ()) -> None:
        """Replace stored tensors by tensors computed from them, each in the place of its first
        input.

        The inputs' names are free again, and a derived tensor may take one of them. Inputs may be
        derived themselves. The tensors `drop` have no name any more either.
        """
        before = self._where

        def read(name: str, index: int | slice | None) -> Tensor:
            return before[name].read(index)

        replaced = {*drop, *(name for derived in tensors.values() for name in derived.inputs)}
        places = {
            name: _Place(
                derived.shape,
                derived.dtype,
                partial(derived.compute, read),
                frozenset().union(*(before[each].files for each in derived.inputs)),
                restore=derived.restore,
            )
            for name, derived in tensors.items()
        }
        at = grouped((derived.inputs[0], name) for name, derived in tensors.items())
        self._where = {}
        for name, place in before.items():
            now = {each: places[each] for each in at.get(name, ())}
            self._where.update(now if name in replaced else {name: place})

    def is_presented_otherwise(self, name: str) -> bool:
        """Return True if a dense tensor of this name is written in another form than it
        has here.
        """
        return name in self._where and self._where[name].restore is not None

    def as_stored(self, name: str, tensor: Tensor) -> Tensor:
        """Convert a dense tensor to its stored form: the source's form, in `written_dtype`."""
        restore = self._where[name].restore if name in self._where else None
        tensor = tensor if restore is None else restore(tensor)
        cast = (
            self.written_dtype is not None
            and tensor.dtype in FLOATS
            and name not in self.never_cast
        )
        return tensor.to(self.written_dtype) if cast else tensor

    def form_written(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return the dtype and shape in which an output stores a dense tensor."""
        empty = torch.empty(self.shape(name), dtype=self.dtype(name), device="meta")
        stored = self.as_stored(name, empty)
        return stored.dtype, tuple(stored.shape)

    def names(self) -> list[str]:
        """List the tensors' names, in the order of the shards' names and of the bytes in them."""
        return list(self._where)

    def __contains__(self, name: str) -> bool:
        """Return True if there is a tensor of this name."""
        return name in self._where

    def shape(self, name: str) -> tuple[int, ...]:
        """Look up the shape of a tensor in its header."""
        return self._at(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Look up the dtype of a tensor in its header."""
        return self._at(name).dtype

    def nbytes(self, name: str) -> int:
        """Count the bytes of a tensor by its header."""
        place = self._at(name)
        return prod(place.shape) * place.dtype.itemsize

    def get(self, name: str, index: int | slice | None = None) -> Tensor:
        """Read a tensor, or a part of its first dimension; CheckpointError if its file changed
        since it was opened.
        """
        return self._at(name).read(index)

    def files_of(self, names: Iterable[str]) -> list[str]:
        """List the weight files that tensors are read from, in the order of the shards."""
        held = frozenset().union(*(self._at(name).files for name in names))
        return [shard.name for shard in self._shards if shard.name in held]

    def plain(self) -> dict[str, dict[str, TensorInfo]]:
        """Map each file name to the stored tensors that are read from it, in the order of their
        bytes.
        """
        found: dict[str, dict[str, TensorInfo]] = {name: {} for name in self.sources()}
        for name, place in self._where.items():
            if place.stored is not None:
                file, info = place.stored
                found[file.name][name] = info
        return found

    def files(self) -> list[Path]:
        """List the paths of the weight shards in the folder."""
        return [self.path / shard.name for shard in self._shards]

    def sizes(self) -> dict[str, int]:
        """Map the name of each weight shard to its bytes when it was opened."""
        return {shard.name: shard.identity[2] for shard in self._shards}

    def sources(self) -> dict[str, Path]:
        """Map file name to real path: the shards in their order, then all other files."""
        return {file.name: file.path for file in (*self._shards, *self._beside)}

    def hashes(self) -> dict[str, str]:
        """Hash each of the `sources`."""
        return {name: files.hash_of_file(path) for name, path in self.sources().items()}

    def require_unchanged(self) -> None:
        """Raise CheckpointError if one of the `sources` changed since it was opened."""
        for file in (*self._beside, *self._shards):
            found = self.locate(file.name)
            with files.guarded(found):
                _require_same(self.path, file, _identity(os.stat(found)))

    def locate(self, name: str) -> Path:
        """Resolve a file of the folder; CheckpointError if it is missing or leads outside, unless
        it was supplied.
        """
        return self._supplied.get(name) or inside(self.path, name)

    def _at(self, name: str) -> _Place:
        if name not in self._where:
            raise CheckpointError(
                f"has no tensor {shown(name)}: quantkit inspect lists them", subject=self.path
            )
        return self._where[name]


def _by_index(
    folder: Path,
    holders: Mapping[str, Sequence[str]],
    index: Mapping[str, str],
    notices: list[str],
) -> dict[str, str]:
    """Choose the file of each tensor that an index lists; `notices` say how index and files differ.

    `holders` are the files that hold each tensor.
    """
    chosen: dict[str, str] = {}
    differences: dict[str, list[str]] = {}
    for name in {**index, **holders}:
        listed, held = index.get(name), holders.get(name, ())
        if listed is None:
            what = "is not in the index: left out unless the model needs it"
        elif not held:
            what = "is in the index and in no weight file"
        elif listed not in held and len(held) > 1:
            raise CheckpointError(
                f"{name} is in {' and '.join(held)}, and the index says {listed}",
                "name the right one in the index",
                subject=folder,
            )
        else:
            chosen[name] = listed if listed in held else held[0]
            if [listed] == held:
                continue
            what = "is not in the file that the index names: it is read from another"
            if listed in held:
                what = "is in several files: the copy that the index names is read"
            if listed in held[:-1]:
                what += ", and transformers reads the last"
        differences.setdefault(what, []).append(name)
    notices += (f"{shown(n[0])} {what} ({len(n)} in all)" for what, n in differences.items())
    return chosen


def file_in(folder: Path, name: str) -> StoredFile:
    """Find a file of a model folder; CheckpointError if it is missing or leads outside."""
    path = inside(folder, name)
    with files.guarded(path):
        return StoredFile(name, path, _identity(os.stat(path)))


def _identity(found: os.stat_result) -> tuple[int, ...]:
    """Return numbers that identify a file and its version: they differ after a change or a
    replacement.
    """
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _require_same(folder: Path, file: StoredFile, identity: tuple[int, ...]) -> None:
    if identity != file.identity:
        raise CheckpointError(
            "changed while it was in use", "run again", subject=folder / file.name
        )


def _read(folder: Path, shard: StoredFile, info: TensorInfo, index: int | slice | None) -> Tensor:
    """Read a tensor, or an entry or a range of its first dimension."""
    start, size, shape = info.start, info.end - info.start, info.shape
    if index is not None:
        first, last, _ = (
            index.indices(shape[0]) if isinstance(index, slice) else (index, index + 1, 1)
        )
        each = size // shape[0]
        start, size = start + first * each, (last - first) * each
        shape = (last - first, *shape[1:]) if isinstance(index, slice) else shape[1:]
    return read_bytes(folder, shard, start, size).view(info.dtype).reshape(shape)


def read_bytes(folder: Path, file: StoredFile, start: int, size: int) -> Tensor:
    """Read bytes of a file as uint8 `[size]`; CheckpointError if it changed since it was opened."""
    with files.open_regular(file.path) as opened:
        _require_same(folder, file, _identity(os.fstat(opened.fileno())))
        return files.read_exactly(opened, start, size, file.path)
