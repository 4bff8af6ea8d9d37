"""Files that are read or written once, past the system's page cache, and hashed on the way.

A conversion needs each byte of its source once and makes each of its result once. Through the page cache each would be
copied once more on its way, into pages that the system (a virtual machine's host, too) has to find first and that take
the place of what others read again. Here the disk itself fills and empties memory that is used over and over. Where a
file system does not do that, the same calls go through its cache.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import BinaryIO, NamedTuple, TypeVar

import torch
from torch import Tensor

from quantkit import room, storage
from quantkit.errors import CheckpointError
from quantkit.hashing import Hash

T = TypeVar("T")

#: Bytes that are asked for at once, or gathered to be written: as many as `room` gives pages of their own, whose
#: addresses suit every disk.
PIECE = room.LARGE
#: Pieces that are read before they are asked for.
AHEAD = 2
#: What offsets and sizes of what is read are multiples of; disks ask for 512 or 4096 bytes, a few for more.
BLOCK = 2**16
#: What offsets, sizes and places of what is written are multiples of: tensors lie between larger ones.
PAGE = 2**12


def bypass(file: BinaryIO | FileIO, on: bool = True) -> None:
    """Let a file be read and written past the page cache, if its file system does that; or through it again.

    Past it, offsets, sizes and addresses are multiples of what the disk asks for.
    """
    if hasattr(os, "O_DIRECT"):
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        with suppress(OSError):
            fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)


def read_at(file: FileIO, start: int, into: memoryview, path: Path) -> int:
    """Read from offset `start` on what comes at once; return how many bytes that is, 0 at the end of the file."""
    with storage.guarded(path):
        try:
            return os.preadv(file.fileno(), [into], start)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            bypass(file, False)  # this disk asks for larger multiples
            return os.preadv(file.fileno(), [into], start)


def append(file: BinaryIO, data: memoryview, path: Path) -> None:
    """Write bytes as `storage.write` does, what is not one of whole pages through the cache; it is a file's end."""
    if len(data) % PAGE:
        bypass(file, False)
    start = file.tell()
    try:
        storage.write(file, data, path)
    except CheckpointError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EINVAL:
            raise
        bypass(file, False)  # this disk asks for larger multiples
        file.seek(start)
        storage.write(file, data, path)


class Outlet(NamedTuple):
    """Threads and memory, uint8 `[PIECE]`, for files that are written one after another."""

    hasher: Executor
    disk: Executor
    memory: Tensor


class Written:
    """What a new file is filled with from its beginning on, one file at a time in an Outlet.

    The disk takes it from where it lies, if that is a place and an offset that suit it; the rest is gathered.
    """

    def __init__(self, file: BinaryIO, path: Path, outlet: Outlet) -> None:
        self._file, self._path, self._outlet = file, path, outlet
        self._seen = Hash()
        self._gathered = 0
        self._busy: list[Future[None]] = []
        bypass(file)

    def write(self, data: Tensor) -> None:
        """Append bytes, uint8 `[size]`, which must stay as they are until the next call, or `finish`, returns.

        Both raise what went wrong behind the writing.
        """
        self._settle()
        self._busy.append(self._outlet.disk.submit(self._store, data))
        self._busy.append(self._outlet.hasher.submit(self._seen.update, data.numpy().data))

    def finish(self) -> str:
        """Return the hash of all that was appended, when it is written; what follows goes through the cache."""
        self._settle()
        self._send()
        bypass(self._file, False)
        return self._seen.text()

    def _settle(self) -> None:
        for future in self._busy:
            result_of(future)
        self._busy.clear()

    def _store(self, data: Tensor) -> None:
        while len(data):
            size = len(data) - len(data) % PAGE
            if size >= BLOCK and not self._gathered % PAGE and not data.data_ptr() % PAGE:
                self._send()
                append(self._file, data[:size].numpy().data, self._path)
            else:
                size = min(len(data), PIECE - self._gathered)
                self._outlet.memory[self._gathered : self._gathered + size].copy_(data[:size])
                self._gathered += size
                if self._gathered == PIECE:
                    self._send()
            data = data[size:]

    def _send(self) -> None:
        if self._gathered:
            append(self._file, self._outlet.memory[: self._gathered].numpy().data, self._path)
            self._gathered = 0


