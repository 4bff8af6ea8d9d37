"""Writing model folders: shards from a stream of items, one journal line a commit. A stopped run
can continue.

The pipeline's loops yield items, tensors one by one, and commits. A run writes at least one file a
commit, such as a block. Neighbours are joined into files of at least LEAST_BYTES as soon as no
later file can belong to them, and in the end files are numbered `1 of N`. Each step is a line of
the journal, whose `replaced` files give way to its `files`. The folder does not look like a model
before its last file, config.json, is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from quantkit.checkpoint.origin import companions_of
from quantkit.checkpoint.reader import CONFIG, Checkpoint
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import CheckpointError, Option, RecipeError, Words, about
from quantkit.io import files
from quantkit.io.json_files import dump_json
from quantkit.io.model_folder import INDEX, inside
from quantkit.io.safetensors_files import (
    FileSize,
    SafetensorsWriter,
    header_bytes,
    read_header,
    stated_digests,
)
from quantkit.io.staging import JOURNAL, append_journal, read_journal
from quantkit.layouts.base import Layout

#: The most bytes of tensors in one file, unless a single tensor has more.
SHARD_BYTES = 2 * 2**30
#: The fewest bytes of tensors in a file, where the model and SHARD_BYTES allow it.
LEAST_BYTES = 256 * 2**20
#: Bytes for each quantized weight that waits to be written: a byte of codes, and the packed bytes.
WAITING_BYTES = 2


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

    `late` returns facts that are known only just before the write, such as a snapshot's. With
    `aside`, it is the commit of the items that were set aside.
    """

    facts: dict[str, Any]
    late: Callable[[], dict[str, Any]] | None = None
    aside: bool = False


