"""The writing side of safetensors: one file, streamed, one tensor in memory at a time.

The format puts the header first, so space for it is reserved, and filled in when the file is
closed. Its metadata holds the digest of each tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from quantkit.core.tensors import raw_bytes
from quantkit.errors import CheckpointError
from quantkit.io import digests, files, hashing
from quantkit.io.safetensors_header import DTYPE_NAMES

#: Bytes that a header with its length takes, padded with spaces, unless a file is made for more
#: tensors.
RESERVED = 64 * 2**10


def _metadata(stated: str = "") -> dict[str, dict[str, str]]:
    return {"__metadata__": {"format": "pt", digests.KEY: stated}}


def header_bytes(names: Iterable[str]) -> int:
    """Return the bytes to reserve for the header of a file with tensors of these names, a multiple
    of RESERVED.
    """
    needed = 8 + len(json.dumps(_metadata())) + sum(map(_entry_bytes, names))
    return -(-needed // RESERVED) * RESERVED


class FileSize:
    """Count the bytes of one file while tensors are added, and the space left in its header,
    without writing it.
    """

    def __init__(self, reserved: int = RESERVED) -> None:
        self.reserved, self.tensors = reserved, 0
        self._left = reserved - 8 - len(json.dumps(_metadata()))

    @property
    def total(self) -> int:
        """The bytes of the file, header included."""
        return self.reserved + self.tensors

    def fits(self, name: str) -> bool:
        """Say whether the header has space for one more tensor of this name."""
        return _entry_bytes(name) <= self._left

    def add(self, name: str, nbytes: int) -> None:
        """Count a tensor."""
        self._left -= _entry_bytes(name)
        self.tensors += nbytes


class SafetensorsWriter:
    """Streams one safetensors file; `size` is its bytes so far.

    Tensors lie without gaps in the order of `add`. Readers need every tensor aligned to its dtype,
    so tensors of a size that is not a multiple of 8 bytes come last, by dtype size. They stay in
    memory until then.
    """

    def __init__(self, path: Path, reserved: int = RESERVED) -> None:
        self.path = path
        self.size = FileSize(reserved)
        self._tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._digests: dict[str, str] = {}
        self._last: dict[str, bytes] = {}
        with files.guarded(path):
            self._file = files.create(path)
        self._file.seek(reserved)

    def add(self, name: str, tensor: Tensor) -> str:
        """Append a tensor and return its digest.

        CheckpointError for a second one of its name, an unknown dtype or a full header.
        """
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"safetensors files here do not hold {tensor.dtype}",
                "convert it first",
                subject=name,
            )
        if name in self._tensors or not self.size.fits(name):
            what = "already has" if name in self._tensors else "has no space in its header for"
            raise CheckpointError(f"{self.path.name} {what} a tensor {name}")
        data = raw_bytes(tensor).numpy().data
        self._tensors[name] = tensor.dtype, tuple(tensor.shape)
        seen = hashing.begin_tensor(name, DTYPE_NAMES[tensor.dtype], tensor.shape)
        self._digests[name] = seen.update(data).hexdigest()
        self.size.add(name, len(data))
        if len(data) % 8:
            self._last[name] = bytes(data)
        else:
            files.write(self._file, data, self.path)
        return self._digests[name]

    def close(self) -> str:
        """Write the header, make the file durable and return its hash."""
        late = sorted(self._last, key=lambda name: -self._tensors[name][0].itemsize)
        with self._file:
            files.write(
                self._file, memoryview(b"".join(self._last[name] for name in late)), self.path
            )
            self._file.seek(0)
            files.write(self._file, memoryview(self._header(late)), self.path)
            files.sync(self._file, self.path)
            files.sync_folder(self.path.parent)
        return hashing.hash_of_file(self.path)

    def _header(self, late: list[str]) -> bytes:
        entries, end = {}, 0
        for name in (*(name for name in self._tensors if name not in self._last), *late):
            dtype, shape = self._tensors[name]
            start, end = end, end + prod(shape) * dtype.itemsize
            entries[name] = {
                "dtype": DTYPE_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [start, end],
            }
        stated = _metadata("".join(self._digests[name] for name in entries))
        text = json.dumps(stated | entries, ensure_ascii=False, separators=(",", ":")).encode()
        space = self.size.reserved - 8
        return space.to_bytes(8, "little") + text.ljust(space)


def _entry_bytes(name: str) -> int:
    """Bound a header entry's bytes: the quoted and escaped name, a rank of at most 8, two offsets,
    and a digest.
    """
    return len(json.dumps(name)) + 64 + 10 * 20 + digests.DIGITS