class _Source:
    """A file that is read, and hashed from its beginning on."""

    def __init__(self, path: Path, like: object) -> None:
        self.path, self.seen = path, Hash(like)
        with storage.guarded(path):
            self.size = path.stat().st_size
        self._hashed = 0

    def read(self, at: int, memory: Tensor) -> int:
        """Read from a block's offset `at` on what comes at once; return how much that is."""
        with storage.open_regular(self.path) as file:
            bypass(file)
            return read_at(file, at, memory.numpy().data, self.path)

    def is_far(self, start: int) -> bool:
        """Return whether at least a piece lies between what is hashed and offset `start`."""
        return start >= self._hashed + PIECE

    def follow(self, start: int, data: Tensor) -> bool:
        """Hash bytes from offset `start` on and return whether this was done: if less than a piece lies before them."""
        if self.is_far(start) or start + len(data) <= self._hashed:
            return False
        self.catch_up(start)
        self.seen.update(data[self._hashed - start :].numpy().data)
        self._hashed = start + len(data)
        return True

    def catch_up(self, end: int) -> None:
        """Read and hash what is not hashed yet of the bytes before `end`."""
        memory = room.empty([PIECE if self._hashed < end else 0], torch.uint8)
        while self._hashed < end:
            first = self._hashed - self._hashed % BLOCK
            got = min(self.read(first, memory), end - first)
            if first + got <= self._hashed:
                raise CheckpointError(f"{self.path}: was cut off while it was read: run again")
            self.seen.update(memory[self._hashed - first : got].numpy().data)
            self._hashed = first + got


class _Piece(NamedTuple):
    """What is read of a file before it is asked for: from offset `start` on, `size` bytes once they are there."""

    source: _Source
    start: int
    memory: Tensor
    size: Future[int]

    def holds(self, source: _Source, at: int) -> bool:
        return self.source is source and self.start <= at < self.start + PIECE


