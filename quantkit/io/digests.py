"""Digests of single tensors in a weight file's own metadata: a lost report does not lose them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from quantkit.io.files import guarded, open_regular
from quantkit.io.hashing import PIECE, begin_tensor
from quantkit.io.safetensors_header import DTYPE_NAMES, TensorInfo, read_header

#: The key of a file's metadata that holds the digests of its tensors, in the order of their bytes,
#: without a separator.
KEY = "quantkit.blake3"
#: Hexadecimal digits of a digest.
DIGITS = 64


def stated(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the digest of each tensor, as a header states them; {} if it does not, or not for
    each.
    """
    found, text = re.findall(f"[0-9a-f]{{{DIGITS}}}", metadata.get(KEY, "")), metadata.get(KEY, "")
    whole = len(text) == DIGITS * len(tensors) and len(found) == len(tensors)
    return dict(zip(tensors, found, strict=True)) if whole else {}


def damaged_tensors(path: Path) -> list[str] | None:
    """List the tensors of a weight file that do not have their digests, None if it has no digests.

    CheckpointError if the file cannot be read, or its header is malformed.
    """
    tensors, metadata = read_header(path)
    if KEY not in metadata:
        return None
    digests = stated(tensors, metadata)
    if not digests:
        return list(tensors)
    found, buffer = [], memoryview(bytearray(PIECE))
    with open_regular(path) as file, guarded(path):
        for name, info in tensors.items():
            seen, left = (
                begin_tensor(name, DTYPE_NAMES[info.dtype], info.shape),
                info.end - info.start,
            )
            file.seek(info.start)
            while left and (size := file.readinto(buffer[: min(PIECE, left)])):
                seen.update(buffer[:size])
                left -= size
            if seen.hexdigest() != digests[name]:
                found.append(name)
    return found
