"""A model of a disk at a power cut: what was not synced is lost, torn, or reached the disk in another order.

Beside the hook of `quantkit.io.files` it keeps what is durable: the bytes of a file at its last fsync, and the names in
a folder at the last fsync of that folder. A change of names is all or nothing, as a rename on a file system is.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

from quantkit.io.staging import JOURNAL

#: What became of unsynced changes: none is there; all names are, and a part of each file's bytes; or any of them.
CRASHES = ("lost", "torn", "reordered")
#: Path in the root -> bytes of a file, None for a folder.
World = dict[str, bytes | None]


class Disk:
    """Follows the operations below a folder; `hook` is called before each of them, `settle` after the last.

    All that is in the folder at the beginning is durable. `committed` are the journal lines that were made durable.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.committed = 0
        self._held: dict[int, int] = {}  # an open file keeps its inode number from being used again
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._changes: dict[int, list[dict[str, int | None]]] = {}
        self._now: dict[int, dict[str, int]] = {}
        self._syncing: Path | None = None
        self._root = self._scan(root)
        for folder, names in self._now.items():
            self._names[folder] = dict(names)
            self._changes[folder] = []
        for number in self._held:
            if number not in self._now:
                self._bytes[number] = self._content(number)

    def hook(self, operation: str, path: Path) -> None:
        """Take in the operation before this one, and note this one if it makes something durable."""
        self.settle()
        if operation == "fsync":
            unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # `write_atomic` names the later file
            self._syncing = unfinished if unfinished.exists() else path

    def settle(self) -> None:
        """Take in what has happened since the last call."""
        before = {folder: dict(names) for folder, names in self._now.items()}
        self._scan(self.root)
        for folder, names in self._now.items():
            old = before.get(folder, {})
            changed = {name: names.get(name) for name in {*old, *names} if old.get(name) != names.get(name)}
            if changed:
                self._changes.setdefault(folder, []).append(changed)
        path, self._syncing = self._syncing, None
        if path is None or not path.exists():
            return
        number = path.stat().st_ino
        if number in self._now:
            self._names[number], self._changes[number] = dict(self._now[number]), []
        elif number in self._held:
            self._bytes[number] = self._content(number)
        for names in self._names.values():
            if JOURNAL in names:
                self.committed = self._bytes.get(names[JOURNAL], b"").count(b"\n")

    def crashed(self, how: str, rng: random.Random) -> World:
        """Return one of the folders that may be found after a power cut at this instant."""
        return dict(self._found(self._root, "", how, rng))

    def _found(self, folder: int, where: str, how: str, rng: random.Random) -> Iterator[tuple[str, bytes | None]]:
        names = dict(self._names.get(folder, {}))
        if how == "torn":
            names = self._now.get(folder, names)
        if how == "reordered":
            for change in self._changes.get(folder, []):
                if rng.random() < 0.5:
                    names.update(change)  # type: ignore[arg-type]
        for name, number in sorted(names.items()):
            if number is None:
                continue
            if number in self._now:
                yield f"{where}{name}", None
                yield from self._found(number, f"{where}{name}/", how, rng)
            else:
                yield f"{where}{name}", self._remains(number, how, rng)

    def _remains(self, number: int, how: str, rng: random.Random) -> bytes:
        now, durable = self._content(number), self._bytes.get(number, b"")
        if how == "lost" or now == durable:
            return durable
        # Space that was given to a file and never written reads as zeros.
        unwritten = durable + bytes(max(0, len(now) - len(durable)))
        if how == "reordered":
            return rng.choice((durable, unwritten, now))
        cut = rng.randrange(len(durable) if now.startswith(durable) else 0, len(now) + 1)
        return now[:cut] + rng.choice((durable, unwritten))[cut:]

    def _content(self, number: int) -> bytes:
        size = os.fstat(self._held[number]).st_size
        return os.pread(self._held[number], size, 0)

    def _scan(self, folder: Path) -> int:
        """Note the names in a folder and in those below it; return its inode number."""
        number = self._hold(folder)
        self._now[number] = {}
        for path in folder.iterdir():
            self._now[number][path.name] = self._scan(path) if path.is_dir() else self._hold(path)
        return number

    def _hold(self, path: Path) -> int:
        number = path.stat().st_ino
        if number not in self._held:
            self._held[number] = os.open(path, os.O_RDONLY)
        return number


def digest(world: World) -> str:
    """Return a name for a folder of this content."""
    seen = hashlib.sha256()
    for name, content in sorted(world.items()):
        what = b"folder" if content is None else hashlib.sha256(content).digest()
        seen.update(repr((name, what)).encode())
    return seen.hexdigest()[:24]


def write(world: World, folder: Path) -> None:
    """Make a folder of this content."""
    folder.mkdir()
    for name, content in sorted(world.items()):
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
