"""Files that are read once, past the system's page cache, and hashed on the way, as `direct` does it.

Best are tensors in the order of the files. Those that come next are read before they are asked for; small ones that lie
elsewhere, as many do in files that are sorted by dtype, are read with what lies around them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.io import direct, files
from quantkit.io.hashing import Hash

#: Pieces that are read before they are asked for.
AHEAD = 2
#: Bytes that are read around a small tensor that does not come next, and how many such windows are kept.
WINDOW = 2**20
WINDOWS = 4
CHANGED = "changed while it was in use: run again"


def stamp(found: os.stat_result) -> tuple[int, ...]:
    """Return what tells a file from another of its name, or from itself before it was changed."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class _Source:
    """The `number`-th of files that are read, and hashed from their beginnings on, `hashed` bytes so far."""

    def __init__(self, number: int, path: Path, like: object) -> None:
        self.number, self.path, self.seen = number, path, Hash(like)
        with files.guarded(path):
            self._stamp = stamp(found := path.stat())
        self.size = found.st_size
        self.hashed = 0

    def read(self, at: int, memory: direct.Bytes) -> int:
        """Read from a block's offset `at` on what comes at once; return how much that is."""
        with files.open_regular(self.path) as file:
            if stamp(os.fstat(file.fileno())) != self._stamp:
                raise CheckpointError(f"{self.path}: {CHANGED}")
            direct.bypass(file)
            return direct.read_at(file, at, memory.data, self.path)

    def follow(self, start: int, data: direct.Bytes) -> None:
        """Hash bytes from offset `start` on, as far as they are not yet; all before them are."""
        if start + len(data) > self.hashed:
            self.seen.update(data[self.hashed - start :].data)
            self.hashed = start + len(data)


class _Piece(NamedTuple):
    """What is read of a file before it is asked for: from offset `start` on, `size` bytes once they are there."""

    source: _Source
    start: int
    memory: direct.Bytes
    size: Future[int]

    def holds(self, source: _Source, at: int) -> bool:
        return self.source is source and self.start <= at < self.start + direct.PIECE

    def is_past(self, source: _Source, at: int) -> bool:
        """Return whether all of it lies before offset `at` of a file, in the order of the files."""
        return (self.source.number, self.start + direct.PIECE) <= (source.number, at)


@dataclass(eq=False)
class _Window:
    """Bytes of a file from offset `start` to `end`, kept since others of them may be asked for."""

    memory: direct.Bytes
    source: _Source | None = None
    start: int = 0
    end: int = 0

    def holds(self, source: _Source, start: int, end: int) -> bool:
        return self.source is source and self.start <= start and end <= self.end