class Inlet:
    """Reads parts of files, best in their order, and finds the hashes of whole files on the way.

    The thread that asks does both, one at a time: what it copied is in the cache of its processor.
    """

    def __init__(self, paths: Mapping[str, Path], disk: Executor, recorded: Mapping[str, object]) -> None:
        self._sources = {name: _Source(path, recorded.get(name)) for name, path in paths.items()}
        self._disk = disk
        self._small, self._far = room.empty([PIECE + BLOCK], torch.uint8).split(PIECE)
        self._far_from: tuple[_Source, int] | None = None
        self._free = [room.empty([PIECE], torch.uint8) for _ in range(AHEAD)]
        self._ahead: deque[_Piece] = deque()

    def read(self, name: str, start: int, size: int) -> Tensor:
        """Return `size` bytes of a file from offset `start` on, uint8 `[size]`; CheckpointError if it is shorter."""
        source, end = self._sources[name], start + size
        first = start - start % BLOCK
        span = -(-(end - first) // BLOCK) * BLOCK
        if span == BLOCK and source.is_far(first):
            return self._far_block(source, first, end)[start - first : end - first].clone()
        memory = self._small[:span] if span <= PIECE else room.empty([span], torch.uint8)
        self._bring(source, start, end, memory)
        data = memory[start - first : end - first]
        return data.clone() if span <= PIECE else data

    def hashes(self) -> dict[str, str]:
        """Return file name -> hash; what was not read, or not in its order, is read now."""
        for source in self._sources.values():
            source.catch_up(source.size)
        return {name: source.seen.text() for name, source in self._sources.items()}

    def _far_block(self, source: _Source, first: int, end: int) -> Tensor:
        """Return a block that does not come next, `[BLOCK]`; it is kept, since small tensors lie there side by side."""
        if self._far_from != (source, first) or end > source.size:
            self._far_from = None
            self._bring(source, first, max(end, min(first + BLOCK, source.size)), self._far)
            self._far_from = source, first
        return self._far

    def _bring(self, source: _Source, start: int, end: int, memory: Tensor) -> None:
        """Fill `memory` with a file's bytes from the block of offset `start` to `end`, and hash them in passing.

        What was not read ahead the disk reads to its place, all of it asked for at once.
        """
        at = first = start - start % BLOCK
        held = any(piece.holds(source, first) for piece in self._ahead)
        begin = self._ahead[-1].start + PIECE if held else first
        asked = {
            offset: self._disk.submit(source.read, offset, memory[offset - first :][:PIECE])
            for offset in range(begin, end, PIECE)
        }
        while at < end:
            rest = memory[at - first :]
            got = asked.pop(at).result() if at in asked else self._from_ahead(source, at, rest)
            got = got or source.read(at, rest[: PIECE - (at - begin) % PIECE])  # if less than a piece had come
            if not got:
                raise CheckpointError(f"{source.path}: ends {end - at} bytes too early: download it again")
            since, at = max(at, start), at + got
            if source.follow(since, memory[since - first : min(at, end) - first]) and at >= min(begin, end):
                self._read_on(source, end)

    def _read_on(self, source: _Source, end: int) -> None:
        """Let the disk read from offset `end` on as far as there is memory."""
        while self._ahead and not self._ahead[0].holds(source, end):
            self._free.append(self._ahead.popleft().memory)
        start = self._ahead[-1].start + PIECE if self._ahead else end - end % BLOCK
        while self._free and start < source.size:
            memory = self._free.pop()
            self._ahead.append(_Piece(source, start, memory, self._disk.submit(source.read, start, memory)))
            start += PIECE

    def _from_ahead(self, source: _Source, at: int, memory: Tensor) -> int:
        """Copy what is read already from offset `at` on, to the end of a piece; return how much that is."""
        for piece in self._ahead:
            if piece.holds(source, at):
                size = max(0, min(piece.start + piece.size.result() - at, len(memory)))
                memory[:size].copy_(piece.memory[at - piece.start :][:size])
                return size
        return 0


@contextmanager
def outlet() -> Iterator[Outlet]:
    """Yield an Outlet; what is not written when it is left is given up."""
    with threads(hash_result=1, disk_result=1) as (hasher, disk):
        yield Outlet(hasher, disk, room.empty([PIECE], torch.uint8))


@contextmanager
def inlet(paths: Mapping[str, Path], recorded: Mapping[str, object]) -> Iterator[Inlet]:
    """Yield an Inlet for the files at `paths`, by name; those of `recorded` are hashed as the hash there is."""
    with threads(disk_source=2) as (disk,):  # one asks the disk for more as the other takes what it gave
        yield Inlet(paths, disk, recorded)


def result_of(future: Future[T]) -> T:
    """Return what `future.result()` does; for the main thread, which a signal's exception may meet as it waits.

    It waits for a lock of its own: `result` holds one that the future's thread needs too, and might leave it taken.
    """
    done = Lock()
    done.acquire()
    future.add_done_callback(lambda _: done.release())
    done.acquire()
    return future.result()


@contextmanager
def threads(**counts: int) -> Iterator[list[ThreadPoolExecutor]]:
    """Yield an executor of so many threads for each name; in the end what they have not begun is given up."""
    with ExitStack() as stack:
        pools = [ThreadPoolExecutor(count, f"quantkit-{name}") for name, count in counts.items()]
        for pool in pools:
            stack.callback(pool.shutdown, cancel_futures=True)
        yield pools
