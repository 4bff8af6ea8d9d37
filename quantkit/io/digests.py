"""Digests of single tensors, kept in a weight file's own metadata: a lost report does not lose them.

A digest is the BLAKE3 of one line of JSON, `[name, dtype, shape]`, and the tensor's bytes. So it also covers the entry
in the header.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from quantkit.io.files import guarded, open_regular
from quantkit.io.hashing import PIECE
from quantkit.io.safetensors_header import DTYPE_NAMES, read_header

#: The key of a file's metadata that holds the digests of its tensors, in the order of their bytes, without a separator.
KEY = "quantkit.blake3"
#: Hexadecimal digits of a digest.
DIGITS = 64


def begin(name: str, dtype: str, shape: Sequence[int]) -> blake3:
    """Begin the digest of a tensor, which is to be fed its bytes; `dtype` is the name that the header has."""
    entry = json.dumps([name, dtype, list(shape)], ensure_ascii=False, separators=(",", ":"))
    return blake3(f"{entry}\n".encode())


def damaged_tensors(path: Path) -> list[str] | None:
    """List the tensors of a weight file that do not have their digests, None if it has no digests.

    CheckpointError if the file cannot be read, or its header is malformed.
    """
    tensors, metadata = read_header(path)
    if KEY not in metadata:
        return None
    stated = re.findall(f"[0-9a-f]{{{DIGITS}}}", metadata[KEY])
    if len(metadata[KEY]) != DIGITS * len(tensors) or len(stated) != len(tensors):
        return list(tensors)
    found, buffer = [], memoryview(bytearray(PIECE))
    with open_regular(path) as file, guarded(path):
        for (name, info), digest in zip(tensors.items(), stated, strict=True):
            seen, left = begin(name, DTYPE_NAMES[info.dtype], info.shape), info.end - info.start
            file.seek(info.start)
            while left and (size := file.readinto(buffer[: min(PIECE, left)])):
                seen.update(buffer[:size])
                left -= size
            if seen.hexdigest() != digest:
                found.append(name)
    return found
