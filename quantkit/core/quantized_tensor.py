"""The canonical record: every weight passes through one `QuantizedTensor`.

Algorithms produce it, layouts pack it and unpack to it, everything else is derived. There is no third state: no
"fake-quantized float" is handed around and divided back into codes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from xxhash import xxh3_128

from quantkit.core import sparsity
from quantkit.core.formats import FORMATS, Format
from quantkit.core.tensors import raw_bytes
from quantkit.errors import LayoutError, RecipeError

#: What a dense weight may be stored as.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: What digests are made with, as they say themselves.
DIGEST = "xxh3_128"
#: Bytes that a digest brings from a GPU at a time.
PIECE = 1 << 24


class _Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as configs and messages write it: `float16`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Scheme:
    """What is asked of a weight: format, columns per scale (None: one scale per row), symmetry, sparsity."""

    format: Format
    group_size: int | None = None
    symmetric: bool = True
    sparsity: Literal["2:4"] | None = None

    def __post_init__(self) -> None:
        if self.format.is_float and not self.symmetric:
            raise RecipeError(f"{self.format.name} is symmetric only: drop --asym or use --format int4")
        if self.sparsity is not None and (self.format.is_float or not self.symmetric):
            raise RecipeError(f"{self.sparsity} sparsity goes with symmetric integers only: use int4 without --asym")
        if self.group_size is not None and self.group_size < 1:
            raise RecipeError(f"group size {self.group_size} is not positive: use 128, 64, 32 or channel")

    def groups(self, k: int) -> int:
        """Return the number of scales per row; LayoutError if the group size, or 4 for 2:4, does not divide `k`."""
        if self.sparsity is not None:
            sparsity.quads(k)
        if self.group_size is None:
            return 1
        if k % self.group_size:
            raise LayoutError(
                f"group size {self.group_size} does not divide k = {k}: use --group-size channel or a divisor"
            )
        return k // self.group_size

    def whole(self, k: int) -> int:
        """Return the smallest number of columns, at least `k`, that is one of whole groups, and for 2:4 of quads."""
        unit = lcm(self.group_size or 1, sparsity.QUAD if self.sparsity else 1)
        return -(-k // unit) * unit

    @property
    def label(self) -> str:
        """A short name such as `int4:g128`, `int4:channel:asym`, `fp6:channel`; `Scheme.parse` reads it back."""
        parts = [self.format.name, f"g{self.group_size}" if self.group_size else "channel"]
        parts += [] if self.symmetric else ["asym"]
        parts += [self.sparsity.replace(":", "")] if self.sparsity else []
        return ":".join(parts)

    @staticmethod
    def parse(label: str) -> Scheme:
        """Read a label such as `int4:g64:asym` (the form of `--override`); RecipeError on anything else."""
        name, *rest = label.split(":")
        if name not in FORMATS:
            raise RecipeError(f"unknown format {name!r} in {label!r}: use one of {', '.join(FORMATS)}")
        options: dict[str, Any] = {}
        for part in rest:
            if part == "channel":
                options["group_size"] = None
            elif part == "asym":
                options["symmetric"] = False
            elif part == "24":
                options["sparsity"] = "2:4"
            elif re.fullmatch("g[0-9]{1,9}", part):
                options["group_size"] = int(part[1:])
            else:
                raise RecipeError(f"unknown part {part!r} in scheme {label!r}: write it like int4:g64:asym")
        return Scheme(FORMATS[name], **options)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantized weight `[n, k]`: codes, scales, and where the scheme has them zeros.

    `codes` uint8 `[n, k]`, one code a byte; `scales` float16 `[n, g]`; `zeros` uint8 `[n, g]`, a code, None when
    symmetric. In a 2:4 scheme at most two of each aligned four codes are not zero: no mask is kept beside the codes,
    since the 2:4 encoding is made from values (LAYOUTS 4.1). The constructor raises LayoutError when shapes, dtypes,
    code range or the pattern contradict the scheme.
    """

    scheme: Scheme
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    def __post_init__(self) -> None:
        if self.codes.dtype != torch.uint8 or self.codes.ndim != 2:
            raise LayoutError(f"codes must be uint8 [n, k], got {self.codes.dtype} {list(self.codes.shape)}")
        n, k = self.codes.shape
        g = self.scheme.groups(k)
        if self.scales.dtype != torch.float16 or tuple(self.scales.shape) != (n, g):
            raise LayoutError(f"scales must be float16 [{n}, {g}], got {self.scales.dtype} {list(self.scales.shape)}")
        if (self.zeros is None) != self.scheme.symmetric:
            raise LayoutError("zeros belong to asymmetric schemes, and only to them")
        if self.zeros is not None and (self.zeros.dtype != torch.uint8 or tuple(self.zeros.shape) != (n, g)):
            raise LayoutError(f"zeros must be uint8 [{n}, {g}], got {self.zeros.dtype} {list(self.zeros.shape)}")
        top = 2**self.scheme.format.bits
        for what, codes in (("codes", self.codes), ("zeros", self.zeros)):
            if codes is not None and codes.numel() and int(codes.max()) >= top:
                raise LayoutError(f"{what} reach {int(codes.max())}, {self.scheme.format.name} has 0 to {top - 1}")
        if self.scheme.sparsity is not None:
            sparsity.check(self.codes, self.scheme.format.zero_code)

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return `scales * (decode(codes) - decode(zeros))` `[n, k]`, in float32 and rounded once to `dtype`."""
        n, k = self.shape
        decode = self.scheme.format.decode
        values = decode(self.codes).view(n, self.scales.shape[1], -1)
        if self.zeros is not None:
            values -= decode(self.zeros).unsqueeze(-1)
        return values.mul_(self.scales.float().unsqueeze(-1)).view(n, k).to(dtype)

    def digest(self) -> str:
        """Return `xxh3_128:<hex>` over scheme, shape, codes, scales and zeros, the same from every layout.

        It finds damage, at the speed of memory; against intent stand the hashes of the files.
        """
        return self._hashed(Digest(self.scheme, self.shape))

    def matches(self, recorded: object) -> bool:
        """Return whether a report recorded the digest of this record; older ones have a SHA-256, without a prefix."""
        if isinstance(recorded, str) and re.fullmatch("[0-9a-f]{64}", recorded):
            return self._hashed(Digest(self.scheme, self.shape, hashlib.sha256(), "")) == recorded
        return self.digest() == recorded

    def _hashed(self, seen: Digest) -> str:
        seen.update(self.codes)
        return seen.finish(self.scales, self.zeros)

    def equal(self, other: QuantizedTensor) -> bool:
        """Return whether both records hold the same scheme and the same bits (negative zeros count)."""
        return self.scheme == other.scheme and self.digest() == other.digest()


class Digest:
    """The digest of a record whose codes come some rows at a time."""

    def __init__(
        self, scheme: Scheme, shape: tuple[int, int], seen: _Hash | None = None, prefix: str = f"{DIGEST}:"
    ) -> None:
        self._seen, self._prefix = seen or xxh3_128(), prefix
        self._seen.update(f"{scheme.label} {list(shape)}".encode())

    def update(self, codes: Tensor) -> None:
        """Take the next rows."""
        for piece in _pieces(codes):
            self._seen.update(piece)

    def finish(self, scales: Tensor, zeros: Tensor | None) -> str:
        """Return what `QuantizedTensor.digest` returns."""
        for part in (scales, zeros):
            if part is not None:
                self.update(part)
        return f"{self._prefix}{self._seen.hexdigest()}"


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in order; from a GPU through a small buffer that it writes to by itself."""
    if tensor.device.type == "cpu":
        yield raw_bytes(tensor).numpy().data
        return
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    buffer = torch.empty(min(PIECE, data.numel()), dtype=torch.uint8, pin_memory=True)
    for part in data.split(PIECE):
        yield buffer[: len(part)].copy_(part).numpy().data
