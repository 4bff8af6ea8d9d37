"""Hashes of whole files, as reports and journals list them.

A hash is text that names its kind: `blake3:<hex>`. BLAKE3 has 256 bits like SHA-256 and is several
times as fast. Older reports list SHA-256 without a prefix.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from quantkit.io.files import guarded, open_regular

KIND = "blake3"
#: Bytes that are hashed at a time: small enough to stay in a core's cache between reading and
#: hashing.
PIECE = 2**20


def hash_of(data: bytes) -> str:
    """Hash bytes."""
    return f"{KIND}:{blake3(data).hexdigest()}"


def begin_tensor(name: str, dtype: str, shape: Sequence[int]) -> blake3:
    """Begin the BLAKE3 of a tensor: of a line of JSON, `[name, dtype of safetensors, shape]`, and
    of its bytes.
    """
    entry = json.dumps([name, dtype, list(shape)], ensure_ascii=False, separators=(",", ":"))
    return blake3(f"{entry}\n".encode())


def hash_of_file(
    path: Path,
    like: object = None,
    see: Callable[[int, memoryview], None] = lambda start, piece: None,
    borders: Sequence[int] = (),
) -> str:
    """Hash a regular file, with SHA-256 if `like`, a recorded hash, is one, and else with BLAKE3.

    `see` is given every piece that was read and where it starts. No piece goes over one of the
    ascending `borders`. CheckpointError if the file cannot be read.
    """
    older = isinstance(like, str) and re.fullmatch("[0-9a-f]{64}", like)
    seen: Any = hashlib.sha256() if older else blake3()
    buffer, start = memoryview(bytearray(PIECE)), 0
    with open_regular(path) as file, guarded(path):
        for end in (*borders, None):
            while size := file.readinto(buffer if end is None else buffer[: end - start]):
                seen.update(buffer[:size])
                see(start, buffer[:size])
                start += size
    return str(seen.hexdigest()) if older else f"{KIND}:{seen.hexdigest()}"
