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
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import BinaryIO, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.io import files
from quantkit.io.hashing import Hash

T = TypeVar("T")
#: Parts of it are made without giving way to another thread, as torch does even for them.
Bytes = NDArray[np.uint8]

#: Bytes that are asked for at once, or gathered to be written: as many as `room` gives pages of their own, whose
#: addresses suit every disk.
PIECE = 4 * 2**20
#: Bytes from which on a request of its own is quicker than copying.
WORTH = 2**21
#: Pieces that small tensors are gathered in: one fills as the other is written.
GATHERED = 2
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
    with files.guarded(path):
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
        files.write(file, data, path)
    except CheckpointError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EINVAL:
            raise
        bypass(file, False)  # this disk asks for larger multiples
        file.seek(start)
        files.write(file, data, path)


class Outlet(NamedTuple):
    """Threads, and memories `[PIECE]` to gather in, for files that are written one after another."""

    hasher: Executor
    disk: Executor
    memories: tuple[Bytes, ...]


class Written:
    """What a new file is filled with from its beginning on, one file at a time in an Outlet.

    The disk takes what is large from where it lies, if place and offset suit it; the rest is gathered.
    """

    def __init__(self, file: BinaryIO, path: Path, outlet: Outlet) -> None:
        self._file, self._path, self._outlet = file, path, outlet
        self._seen = Hash()
        self._gathered = 0
        self._free: deque[tuple[Bytes, list[Future[None]]]] = deque((memory, []) for memory in outlet.memories)
        self._busy: list[Future[None]] = []
        bypass(file)

    def write(self, data: Tensor) -> None:
        """Append bytes, uint8 `[size]`, which must stay as they are until the next call, or `finish`, returns.

        Both raise what went wrong behind the writing.
        """
        _settle(self._busy)
        left = data.numpy()
        while len(left):
            size = len(left) - len(left) % PAGE
            if size >= WORTH and not self._gathered % PAGE and not left.ctypes.data % PAGE:
                self._send()
                self._busy = self._begin(left[:size])
            else:
                size = min(len(left), PIECE - self._gathered)
                np.copyto(self._memory()[self._gathered : self._gathered + size], left[:size])
                self._gathered += size
                if self._gathered == PIECE:
                    self._send()
            left = left[size:]

    def finish(self) -> str:
        """Return the hash of all that was appended, when it is written; what follows goes through the cache."""
        _settle(self._busy)
        self._send()
        for _, busy in self._free:
            _settle(busy)
        bypass(self._file, False)
        return self._seen.text()

    def _memory(self) -> Bytes:
        """Return the memory that is gathered in, which is free then."""
        memory, busy = self._free[0]
        _settle(busy)
        return memory

    def _send(self) -> None:
        if self._gathered:
            memory, _ = self._free.popleft()
            self._free.append((memory, self._begin(memory[: self._gathered])))
            self._gathered = 0

    def _begin(self, data: Bytes) -> list[Future[None]]:
        return [
            self._outlet.disk.submit(append, self._file, data.data, self._path),
            self._outlet.hasher.submit(self._seen.update, data.data),
        ]


def _settle(busy: list[Future[None]]) -> None:
    for future in busy:
        result_of(future)
    busy.clear()


def pages(size: int) -> Bytes:
    """Return memory whose address suits a disk."""
    return torch.empty([size], dtype=torch.uint8).numpy()


@contextmanager
def outlet() -> Iterator[Outlet]:
    """Yield an Outlet; what is not written when it is left is given up."""
    with threads(hash_result=1, disk_result=1) as (hasher, disk):
        yield Outlet(hasher, disk, tuple(pages(PIECE) for _ in range(GATHERED)))


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
