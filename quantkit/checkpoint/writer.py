"""Writing model folders: shards from a stream of items, one journal line a commit. A stopped run
can continue.

The pipeline's loops yield items, tensors one by one, and commits. Tensors are appended to one file
until it is full. A commit makes the bytes so far durable; its line of the journal has a hash for
each file that is complete, and for the other one what its header will say. In the end files are
numbered `1 of N`; a line may have `replaced` files, which give way to its `files`. The folder does
not look like a model before its last file, config.json, is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from quantkit.checkpoint.origin import companions_of
from quantkit.checkpoint.reader import CONFIG, Checkpoint
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.core.threads import CPU
from quantkit.errors import CheckpointError, RecipeError, Words, about
from quantkit.io import files
from quantkit.io.json_files import dump_json
from quantkit.io.model_folder import INDEX, inside
from quantkit.io.safetensors_files import (
    FileSize,
    SafetensorsWriter,
    changed,
    header_bytes,
    read_header,
    stated_digests,
)
from quantkit.io.staging import JOURNAL, append_journal, read_journal
from quantkit.layouts.base import Layout

#: The most bytes of tensors in one file, unless a single tensor has more.
SHARD_BYTES = 2 * 2**30
#: Bytes for each quantized weight that waits to be written: a byte of codes, and the packed bytes.
WAITING_BYTES = 2
#: The most bytes of tensors that wait to be written while others are rounded or packed, unless a
#: single tensor has more.
QUEUED = 2**28


class Packed(NamedTuple):
    """Hold a quantized weight `[n, k]` as a layout stores it (suffix -> tensor), and the digest of
    its record.
    """

    scheme: Scheme
    shape: tuple[int, int]
    tensors: dict[str, Tensor]
    digest: str


class Item(NamedTuple):
    """Hold a tensor, or a quantized weight under its dense name (`....q_proj.weight`), and facts to
    report.
    """

    name: str
    value: Tensor | QuantizedTensor | Packed
    facts: dict[str, Any] | None = None


class Commit(NamedTuple):
    """Ask the writer to make all items so far durable; `facts` go into the journal.

    `late` returns facts that are known only just before the write, such as a snapshot's.
    """

    facts: dict[str, Any]
    late: Callable[[], dict[str, Any]] | None = None


@dataclass
class _Unit:
    """Items that were stored since a commit, in their order, their bytes, and the hashes of the
    files that became full.
    """

    items: dict[str, None] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    packed_bytes: int = 0


#: The most bytes that are reserved for one file's header.
MOST_HEADER_BYTES = 4 * 2**20
#: Describes how a recorded identity differs from the current one; None if it does not.
Compare = Callable[[Mapping[str, Any], Mapping[str, Any]], str | None]


class CheckpointWriter:
    """Fills a partial folder: items go to shards as they come, `commit` makes them durable,
    `finish` does the rest.

    On a folder with a journal, writing continues after the last commit. `done` has the lines of all
    commits; the first `resumed` of them are of earlier runs. Files that no commit lists are
    deleted. `left_out` are the files of the source that do not go along. `expected` are the names
    of all tensors, if known: space for them is reserved in each file's header. CheckpointError if a
    committed file differs from the journal.
    """

    def __init__(
        self,
        partial: Path,
        like: Checkpoint,
        layout: Layout | None,
        *,
        max_shard_bytes: int = SHARD_BYTES,
        expected: Iterable[str] = (),
    ) -> None:
        if max_shard_bytes < 1:
            raise RecipeError(
                f"max_shard_size is {max_shard_bytes}",
                "give the most bytes of one weight file, like 2GiB",
            )
        self.partial, self.like, self.layout, self.max_shard_bytes = (
            partial,
            like,
            layout,
            max_shard_bytes,
        )
        self._header_bytes = reserved_bytes(expected)
        self._journal = partial / JOURNAL
        lines = read_journal(self._journal)
        self._identity = lines[0] if lines else None
        self.done = lines[1:]
        self.resumed = len(self.done)
        self._written = {name for line in self.done for name in line["items"]}
        # Listed now, so that a bad link does not stop a finished run.
        self._companions, self.left_out = companions_of(like)
        self._file: SafetensorsWriter | None = None
        self._unit = _Unit()
        files.remove(partial / CONFIG)  # until the last step the folder must not look like a model
        self._rename()
        committed = self.hashes()
        for path in sorted(partial.glob("*.safetensors")):
            if path.name not in committed:
                files.remove(path)
        rows = [line.pop("stored", {}) for line in self.done]
        for name, digest in committed.items():
            if not digest:
                self._file = SafetensorsWriter(
                    partial / name,
                    self._header_bytes,
                    [row for each in rows for row in each.get(name, ())],
                )
            elif files.hash_of_file(partial / name, digest) != digest:
                raise changed(partial / name)

    def items_done(self) -> set[str]:
        """Return the logical names of all committed tensors."""
        return set(self._written)

    def hashes(self) -> dict[str, str]:
        """Return file name -> hash of the committed shards, in the order of their tensors; "" for
        one that is not full.
        """
        return committed_files(self.done)

    @property
    def used(self) -> dict[str, str]:
        """File name -> hash of the source's files that the journal records."""
        return {} if self._identity is None else _used([self._identity, *self.done])

    @property
    def packed_bytes(self) -> int:
        """The bytes of the committed tensors that packed weights consist of."""
        return sum(line["packed_bytes"] for line in self.done)

    def identify(self, identity: dict[str, Any], difference: Compare) -> None:
        """Record the settings on which the run depends.

        A resumed one must depend on the same: otherwise CheckpointError with the words of
        `difference`.
        """
        require_same(self.partial, identity, difference)
        if self._identity is None:
            self._identity = json.loads(json.dumps(identity))
            append_journal(self._journal, self._identity)

    def add(self, item: Item, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Store an item, as the `tensors` that `pack` made of it; CheckpointError if it was stored
        before.
        """
        if item.name in self._written or item.name in self._unit.items:
            raise CheckpointError("is written twice: a bug, please report it", subject=item.name)
        for name, tensor in (self.pack(item) if tensors is None else tensors).items():
            size = tensor.numel() * tensor.dtype.itemsize
            self._file_for(name, size).add(name, tensor)
            self._unit.bytes += size
            self._unit.packed_bytes += 0 if isinstance(item.value, Tensor) else size
        self._unit.items[item.name] = None

    def commit(self, facts: dict[str, Any]) -> None:
        """Make all items so far durable: their names and `facts` go into the journal."""
        unit, stored = self._unit, {}
        if not unit.items and not any(facts.values()):
            return
        if self._file is not None:
            unit.files[self._file.path.name] = ""
            stored[self._file.path.name] = self._file.flush()
        line = {
            "files": unit.files,
            "items": list(unit.items),
            "facts": facts,
            "bytes": unit.bytes,
            "packed_bytes": unit.packed_bytes,
        }
        self._record(line, stored)
        self._written.update(unit.items)
        self._unit = _Unit()

    def complete(self) -> None:
        """Commit, and complete the last file."""
        self.commit({})
        self._close_file()
        if self._unit.files:
            self._replace([], self._unit.files)
            self._unit = _Unit()

    def arrange(self) -> None:
        """Complete all files, and give them their final names."""
        self.complete()
        found = self.hashes()
        names = final_names(len(found))
        if names != list(found):
            self._replace(list(found), dict(zip(names, found.values(), strict=True)))
            self._rename()

    def rewrite(self, changed: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        """Write the complete files anew, with some tensors `changed` in their values alone, and
        commit `facts`. Until then the old files count.
        """
        old, new = list(self.hashes()) if changed else [], dict[str, str]()
        for name in old:
            self._unit.files[path := self._next_name()] = ""
            new[path] = self._rewritten(self.partial / name, self.partial / path, changed)
        self._unit = _Unit()
        self._replace(old, new, facts)
        for name in old:
            files.remove(self.partial / name)

    def _replace(
        self, old: list[str], new: dict[str, str], facts: dict[str, Any] | None = None
    ) -> None:
        line = {
            "files": new,
            "items": [],
            "facts": facts or {},
            "bytes": 0,
            "packed_bytes": 0,
            "replaced": old,
        }
        if self._identity is None:  # a run that is never resumed: a second line would keep its work
            self.done.append(line)
        else:
            self._record(line)

    def _rewritten(self, path: Path, into: Path, instead: Mapping[str, Tensor]) -> str:
        """Copy a file with other values of some tensors, durably, and return its hash."""
        tensors, metadata = read_header(path)
        stated = stated_digests(tensors, metadata)
        copy = SafetensorsWriter(into, self._header_bytes)
        with files.open_regular(path) as file:
            for name, info in tensors.items():
                if name in instead:
                    copy.add(name, instead[name])
                    continue
                data = files.read_exactly(file, info.start, info.end - info.start, path)
                if copy.add(name, data.view(info.dtype).reshape(info.shape)) != stated.get(name):
                    raise changed(path)
        return copy.close()

    def _record(self, line: dict[str, Any], stored: Mapping[str, object] | None = None) -> None:
        append_journal(self._journal, {**line, "stored": stored or {}})
        self.done.append(json.loads(json.dumps(line)))

    def _rename(self) -> None:
        """Give files the names that the journal has for them."""
        moved = {
            old: new for old, new in renamings(self.done).items() if (self.partial / old).is_file()
        }
        for old, new in moved.items():
            with files.guarded(self.partial / new):
                files.rename(self.partial / old, self.partial / new)
        if moved:
            files.sync_folder(self.partial)

    def finish(
        self,
        config: dict[str, Any],
        extra: Callable[[], dict[str, bytes]],
        sealed: Callable[[dict[str, str]], dict[str, bytes]] = lambda written: {},
    ) -> dict[str, str]:
        """Write index, companions of the source, side file, `extra` files and last config.json;
        name -> hash.

        `extra` is called when the folder has all that a reader opens, except config.json. `sealed`
        gets the hash of every file and returns the files to write just before config.json.
        """
        self.arrange()
        written, texts = self.hashes(), self._texts_beside(config)
        for name, edited in self._companions.items():
            if name in texts:
                continue
            if edited is not None:
                texts[name] = edited
            else:
                files.copy_atomic(inside(self.like.path, name), self.partial / name)
                written[name] = files.hash_of_file(self.partial / name)
        self._write(texts)
        texts |= (described := extra())
        written |= {name: files.hash_of(text) for name, text in texts.items()}
        stated = dump_json(config, special_floats=True)
        written[CONFIG] = files.hash_of(stated)
        self._write({**described, **sealed(written), CONFIG: stated})
        return written

    def opened(self, config: dict[str, Any]) -> Checkpoint:
        """Complete all files, and open them as a checkpoint that has this config."""
        self.complete()
        self._write(self._texts_beside(config))
        return Checkpoint(self.partial, self.like.trusted, config=config)

    def _texts_beside(self, config: dict[str, Any]) -> dict[str, bytes]:
        names = {name: read_header(self.partial / name)[0] for name in self.hashes()}
        return texts_beside(
            {name: file for file, header in names.items() for name in header},
            sum(line["bytes"] for line in self.done),
            self.layout,
            config,
        )

    def _write(self, texts: dict[str, bytes]) -> None:
        for name, text in texts.items():
            files.write_atomic(self.partial / name, text)

    def pack(self, item: Item) -> dict[str, Tensor]:
        """Return the tensors that an item is stored as, by name: in the layout if it is quantized.

        Without a layout its values are stored, exact in float32.
        """
        if isinstance(item.value, Tensor):
            return {item.name: item.value}
        if self.layout is None and isinstance(item.value, QuantizedTensor):
            return {item.name: item.value.dequantize()}
        assert self.layout is not None
        with about(item.name):
            parts = (
                item.value.tensors
                if isinstance(item.value, Packed)
                else self.layout.pack(item.value)
            )
        return {
            f"{item.name.removesuffix('weight')}{suffix}": tensor
            for suffix, tensor in parts.items()
        }

    def packed(self, item: Item) -> Item:
        """Pack a quantized weight in the layout, if there is one, where it is, and compute its
        digest. The result is on the CPU.
        """
        q = item.value
        if isinstance(q, Packed):
            return item
        if isinstance(q, Tensor) or self.layout is None:
            return item._replace(value=q.to(CPU))
        with about(item.name):
            tensors = {name: tensor.to(CPU) for name, tensor in self.layout.pack(q).items()}
            return item._replace(value=Packed(q.scheme, q.shape, tensors, q.digest()))

    def _file_for(self, name: str, size: int) -> SafetensorsWriter:
        file = self._file
        if file is not None and is_full(file.size, name, size, self.max_shard_bytes):
            self._close_file()
        if self._file is None:
            self._file = SafetensorsWriter(self.partial / self._next_name(), self._header_bytes)
        return self._file

    def _next_name(self) -> str:
        used = {name for line in self.done for name in line["files"]} | self._unit.files.keys()
        names = (f"model-{number:05}.safetensors" for number in count(len(used) + 1))
        return next(name for name in names if name not in used)

    def _close_file(self) -> None:
        if self._file is not None:
            self._unit.files[self._file.path.name] = self._file.close()
            self._file = None


def _used(lines: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Collect the hashes of the source's files, in a journal's identity and its commits."""
    found = (line.get("source") or line.get("facts", {}).get("source", {}) for line in lines)
    return {name: digest for each in found for name, digest in each.items()}


def require_same(partial: Path, identity: Mapping[str, Any], difference: Compare) -> None:
    """Raise the CheckpointError of `identify` if work in a partial folder was begun with another
    identity.
    """
    lines = read_journal(partial / JOURNAL)
    if not lines:
        return
    before, now = lines[0], json.loads(json.dumps(identity))
    if "source" in now and any("source" in line["facts"] for line in lines[1:]):
        # without calibration: of files that no commit has used, nothing is known
        before = {**before, "source": _used(lines)}
        now["source"] = {k: v for k, v in now["source"].items() if k in before["source"]}
    if differs := difference(before, now):
        raise CheckpointError(Words(f"{partial} was begun with other settings,", differs))


def texts_beside(
    weight_map: Mapping[str, str],
    tensor_bytes: int,
    layout: Layout | None,
    config: Mapping[str, Any],
) -> dict[str, bytes]:
    """Return the index of the shards, and the side file of a layout that has one, by file name."""
    texts = {INDEX: dump_json({"metadata": {"total_size": tensor_bytes}, "weight_map": weight_map})}
    if layout is not None and layout.SIDE_FILE is not None:
        name, contents = layout.SIDE_FILE
        texts[name] = dump_json(contents(config["quantization_config"]))
    return texts


def committed_files(lines: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return name -> hash of the files that the lines of a journal leave, in the order of their
    tensors; "" for one that is not full.
    """
    found: dict[str, str] = {}
    for line in lines:
        replaced = line.get("replaced", [])
        found = {name: digest for name, digest in found.items() if name not in replaced}
        found |= line["files"]
    return found


def renamings(lines: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return old -> new name of the files that a journal says have another name now. Files that
    were written anew have facts.
    """
    found: dict[str, str] = {}
    for line in lines:
        before, after = line.get("replaced", []), list(line["files"])
        is_same = len(before) == len(after) and not line["facts"]
        found |= zip(before, after, strict=True) if is_same else ()
    return found


def reserved_bytes(names: Iterable[str]) -> int:
    """Return the bytes of the header of each file of a folder with tensors of these names."""
    return min(header_bytes(names), MOST_HEADER_BYTES)


def planned_shards(sizes: Mapping[str, int]) -> dict[str, tuple[int, list[str]]]:
    """Return the bytes and the tensors of each file that a CheckpointWriter makes, by the file's
    name, of tensor name -> bytes, in order.
    """
    reserved = reserved_bytes(sizes)
    found: list[tuple[FileSize, list[str]]] = []
    for name, size in sizes.items():
        if not found or is_full(found[-1][0], name, size, SHARD_BYTES):
            found.append((FileSize(reserved), []))
        found[-1][0].add(name, size)
        found[-1][1].append(name)
    named = zip(final_names(len(found)), found, strict=True)
    return {file: (size.total, names) for file, (size, names) in named}


def is_full(file: FileSize, name: str, size: int, most: int) -> bool:
    """Return True if a tensor begins a new file."""
    return not file.fits(name) or 0 < file.tensors > most - size


def final_names(count: int) -> list[str]:
    """Return the names of the files of a finished folder."""
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
