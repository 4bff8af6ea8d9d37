"""Hashes of whole files, as reports and journals list them: text that says which hash it is.

They are BLAKE3: like SHA-256 it has 256 bits and stands against intent as well as against chance, and it is several
times as fast, so that to hash both ends of a conversion is not most of it. What older reports list is SHA-256, without
a prefix.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from blake3 import blake3

from quantkit.io.files import guarded, open_regular

KIND = "blake3"
#: Bytes hashed at a time: they stay in the cache between reading and hashing.
PIECE = 2**20


class Hash:
    """The hash of bytes that come piece by piece; of the kind of `like`, a recorded hash, if that is given."""

    def __init__(self, like: object = None) -> None:
        older = isinstance(like, str) and re.fullmatch("[0-9a-f]{64}", like)
        self._seen: Any = hashlib.sha256() if older else blake3()
        self._prefix = "" if older else f"{KIND}:"

    def update(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        self._seen.update(data)

    def text(self) -> str:
        """Return `blake3:<hex>`, or a SHA-256 without a prefix."""
        return f"{self._prefix}{self._seen.hexdigest()}"


def hash_of(data: bytes) -> str:
    """Return the hash of bytes."""
    seen = Hash()
    seen.update(data)
    return seen.text()


def hash_of_file(path: Path, like: object = None) -> str:
    """Return the hash of a regular file, read in pieces; of the kind of `like`, a recorded hash, if that is given."""
    seen, buffer = Hash(like), memoryview(bytearray(PIECE))
    with open_regular(path) as file, guarded(path):
        while size := file.readinto(buffer):
            seen.update(buffer[:size])
    return seen.text()
