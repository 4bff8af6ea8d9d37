"""Headers of GGUF files: metadata and tensors, checked before a library reads the file.

The readers of other libraries trust the numbers of a header, and can fill the memory. A file passes
here only if each length, count, size and offset fits in the file. Source: the GGUF specification,
versions 2 and 3 (ggml, docs/gguf.md).
"""

from __future__ import annotations

import os
import struct
from io import RawIOBase
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from quantkit.errors import CheckpointError
from quantkit.io import files
from quantkit.io.json_files import AGAIN, shown
from quantkit.io.safetensors_files import NAME_LIMIT
from quantkit.names import Json

#: Type of a value -> its form in `struct`. A text is a length and its bytes; a list is a type, a
#: count and its values.
FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
#: The most bytes of all texts, values of all lists (readers keep an object for each), tensors, and
#: dimensions. A vocabulary of 262,144 tokens has 1.3 million values with its merges.
TEXT_LIMIT, VALUES_LIMIT, TENSORS_LIMIT, RANK_LIMIT = 2**26, 2**21, 10**5, 4
#: The longest list whose values are read with the header, and the bytes that are read at a time.
KEPT, PIECE = 2**10, 2**22
LENGTH = struct.Struct("<Q")


class GgufTensor(NamedTuple):
    """Hold a tensor's entry: its number format, its shape in the order of torch, and where its
    bytes are.

    The format is a number in a file, and later its name in the package gguf.
    """

    kind: Any
    shape: tuple[int, ...]
    start: int
    nbytes: int


class GgufList(NamedTuple):
    """Hold a long list of a header as its bytes: a vocabulary costs time only if text is read."""

    kind: int
    size: int
    data: bytes

    def values(self) -> list[Any]:
        """Read the values; a character of a text that is not UTF-8 becomes U+FFFD."""
        if self.kind != TEXT:
            return list(struct.unpack(f"<{self.size}{FORMS[self.kind]}", self.data))
        found, at = [], 0
        for _ in range(self.size):
            (length,) = LENGTH.unpack_from(self.data, at)
            found.append(self.data[at + 8 : at + 8 + length].decode(errors="replace"))
            at += 8 + length
        return found


class GgufHeader(NamedTuple):
    """Hold the metadata of a GGUF file, with a `GgufList` for a long list, and its tensors in the
    order of the file.
    """

    metadata: Json
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path, blocks: dict[int, tuple[int, int]]) -> GgufHeader:
    """Read the header of a GGUF file; `blocks` maps each number format to (values, bytes) of a
    block.

    CheckpointError for a file that is cut, of another kind or version, or whose header has a number
    that does not fit.
    """
    with files.open_regular(path) as file, files.guarded(path):
        return _Header(path, file, os.fstat(file.fileno()).st_size).read(blocks)


