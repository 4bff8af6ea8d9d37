"""Safetensors files: headers checked before anything is allocated (RELIABILITY 1.5), and a writer.

A file is an 8-byte length, a JSON header and the tensors' bytes. The writer streams one file, with
one tensor in memory at a time. The header comes first, so space for it is reserved, and filled in
when the file is closed. Its metadata holds the digest of each tensor: a lost report does not lose
them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.core.formats import raw_bytes
from quantkit.errors import CheckpointError, Option, Words
from quantkit.io import files
from quantkit.io.json_files import damaged, parse, shown

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

HEADER_LIMIT = 100 * 2**20
TENSORS_LIMIT = 10**6
NAME_LIMIT = 512
RANK_LIMIT = 8


@dataclass(frozen=True)
class TensorInfo:
    """Hold a tensor's entry of a header; `start` and `end` are offsets of its bytes in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Read the tensors of a safetensors file in file order, and its metadata.

    CheckpointError for anything but a regular file whose header is well formed and covers the whole
    file: known dtypes, ranks up to 8, byte ranges of the right size that follow each other without
    gaps from the header's end to the file's end, no name twice, no name that is not printable.
    """
    with files.open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 10:
            damaged(path, f"is {size} bytes long and no safetensors file")
        length = int.from_bytes(files.read_exactly(file, 0, 8, path).numpy().tobytes(), "little")
        if length > HEADER_LIMIT or length > size - 8:
            damaged(
                path,
                f"states a header of {length} bytes, it has {size} and the limit is {HEADER_LIMIT}",
            )
        header = files.read_exactly(file, 8, length, path).numpy().tobytes()
    return parse_header(header, size - 8 - length, path)


def parse_header(
    header: bytes, data_bytes: int, path: Path
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Parse a header's bytes in front of `data_bytes` bytes, as `read_header`; `path` is for the
    errors.
    """
    entries = parse(header, path)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        damaged(path, "has __metadata__ that is not text")
    if len(entries) > TENSORS_LIMIT:
        damaged(path, f"lists {len(entries)} tensors, the limit is {TENSORS_LIMIT}")
    first = 8 + len(header)
    tensors = [(name, _tensor_info(name, entry, first, path)) for name, entry in entries.items()]
    tensors.sort(key=lambda item: (item[1].start, item[1].end))
    end = first
    for name, info in tensors:
        if info.start != end:
            damaged(path, f"has bytes of {shown(name)} at {info.start}, where {end} is due")
        end = info.end
    if end != first + data_bytes:
        damaged(path, f"should end at byte {end} and ends at {first + data_bytes}")
    return dict(tensors), metadata


def _tensor_info(name: str, entry: Any, first: int, path: Path) -> TensorInfo:
    if not 0 < len(name) <= NAME_LIMIT or not name.isprintable():
        damaged(path, f"has a tensor name that is empty, too long or not printable: {shown(name)}")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        damaged(path, f"does not say dtype, shape and data_offsets of {shown(name)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        way = (
            "MLX packs weights so: use the model from which it was made, or mlx_lm.convert -d"
            if dtype == "U32"
            else f"quantkit reads {', '.join(DTYPES)}, convert it first"
        )
        raise CheckpointError(f"{shown(name)} has dtype {shown(dtype)}", way, subject=path)
    if not _sizes(shape) or len(shape) > RANK_LIMIT:
        damaged(path, f"gives {shown(name)} the shape {shown(shape)}")
    if not _sizes(offsets) or len(offsets) != 2:
        damaged(path, f"gives {shown(name)} the byte range {shown(offsets)}")
    size = DTYPES[dtype].itemsize * prod(shape)
    if offsets[1] - offsets[0] != size:
        damaged(
            path, f"gives {shown(name)} {offsets[1] - offsets[0]} bytes, {dtype} {shape} has {size}"
        )
    return TensorInfo(DTYPES[dtype], tuple(shape), first + offsets[0], first + offsets[1])


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


#: The key of a file's metadata that holds the digests of its tensors, in the order of their bytes,
#: without a separator.
DIGESTS = "quantkit.blake3"
#: Hexadecimal digits of a digest.
DIGITS = 64


def stated_digests(
    tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]
) -> dict[str, str]:
    """Return the digest of each tensor, as a header states them; {} unless it states each."""
    text = metadata.get(DIGESTS, "")
    found = re.findall(f"[0-9a-f]{{{DIGITS}}}", text)
    whole = len(text) == DIGITS * len(tensors) and len(found) == len(tensors)
    return dict(zip(tensors, found, strict=True)) if whole else {}


def damaged_tensors(path: Path) -> list[str] | None:
    """List the tensors of a weight file that do not have their digests, None if it has no digests.

    CheckpointError if the file cannot be read, or its header is malformed.
    """
    tensors, metadata = read_header(path)
    if DIGESTS not in metadata:
        return None
    digests = stated_digests(tensors, metadata)
    if not digests:
        return list(tensors)
    with files.open_regular(path) as file, files.guarded(path):
        found = {name: _digest(file, name, info) for name, info in tensors.items()}
    return [name for name, digest in found.items() if digest != digests[name]]


