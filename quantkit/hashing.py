"""SHA-256 of files: at once, by and by between other work, or behind the one who writes them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import suppress
from io import FileIO
from pathlib import Path

from quantkit.errors import CheckpointError
from quantkit.storage import guarded, open_regular

#: Bytes hashed at a time: they stay in the cache between reading and hashing.
PIECE = 2**20


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file, read in pieces."""
    found: dict[str, str] = {}
    for _ in hashed({"": path}, found):
        pass
    return found[""]


def hashed(paths: Mapping[str, Path], found: dict[str, str]) -> Iterator[int]:
    """Hash regular files by and by: yields the bytes of each piece, and puts each file's SHA-256 into `found`."""
    buffer = memoryview(bytearray(PIECE))
    for name, path in paths.items():
        seen = hashlib.sha256()
        with open_regular(path) as file, guarded(path):
            while size := file.readinto(buffer):
                seen.update(buffer[:size])
                yield size
        found[name] = seen.hexdigest()


class Behind:
    """Hashes a file that is still growing in the one thread of `hasher`, which also sends it to the disk."""

    def __init__(self, path: Path, hasher: Executor) -> None:
        self._path, self._hasher = path, hasher
        self._file, self._seen, self._at = open_regular(path), hashlib.sha256(), 0
        self._buffer = memoryview(bytearray(PIECE))

    def reach(self, end: int) -> Future[str]:
        """Hash on to byte `end`, up to which the file is written; the result is the SHA-256 of all before it."""
        return self._hasher.submit(self._reach, end)

    def close(self) -> None:
        """Let go of the file, after what was asked for."""
        self._hasher.submit(self._file.close).result()

    def _reach(self, end: int) -> str:
        start = self._at
        with guarded(self._path):
            while self._at < end:
                size = self._file.readinto(self._buffer[: end - self._at])
                if not size:
                    raise CheckpointError(f"{self._path}: was cut off while it was written: run again")
                self._seen.update(self._buffer[:size])
                self._at += size
        _begin_sync(self._file, start, end - start)
        return self._seen.hexdigest()


def _begin_sync(file: FileIO, start: int, size: int) -> None:
    """Let the disk begin with some bytes of a file, so that who syncs it waits for the last of them only.

    To advise that they are not needed does that at once on Linux, and drops only what is on the disk already.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_DONTNEED)
