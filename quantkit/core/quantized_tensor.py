"""`Scheme`, the request for a quantized weight, and `QuantizedTensor`, the record of a quantized
weight, through which every weight passes.

Algorithms produce the record, layouts pack it and unpack to it. There is no third state: quantized
weights are never stored as rounded floats.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, Literal

import torch
from torch import Tensor
from xxhash import xxh3_128

from quantkit.core import sparsity
from quantkit.core.formats import FORMATS, Format
from quantkit.errors import LayoutError, RecipeError, Setting, Words

#: The sizes `[n, k]` of a weight; its packed tensors by suffix, and their shapes.
Shape = tuple[int, int]
Tensors = Mapping[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]
Sparsity = Literal["2:4"] | None
#: Name of the hash function, which is also the prefix of a digest.
DIGEST = "xxh3_128"
#: Bytes copied from a GPU at a time to be hashed.
PIECE = 1 << 24
#: The parts of a label, but groups -> what they say of a scheme.
PARTS: Mapping[str, dict[str, Any]] = {
    "channel": {"group_size": None},
    "asym": {"symmetric": False},
    "24": {"sparsity": "2:4"},
}


@dataclass(frozen=True)
class Scheme:
    """How a weight is quantized: format, columns per scale (None: one scale per row), symmetry,
    sparsity.

    The constructor raises RecipeError for combinations that no layout holds.
    """

    format: Format
    group_size: int | None = None
    symmetric: bool = True
    sparsity: Sparsity = None

    def __post_init__(self) -> None:
        if self.format.is_float and not self.symmetric:
            raise RecipeError(
                f"{self.format.name} is symmetric only",
                Words("drop", Setting("asym", True), "or use", Setting("format", "int4")),
            )
        if self.sparsity is not None and (self.format.is_float or not self.symmetric):
            raise RecipeError(
                f"{self.sparsity} sparsity goes with symmetric integers only",
                Words("use int4 without", Setting("asym", True)),
            )
        if not self.format.takes(self.group_size):
            raise RecipeError(
                f"{self.format.name} has groups of {self.format.group_size}, not "
                f"{self.group_size or 'one scale per row'}",
                Words("use", Setting("group_size", self.format.group_size)),
            )
        if self.group_size is not None and self.group_size < 1:
            raise RecipeError(
                f"group size {self.group_size} is not positive", "use 128, 64, 32 or channel"
            )

    def groups(self, k: int) -> int:
        """Count the scales per row; raise LayoutError if the group size, or 4 for 2:4, does not
        divide `k`.
        """
        if self.sparsity is not None:
            sparsity.quads(k)
        if self.group_size is None:
            return 1
        if k % self.group_size:
            raise LayoutError(
                f"group size {self.group_size} does not divide k = {k}",
                Words(Setting("skip"), "the weight")
                if self.format.is_microscaled
                else Words("use", Setting("group_size", "channel"), "or a divisor"),
            )
        return k // self.group_size

    def padded_k(self, k: int) -> int:
        """Round `k` up to whole groups, and for 2:4 to a multiple of four."""
        unit = lcm(self.group_size or 1, sparsity.QUAD if self.sparsity else 1)
        return -(-k // unit) * unit

    @property
    def label(self) -> str:
        """A short name such as `int4:g128`, `int4:channel:asym` or `fp6:channel`, which
        `Scheme.parse` reads.
        """
        parts = [self.format.name, f"g{self.group_size}" if self.group_size else "channel"]
        parts += [] if self.symmetric else ["asym"]
        parts += [self.sparsity.replace(":", "")] if self.sparsity else []
        return ":".join(parts)

    @staticmethod
    def parse(label: str) -> Scheme:
        """Read a label such as `int4:g64:asym`, the form of `--override`; raise RecipeError for
        anything else.
        """
        name, *rest = label.split(":")
        if name not in FORMATS:
            raise RecipeError(
                f"unknown format {name!r} in {label!r}", f"use one of {', '.join(FORMATS)}"
            )
        options: dict[str, Any] = {}
        if FORMATS[name].is_microscaled:
            options["group_size"] = FORMATS[name].group_size
        for part in rest:
            if part in PARTS:
                options |= PARTS[part]
            elif re.fullmatch("g[0-9]{1,9}", part):
                options["group_size"] = int(part[1:])
            else:
                raise RecipeError(
                    f"unknown part {part!r} in scheme {label!r}", "write it like int4:g64:asym"
                )
        return Scheme(FORMATS[name], **options)


#: The result for a linear: codes of a scheme, or a dense 2:4 weight.
Goal = Scheme | Literal["2:4"]


def label(goal: Goal) -> str:
    """Return the short name of a goal: `int4:g128`, `2:4`."""
    return goal.label if isinstance(goal, Scheme) else goal


def is_sparse(goal: Goal) -> bool:
    """Return True if a goal is 2:4, with codes or without."""
    return not isinstance(goal, Scheme) or goal.sparsity is not None


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantized weight `[n, k]`: codes, scales and, in an asymmetric scheme, zero points.

    `codes` uint8 `[n, k]`, one code a byte; `scales` float16 `[n, g]`; `zeros` uint8 `[n, g]`,
    codes, None when symmetric. A 2:4 scheme has at most two nonzero codes in each aligned four. It
    needs no mask, because the 2:4 encoding follows from the codes (docs/layouts.md 4.1). The
    constructor raises LayoutError when shapes, dtypes, the range of codes or the 2:4 pattern
    contradict the scheme.
    """

    scheme: Scheme
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    def __post_init__(self) -> None:
        if self.codes.dtype != torch.uint8 or self.codes.ndim != 2:
            raise LayoutError(
                f"codes must be uint8 [n, k], got {self.codes.dtype} {list(self.codes.shape)}"
            )
        n, k = self.codes.shape
        g = self.scheme.groups(k)
        if self.scales.dtype != torch.float16 or tuple(self.scales.shape) != (n, g):
            raise LayoutError(
                f"scales must be float16 [{n}, {g}], got {self.scales.dtype} "
                f"{list(self.scales.shape)}"
            )
        if (self.zeros is None) != self.scheme.symmetric:
            raise LayoutError("zeros belong to asymmetric schemes, and only to them")
        if self.zeros is not None and (
            self.zeros.dtype != torch.uint8 or tuple(self.zeros.shape) != (n, g)
        ):
            raise LayoutError(
                f"zeros must be uint8 [{n}, {g}], got {self.zeros.dtype} {list(self.zeros.shape)}"
            )
        top = 2**self.scheme.format.bits
        for name, codes in (("codes", self.codes), ("zeros", self.zeros)):
            if codes is not None and codes.numel() and int(codes.max()) >= top:
                raise LayoutError(
                    f"{name} reach {int(codes.max())}, {self.scheme.format.name} has 0 to {top - 1}"
                )
        if self.scheme.sparsity is not None:
            sparsity.check(self.codes, self.scheme.format.zero_code)

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k

    def to(self, device: torch.device) -> QuantizedTensor:
        """Move the tensors to a device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return QuantizedTensor(self.scheme, self.codes.to(device), self.scales.to(device), zeros)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Compute `scales * values` `[n, k]` in float32, rounded once to `dtype`."""
        return self.values().mul_(self.scales.float().unsqueeze(-1)).view(self.shape).to(dtype)

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Compute the weights in steps of their scales, `decode(codes) - decode(zeros)`, `[n, g, k
        / g]`.
        """
        decode = self.scheme.format.decode
        values = decode(self.codes).view(*self.scales.shape, -1).to(dtype)
        if self.zeros is not None:
            values -= decode(self.zeros).to(dtype).unsqueeze(-1)
        return values

    def rows(self, some: slice) -> QuantizedTensor:
        """Return the record of some rows, in the same memory."""
        zeros = None if self.zeros is None else self.zeros[some]
        return QuantizedTensor(self.scheme, self.codes[some], self.scales[some], zeros)

    def digest(self) -> str:
        """Hash scheme, shape, codes, scales and zero points to `xxh3_128:<hex>`, the same from
        every layout.

        It detects damage, not tampering: the SHA-256 hashes of the files do that.
        """
        return self._finish(Digest(self.scheme, self.shape))

    def matches(self, recorded: object) -> bool:
        """Return True if `recorded` is this record's digest, or its SHA-256 without prefix as in
        older reports.
        """
        if isinstance(recorded, str) and re.fullmatch("[0-9a-f]{64}", recorded):
            return self._finish(Digest(self.scheme, self.shape, hashlib.sha256(), "")) == recorded
        return self.digest() == recorded

    def _finish(self, digest: Digest) -> str:
        digest.update(self.codes)
        return digest.finish(self.scales, self.zeros)

    def equal(self, other: QuantizedTensor) -> bool:
        """Return True if both records hold the same scheme and the same bits (negative zeros
        count).
        """
        return self.scheme == other.scheme and self.digest() == other.digest()


def concatenated(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Join records of one scheme by their rows."""
    if len(parts) == 1:
        return parts[0]
    codes, scales = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales")
    )
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return QuantizedTensor(parts[0].scheme, codes, scales, torch.cat(zeros) if zeros else None)


class Digest:
    """The digest of a record whose codes arrive a block of rows at a time."""

    def __init__(
        self, scheme: Scheme, shape: tuple[int, int], hasher: Any = None, prefix: str = f"{DIGEST}:"
    ) -> None:
        self._hasher, self._prefix = hasher or xxh3_128(), prefix
        self._hasher.update(f"{scheme.label} {list(shape)}".encode())

    def update(self, codes: Tensor) -> None:
        """Hash the next rows of codes; those on a GPU are copied to the CPU in pieces."""
        for piece in codes.detach().reshape(-1).view(torch.uint8).split(PIECE):
            self._hasher.update(piece.cpu().numpy())

    def finish(self, scales: Tensor, zeros: Tensor | None) -> str:
        """Hash scales and zero points, which come last, and return the digest."""
        for tensor in (scales, zeros):
            if tensor is not None:
                self.update(tensor)
        return f"{self._prefix}{self._hasher.hexdigest()}"
