"""SHA-256 of whole files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from quantkit.storage import guarded, open_regular

#: Bytes hashed at a time: they stay in the cache between reading and hashing.
PIECE = 2**20


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file, read in pieces."""
    seen, buffer = hashlib.sha256(), memoryview(bytearray(PIECE))
    with open_regular(path) as file, guarded(path):
        while size := file.readinto(buffer):
            seen.update(buffer[:size])
    return seen.hexdigest()