def _digest(file: FileIO, name: str, info: TensorInfo) -> str:
    """Return the digest of a tensor in an open file."""
    seen = files.begin_tensor(name, DTYPE_NAMES[info.dtype], info.shape)
    buffer, left = memoryview(bytearray(files.PIECE)), info.end - info.start
    file.seek(info.start)
    while left and (size := file.readinto(buffer[: min(files.PIECE, left)])):
        seen.update(buffer[:size])
        left -= size
    return seen.hexdigest()


#: Bytes that a header with its length takes, padded with spaces, unless a file is made for more
#: tensors.
RESERVED = 64 * 2**10


def _metadata(stated: str = "") -> dict[str, dict[str, str]]:
    return {"__metadata__": {"format": "pt", DIGESTS: stated}}


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
    memory until then. `flushed` are the rows of all `flush` of a writer that was stopped: its file
    is continued, and can be read until the next `add`. CheckpointError if their tensors changed.
    """

    def __init__(
        self, path: Path, reserved: int = RESERVED, flushed: Iterable[Sequence[Any]] = ()
    ) -> None:
        self.path = path
        self.size = FileSize(reserved)
        self._end = reserved
        self._tensors: dict[str, TensorInfo] = {}
        self._digests: dict[str, str] = {}
        self._last: dict[str, bytes] = {}
        rows = [*flushed]
        self._flushed = len(rows)
        with files.guarded(path):
            self._file = files.create(path, emptied=not rows)
        for name, dtype, shape, digest, late in rows:
            info = self._place(name, DTYPES[dtype], tuple(shape), digest)
            if late:
                self._last[name] = bytes.fromhex(late)
            elif _digest(self._file, name, info) != digest:
                raise changed(path)
        if rows:
            files.truncate(self._file, self._end, path)
            self._write_ends()

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
        seen = files.begin_tensor(name, DTYPE_NAMES[tensor.dtype], tensor.shape)
        digest = seen.update(data).hexdigest()
        info = self._place(name, tensor.dtype, tuple(tensor.shape), digest)
        if len(data) % 8:
            self._last[name] = bytes(data)
        else:
            self._file.seek(info.start)
            files.write(self._file, data, self.path)
        return digest

    def _place(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], digest: str
    ) -> TensorInfo:
        """Note a tensor and its place, which is none yet if it comes last."""
        size = dtype.itemsize * prod(shape)
        info = TensorInfo(dtype, shape, self._end, self._end + size)
        self._tensors[name], self._digests[name] = info, digest
        self.size.add(name, size)
        self._end += 0 if size % 8 else size
        return info

    def flush(self) -> list[list[Any]]:
        """Make all tensors so far durable, and return a row of JSON for each since the last call.

        A row has name, dtype, shape, digest, and the bytes in hexadecimal digits of a tensor that
        comes last.
        """
        self._sync()
        names = [*self._tensors][self._flushed :]
        self._flushed = len(self._tensors)
        return [
            [
                name,
                DTYPE_NAMES[(info := self._tensors[name]).dtype],
                info.shape,
                self._digests[name],
                self._last.get(name, b"").hex(),
            ]
            for name in names
        ]

    def close(self) -> str:
        """Write the header, make the file durable and return its hash."""
        with self._file:
            self._write_ends()
            self._sync()
        return files.hash_of_file(self.path)

    def _sync(self) -> None:
        files.sync(self._file, self.path)
        files.sync_folder(self.path.parent)

    def _write_ends(self) -> None:
        """Write the tensors that come last, and the header; the file ends with them."""
        late = sorted(self._last, key=lambda name: -self._tensors[name].dtype.itemsize)
        self._file.seek(self._end)
        files.write(self._file, memoryview(b"".join(self._last[name] for name in late)), self.path)
        self._file.seek(0)
        files.write(self._file, memoryview(self._header(late)), self.path)

    def _header(self, late: list[str]) -> bytes:
        entries, end = {}, 0
        for name in (*(name for name in self._tensors if name not in self._last), *late):
            info = self._tensors[name]
            start, end = end, end + info.end - info.start
            entries[name] = {
                "dtype": DTYPE_NAMES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [start, end],
            }
        stated = _metadata("".join(self._digests[name] for name in entries))
        text = json.dumps(stated | entries, ensure_ascii=False, separators=(",", ":")).encode()
        space = self.size.reserved - 8
        return space.to_bytes(8, "little") + text.ljust(space)


def changed(path: Path) -> CheckpointError:
    """Make the error for a file of an earlier run that has changed."""
    return CheckpointError(
        "changed since it was written",
        Words("start over with", Option("overwrite", True)),
        subject=path,
    )


def _entry_bytes(name: str) -> int:
    """Bound a header entry's bytes: the quoted and escaped name, a rank of at most 8, two offsets,
    and a digest.
    """
    return len(json.dumps(name)) + 64 + 10 * 20 + DIGITS