class _Header:
    def __init__(self, path: Path, file: RawIOBase, size: int) -> None:
        self.path, self.file, self.size, self.values, self.texts = path, file, size, 0, 0
        self.data, self.at = bytearray(), 0

    def read(self, blocks: dict[int, tuple[int, int]]) -> GgufHeader:
        if self.size < 24 or self.bytes(4) != b"GGUF":
            self.damaged("is no GGUF file, or is cut in its first bytes")
        (version,) = self.numbers("I")
        if version not in (2, 3):
            raise CheckpointError(
                f"is of GGUF version {version}, or big-endian: versions 2 and 3 are read",
                "take another file of the model",
                subject=self.path,
            )
        tensors, count = self.numbers("QQ")
        if tensors > TENSORS_LIMIT or count > TENSORS_LIMIT:
            self.damaged(f"states {tensors} tensors and {count} keys, the limit is {TENSORS_LIMIT}")
        metadata: Json = {}
        for _ in range(count):
            key = self.name("key", metadata)
            metadata[key] = self.value(self.numbers("I")[0], key)
        listed: dict[str, tuple[int, tuple[int, ...], int]] = {}
        for _ in range(tensors):
            name = self.name("tensor", listed)
            (rank,) = self.numbers("I")
            if not 1 <= rank <= RANK_LIMIT:
                self.damaged(f"gives {shown(name)} {rank} dimensions, the limit is {RANK_LIMIT}")
            shape = tuple(reversed(self.numbers(f"{rank}Q")))
            kind, offset = self.numbers("IQ")
            listed[name] = kind, shape, offset
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 2**16 or alignment & (alignment - 1):
            self.damaged(f"has general.alignment {shown(alignment)}")
        first = -(-self.at // alignment) * alignment
        placed = {
            name: self.tensor(name, first, alignment, blocks, *entry)
            for name, entry in listed.items()
        }
        for (_, before), (name, after) in pairwise(
            sorted(placed.items(), key=lambda item: item[1].start)
        ):
            if before.start + before.nbytes > after.start:
                self.damaged(f"has bytes of {shown(name)} inside another tensor")
        return GgufHeader(metadata, placed)

    def tensor(
        self, name: str, first: int, alignment: int, blocks: dict[int, tuple[int, int]], *entry: Any
    ) -> GgufTensor:
        kind, shape, offset = entry
        if kind not in blocks:
            raise CheckpointError(
                f"{shown(name)} has number format {kind}, which the package gguf does not know",
                "upgrade it",
                "take another file of the model",
                subject=self.path,
            )
        values, size = blocks[kind]
        count = prod(shape)
        if not count or count > 8 * self.size * values or shape[-1] % values:
            self.damaged(f"gives {shown(name)} the shape {list(shape)}")
        nbytes = count // values * size
        if offset % alignment or first + offset + nbytes > self.size:
            self.damaged(
                f"should have {nbytes} bytes of {shown(name)} at {first + offset} and ends at "
                f"{self.size}"
            )
        return GgufTensor(kind, shape, first + offset, nbytes)

    def value(self, kind: int, key: str) -> Any:
        """Read a value; a long list is held as its bytes."""
        if kind in FORMS:
            return self.numbers(FORMS[kind])[0]
        if kind == TEXT:
            return self.text(key)
        if kind != LIST:
            self.damaged(f"has a value of type {kind} under {shown(key)}")
        kind, count = self.numbers("IQ")
        self.values += count
        if kind not in (*FORMS, TEXT) or self.values > VALUES_LIMIT:
            self.damaged(
                f"lists {count} values of type {kind} under {shown(key)}, the limit is "
                f"{VALUES_LIMIT} in all"
            )
        if count <= KEPT:
            return [self.value(kind, key) for _ in range(count)]
        start = self.at
        length, skip = self.length, self.skip
        for _ in range(count if kind == TEXT else 0):
            skip(length(key))
        self.skip(count * struct.calcsize(f"<{FORMS.get(kind, '0s')}"))
        return GgufList(kind, count, bytes(self.data[start : self.at]))

    def name(self, what: str, known: Json) -> str:
        name = self.text(what)
        if not 0 < len(name) <= NAME_LIMIT or not name.isprintable():
            self.damaged(
                f"has a {what} whose name is empty, too long or not printable: {shown(name)}"
            )
        if name in known:
            self.damaged(f"has the {what} {shown(name)} twice")
        return name

    def text(self, key: str) -> str:
        try:
            return self.bytes(self.length(key)).decode()
        except UnicodeDecodeError:
            self.damaged(f"has a text that is not UTF-8 ({shown(key)})")

    def length(self, key: str) -> int:
        """Read the length of a text."""
        length: int = LENGTH.unpack_from(self.data, self.skip(8))[0]
        self.texts += length
        if self.texts > TEXT_LIMIT:
            self.damaged(
                f"states a text of {length} bytes under {shown(key)}, the limit is {TEXT_LIMIT} in "
                "all"
            )
        return length

    def numbers(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self.bytes(struct.calcsize(f"<{form}")))

    def bytes(self, count: int) -> bytes:
        start = self.skip(count)
        return bytes(self.data[start : self.at])

    def skip(self, count: int) -> int:
        """Go on by some bytes, which are in `data` then, and return the position before."""
        start, self.at = self.at, self.at + count
        while self.at > len(self.data):
            more = self.file.read(PIECE) if self.at <= self.size else None
            if not more:
                self.damaged(f"is cut at byte {self.size}, inside its header")
            self.data += more
        return start

    def damaged(self, what: str) -> NoReturn:
        raise CheckpointError(what, AGAIN, subject=self.path)
