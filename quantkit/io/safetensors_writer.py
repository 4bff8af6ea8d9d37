"""The writing side of safetensors: one file, streamed, holding one tensor at a time.

The format puts the header first, so room for it is reserved, and filled in last. Where it is known before, it is
written first: then the file can be hashed and sent to the disk behind the writing, and nothing is left for later.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from quantkit.core.tensors import raw_bytes
from quantkit.errors import CheckpointError
from quantkit.io import files, hashing
from quantkit.io.direct import PAGE, Outlet, Written
from quantkit.io.safetensors_header import DTYPE_NAMES

#: What the bytes of a header with its length are a multiple of, padded with spaces, and all that is reserved for one
#: that is not known before; and the bytes of a tensor that is not small.
RESERVED = 64 * 2**10
#: The most bytes of a header that is known before, and of the tensors that come last, which are in memory until then.
HEADER = 4 * 2**20
LAST = 32 * 2**20
_METADATA = {"__metadata__": {"format": "pt"}}


@dataclass
class Contents:
    """Dtypes and shapes of a file's tensors by name, in the order of `add`, and the bytes that they take (`size`).

    Tensors lie gap-free in this order, but for these, which come last, by their dtypes' sizes: those whose size is not
    a multiple of 8 bytes (small ones, in practice), because readers need every tensor aligned to its dtype; and small
    ones that are not whole pages, because behind them a disk takes no tensor from where it lies.
    """

    most: int = RESERVED
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)
    size: int = 0
    _last: int = 0
    _header: int = len(json.dumps(_METADATA))

    def fits(self, name: str, size: int) -> bool:
        """Return whether the header has room for one more tensor of this name, and memory if it is to come last."""
        waits = self._last + size if self._last and _comes_last(size) else 0
        return self._header + _entry_room(name) <= self.most - 8 and waits <= LAST

    def add(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Append a tensor."""
        size = prod(shape) * dtype.itemsize
        self.tensors[name] = dtype, shape
        self.size += size
        self._last += size if _comes_last(size) else 0
        self._header += _entry_room(name)

    def waiting(self) -> list[str]:
        """Return the names of the tensors that come last, in their order."""
        late = [name for name, (dtype, shape) in self.tensors.items() if _comes_last(prod(shape) * dtype.itemsize)]
        return sorted(late, key=lambda name: -self.tensors[name][0].itemsize)

    def header(self) -> bytes:
        """Return the file's first bytes, a multiple of `RESERVED`."""
        entries, end, last = {}, 0, dict.fromkeys(self.waiting())
        for name in (*(name for name in self.tensors if name not in last), *last):
            dtype, shape = self.tensors[name]
            start, end = end, end + prod(shape) * dtype.itemsize
            entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(_METADATA | entries, ensure_ascii=False, separators=(",", ":")).encode()
        size = -(-(8 + len(text)) // RESERVED) * RESERVED - 8
        return size.to_bytes(8, "little") + text.ljust(size)


class TensorFile:
    """Streams one safetensors file, holding one tensor at a time, and those that come last.

    `planned` is what it is going to hold, if that is known, and `outlet` what it then goes through, hashed on the way.
    A file that comes to hold something else is hashed at the end, as one without a plan is.
    """

    def __init__(self, path: Path, planned: Contents | None = None, outlet: Outlet | None = None) -> None:
        self.path = path
        self.contents = Contents(RESERVED if planned is None else planned.most)
        self._waiting: dict[str, bytes] = {}  # not tensors, which would keep gaps in the allocator's memory open
        self._header = b""
        self._written: Written | None = None
        with files.guarded(path):
            self._file = files.create(path)
        if planned is not None and outlet is not None:
            self._header = planned.header()
            self._written = Written(self._file, path, outlet)
            self._written.write(torch.frombuffer(bytearray(self._header), dtype=torch.uint8))
        else:
            self._file.seek(RESERVED)

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor; CheckpointError for a second one of its name, an unknown dtype or a full header."""
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{name}: safetensors files here do not hold {tensor.dtype}: convert it first")
        size = tensor.numel() * tensor.dtype.itemsize
        if name in self.contents.tensors or not self.contents.fits(name, size):
            what = "already has" if name in self.contents.tensors else "has no room in its header for"
            raise CheckpointError(f"{self.path.name} {what} a tensor {name}")
        self.contents.add(name, tensor.dtype, tuple(tensor.shape))
        if _comes_last(size):
            self._waiting[name] = raw_bytes(tensor).numpy().tobytes()
        else:
            self._append(raw_bytes(tensor))

    def close(self) -> str:
        """Write the header, make the file durable and return the hash of all of it."""
        if rest := bytearray().join(self._waiting[name] for name in self.contents.waiting()):
            self._append(torch.frombuffer(rest, dtype=torch.uint8))
        header = self.contents.header()
        if len(header) != (len(self._header) or RESERVED):
            raise CheckpointError(f"{self.path.name}: holds other tensors than were planned: a bug, please report it")
        with self._file, ThreadPoolExecutor(1, "quantkit-hash") as pool:
            digest = self._written.finish() if self._written is not None else ""
            found = None
            if header != self._header:
                self._file.seek(0)
                files.write(self._file, memoryview(header), self.path)
                found = pool.submit(hashing.hash_of_file, self.path)  # from the page cache, while the disk works
            files.sync(self._file, self.path)
            files.sync_folder(self.path.parent)
            return digest if found is None else found.result()

    def _append(self, data: Tensor) -> None:
        if self._written is not None:
            self._written.write(data)
        else:
            files.write(self._file, data.numpy().data, self.path)


def _comes_last(size: int) -> bool:
    return size % 8 > 0 or (size % PAGE > 0 and size < RESERVED)


def _entry_room(name: str) -> int:
    """An upper bound of a header entry's bytes: the quoted name, escaped here, a rank of at most 8, two offsets."""
    return len(json.dumps(name)) + 64 + 10 * 20
