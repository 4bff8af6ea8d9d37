"""The reading side of safetensors: headers, checked before anything is allocated (RELIABILITY 1.5).

A file is an 8-byte length, a JSON header and the tensors' bytes; `safetensors_writer` is the
writing side.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import CheckpointError
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
        raise CheckpointError(
            f"{shown(name)} has dtype {shown(dtype)}: quantkit reads {', '.join(DTYPES)}, convert "
            "it first",
            subject=path,
        )
    if not _sizes(shape) or len(shape) > RANK_LIMIT:
        damaged(path, f"gives {shown(name)} the shape {shown(shape)}")
    if not _sizes(offsets) or len(offsets) != 2:
        damaged(path, f"gives {shown(name)} the byte range {shown(offsets)}")
    size = DTYPES[dtype].itemsize
    for n in shape:
        size *= n
    if offsets[1] - offsets[0] != size:
        damaged(
            path, f"gives {shown(name)} {offsets[1] - offsets[0]} bytes, {dtype} {shape} has {size}"
        )
    return TensorInfo(DTYPES[dtype], tuple(shape), first + offsets[0], first + offsets[1])


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)
