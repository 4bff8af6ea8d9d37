"""SHA-256 of files: at once, or by and by between other work."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

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
            while size := file.readinto(buffer):  # type: ignore[attr-defined]
                seen.update(buffer[:size])
                yield size
        found[name] = seen.hexdigest()