@dataclass
class _Unit:
    """Items that were stored since a commit, in their order, their files, and their bytes."""

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
        self._header_bytes = min(header_bytes(expected), MOST_HEADER_BYTES)
        self._journal = partial / JOURNAL
        lines = read_journal(self._journal)
        self._identity = lines[0] if lines else None
        self.done = lines[1:]
        self.resumed = len(self.done)
        self._written = {name for line in self.done for name in line["items"]}
        # Listed now, so that a bad link does not stop a finished run.
        self._companions, self.left_out = companions_of(like)
        self._file: SafetensorsWriter | None = None
        self._unit, self._aside = _Unit(), _Unit()
        self._sizes: dict[str, int] = {}
        files.remove(partial / CONFIG)  # until the last step the folder must not look like a model
        self._rename()
        committed = self.hashes()
        for path in sorted(partial.glob("*.safetensors")):
            if path.name not in committed:
                files.remove(path)
        for name, digest in committed.items():
            if files.hash_of_file(partial / name, digest) != digest:
                raise changed(partial / name)

    def items_done(self) -> set[str]:
        """Return the logical names of all committed tensors."""
        return set(self._written)

    def hashes(self) -> dict[str, str]:
        """Return file name -> hash of the committed shards, in the order of their tensors."""
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
        stored = self._written, self._aside.items, self._unit.items
        if any(item.name in names for names in stored):
            raise CheckpointError("is written twice: a bug, please report it", subject=item.name)
        for name, tensor in (self.pack(item) if tensors is None else tensors).items():
            size = tensor.numel() * tensor.dtype.itemsize
            self._file_for(name, size).add(name, tensor)
            self._unit.bytes += size
            self._unit.packed_bytes += 0 if isinstance(item.value, Tensor) else size
        self._unit.items[item.name] = None

    def set_aside(self) -> None:
        """Close the shards of the items so far. They wait for their own commit; a run that is
        resumed without it writes them anew.
        """
        self._close_file()
        self._unit, self._aside = _Unit(), self._unit

    def commit(self, facts: dict[str, Any], aside: bool = False) -> None:
        """Make all items so far durable: their shards are closed, their names and `facts` go into
        the journal. With `aside`, those that were set aside.
        """
        unit = self._aside if aside else self._unit
        if not unit.items and not any(facts.values()):
            return
        self._close_file()
        sizes = {"bytes": unit.bytes, "packed_bytes": unit.packed_bytes}
        self._record({"files": unit.files, "items": list(unit.items), "facts": facts, **sizes})
        self._written.update(unit.items)
        if aside:
            self._aside = _Unit()
        else:
            self._unit = _Unit()
        self._join(ended=False)

    def arrange(self) -> None:
        """Commit, join small files, and give all files their final names."""
        self.commit({})
        self._join(ended=True)
        found = self.hashes()
        names = final_names(len(found))
        if names != list(found):
            self._replace(list(found), dict(zip(names, found.values(), strict=True)))
            self._rename()

    def _join(self, ended: bool) -> None:
        """Join the groups of small files that are complete; if the run has `ended`, all.

        Files are deleted only after the journal has their replacements. A resumed run deletes the
        rest.
        """
        names = list(self.hashes())
        for group in groups(list(map(self._tensor_bytes, names)), self.max_shard_bytes, ended):
            if len(group) > 1:
                old, new = [names[i] for i in group], self._next_name()
                self._replace(
                    old,
                    {new: join_files([self.partial / name for name in old], self.partial / new)},
                )
                for name in old:
                    files.remove(self.partial / name)

    def _tensor_bytes(self, name: str) -> int:
        """Return the bytes of the tensors in a committed file."""
        if name not in self._sizes:
            header = read_header(self.partial / name)[0]
            self._sizes[name] = sum(info.end - info.start for info in header.values())
        return self._sizes[name]

    def rewrite(self, changed: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        """Write the committed files anew, with some tensors `changed` in their values alone, and
        commit `facts`. Until then the old files count.
        """
        old, new = list(self.hashes()) if changed else [], dict[str, str]()
        for name in old:
            self._unit.files[path := self._next_name()] = ""
            new[path] = join_files([self.partial / name], self.partial / path, changed)
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

    def _record(self, line: dict[str, Any]) -> None:
        append_journal(self._journal, line)
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
        for name, changed in self._companions.items():
            if name in texts:
                continue
            if changed is not None:
                texts[name] = changed
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
        """Open the committed tensors as a checkpoint that has this config."""
        self._write(self._texts_beside(config))
        return Checkpoint(self.partial, self.like.trusted, config=config)

    def _texts_beside(self, config: dict[str, Any]) -> dict[str, bytes]:
        names = {name: read_header(self.partial / name)[0] for name in self.hashes()}
        weight_map = {name: file for file, header in names.items() for name in header}
        size = sum(line["bytes"] for line in self.done)
        return texts_beside(weight_map, size, self.layout, config)

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
        """Pack a quantized weight in the layout, if there is one, and compute its digest."""
        q = item.value
        if not isinstance(q, QuantizedTensor) or self.layout is None:
            return item
        with about(item.name):
            value = Packed(q.scheme, q.shape, self.layout.pack(q), q.digest())
        return item._replace(value=value)

    def _file_for(self, name: str, size: int) -> SafetensorsWriter:
        file = self._file
        if file is not None and is_full(file.size, name, size, self.max_shard_bytes):
            self._close_file()
        if self._file is None:
            self._file = SafetensorsWriter(self.partial / self._next_name(), self._header_bytes)
        return self._file

    def _next_name(self) -> str:
        # Files that were set aside take numbers too, which a resumed run may skip.
        used = {name for line in self.done for name in line["files"]}
        used |= self._unit.files.keys() | self._aside.files.keys()
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
    tensors.
    """
    found: list[tuple[str, str]] = []
    for line in lines:
        replaced = line.get("replaced", [])
        first = [name for name, _ in found].index(replaced[0]) if replaced else len(found)
        found[first : first + len(replaced)] = line["files"].items()
    return dict(found)


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


def groups(sizes: Sequence[int], most: int, ended: bool = True) -> list[range]:
    """Divide files of these `sizes`, in order, into those that are joined: of at least LEAST_BYTES,
    at most `most`. Unless the files have `ended`, without the last group, which may grow.
    """
    found: list[range] = []
    first = total = 0
    for number, size in enumerate(sizes):
        if number > first and (total >= LEAST_BYTES or total + size > most):
            found.append(range(first, number))
            first, total = number, 0
        total += size
    if not ended:
        return found
    if found and total < LEAST_BYTES and sum(sizes[i] for i in found[-1]) + total <= most:
        first = found.pop().start
    return [*found, range(first, len(sizes))] if sizes else []


def join_files(
    paths: Sequence[Path], into: Path, instead: Mapping[str, Tensor] = MappingProxyType({})
) -> str:
    """Copy the tensors of several files into a new one, durably, and return its hash; one tensor is
    in memory. Those in `instead` have other values there.

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
                if name in instead:
                    joined.add(name, instead[name])
                    continue
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


def planned_shards(units: Iterable[Mapping[str, int]]) -> dict[str, tuple[int, list[str]]]:
    """Return the bytes and the tensors of each file that a CheckpointWriter makes of `units`, by
    the file's name.

    One commit writes a unit: tensor name -> bytes, in order.
    """
    written: list[tuple[FileSize, list[str]]] = []
    for unit in units:
        for number, (name, size) in enumerate(unit.items()):
            if number == 0 or is_full(written[-1][0], name, size, SHARD_BYTES):
                written.append((FileSize(), []))
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