class Inlet:
    """Reads parts of files, best in their order, and finds the hashes of whole files on the way.

    The thread that asks does both, one at a time: what it copied is in the cache of its processor.
    """

    def __init__(self, paths: Mapping[str, Path], disk: Executor, recorded: Mapping[str, object]) -> None:
        self._sources = {name: _Source(i, path, recorded.get(name)) for i, (name, path) in enumerate(paths.items())}
        self._order = list(self._sources.values())
        self._disk = disk
        self._memory = direct.pages(direct.PIECE)
        self._windows = [_Window(memory) for memory in np.split(direct.pages(WINDOWS * WINDOW), WINDOWS)]
        self._free = [direct.pages(direct.PIECE) for _ in range(AHEAD)]
        self._ahead: deque[_Piece] = deque()
        self._current = self._order[0]
        self._read_on(self._current, 0)

    def read(self, name: str, start: int, size: int) -> Tensor:
        """Return `size` bytes of a file from offset `start` on, uint8 `[size]`; CheckpointError if it is shorter."""
        source, end = self._sources[name], start + size
        # What lies between would be read for its hash only: if it is more than this, rather is the part read twice.
        comes_next = source.hashed <= start < source.hashed + max(WINDOW, size)
        if comes_next:
            self._turn_to(source)
            self._catch_up(source, start)
            if size <= direct.PIECE:
                data = torch.empty([size], dtype=torch.uint8)
                self._catch_up(source, end, data.numpy())
                return data
        elif size <= WINDOW - direct.BLOCK:
            return self._from_window(source, start, end)
        first = start - start % direct.BLOCK
        memory = torch.empty([-(-(end - first) // direct.BLOCK) * direct.BLOCK], dtype=torch.uint8)
        self._bring(source, start, end, memory.numpy(), comes_next)
        return memory[start - first : end - first]

    def hashes(self) -> dict[str, str]:
        """Return file name -> hash; what was not read, or not in its order, is read now."""
        for source in self._order:
            self._catch_up(source, source.size)
        return {name: source.seen.text() for name, source in self._sources.items()}

    def _from_window(self, source: _Source, start: int, end: int) -> Tensor:
        """Return bytes that do not come next, uint8 `[end - start]`, and keep what lies behind them.

        In many files small tensors lie side by side, far from the large ones of the same weights.
        """
        found = next((window for window in self._windows if window.holds(source, start, end)), None)
        if found is None:
            found = self._windows[0]
            found.source = None  # until it is there
            found.start = at = start - start % direct.BLOCK
            last = max(end, min(at + WINDOW, source.size))
            while at < last:
                at += _some(source.read(at, found.memory[at - found.start :]), source, last - at)
            found.source, found.end = source, at
        self._windows.remove(found)
        self._windows.append(found)  # the first is the one that is longest unused
        return torch.from_numpy(found.memory[start - found.start : end - found.start].copy())

    def _bring(self, source: _Source, start: int, end: int, memory: direct.Bytes, hash_them: bool) -> None:
        """Fill `memory` with a file's bytes from the block of offset `start` to `end`, and hash them if so asked.

        What was not read ahead the disk reads to its place, all of it asked for at once.
        """
        at = first = start - start % direct.BLOCK
        held = self._piece(source, first) is not None
        begin = max(piece.start + direct.PIECE for piece in self._ahead if piece.source is source) if held else first
        asked = {
            offset: self._disk.submit(source.read, offset, memory[offset - first :][: direct.PIECE])
            for offset in range(begin, end, direct.PIECE)
        }
        while at < end:
            rest = memory[at - first :]
            got = asked.pop(at).result() if at in asked else self._from_ahead(source, at, rest)
            if not got:  # less than a piece had come
                got = source.read(at, rest[: direct.PIECE - (at - begin) % direct.PIECE])
            since, at = max(at, start), at + _some(got, source, end - at)
            if hash_them:
                source.follow(since, memory[since - first : min(at, end) - first])
                if at >= min(begin, end):
                    self._read_on(source, end)

    def _turn_to(self, source: _Source) -> None:
        """Go on with another file; what is left of the one before, if it is little, has been read in windows."""
        before, self._current = self._current, source
        if before is not source and before.size - before.hashed <= before.size // 8:
            self._catch_up(before, before.size)

    def _catch_up(self, source: _Source, end: int, into: direct.Bytes | None = None) -> None:
        """Read and hash what is not hashed yet of the bytes before `end`, and copy them if they are wanted."""
        while (at := source.hashed) < end:
            piece = self._piece(source, at)
            got = 0 if piece is None else piece.start + piece.size.result() - at
            if piece is not None and got > 0:
                some = piece.memory[at - piece.start :][: min(got, end - at)]
            else:
                first = at - at % direct.BLOCK
                got = first + source.read(first, self._memory) - at
                some = self._memory[at - first :][: min(max(0, got), end - at)]
            source.follow(at, some[: _some(len(some), source, end - at)])
            if into is not None:
                np.copyto(into[len(into) - (end - at) :][: len(some)], some)
            self._read_on(source, source.hashed)

    def _read_on(self, source: _Source, end: int) -> None:
        """Let the disk read from offset `end` on, and then the next files, as far as there is memory."""
        while self._ahead and self._ahead[0].is_past(source, end):
            piece = self._ahead.popleft()
            piece.size.exception()  # waits: until then the disk fills it
            self._free.append(piece.memory)
        start = end - end % direct.BLOCK
        if self._ahead:
            source, start = self._ahead[-1].source, self._ahead[-1].start + direct.PIECE
        while self._free:
            while start >= source.size:
                if source is self._order[-1]:
                    return
                source, start = self._order[source.number + 1], 0
            memory = self._free.pop()
            self._ahead.append(_Piece(source, start, memory, self._disk.submit(source.read, start, memory)))
            start += direct.PIECE

    def _piece(self, source: _Source, at: int) -> _Piece | None:
        return next((piece for piece in self._ahead if piece.holds(source, at)), None)

    def _from_ahead(self, source: _Source, at: int, memory: direct.Bytes) -> int:
        """Copy what is read already from offset `at` on, to the end of a piece; return how much that is."""
        if (piece := self._piece(source, at)) is None:
            return 0
        size = max(0, min(piece.start + piece.size.result() - at, len(memory)))
        np.copyto(memory[:size], piece.memory[at - piece.start :][:size])
        return size


def _some(got: int, source: _Source, missing: int) -> int:
    """Return how many bytes came; CheckpointError if there are no more."""
    if not got:
        raise CheckpointError(f"{source.path}: ends {missing} bytes too early: download it again")
    return got


@contextmanager
def opened(paths: Mapping[str, Path], recorded: Mapping[str, object]) -> Iterator[Inlet]:
    """Yield an Inlet for the files at `paths`, by name; those of `recorded` are hashed as the hash there is."""
    with direct.threads(disk_source=2) as (disk,):  # one asks the disk for more as the other takes what it gave
        yield Inlet(paths, disk, recorded)
