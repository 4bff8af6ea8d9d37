"""TC-FPx: FP6 and FP5 cut into bit planes, in the order of the kernel's tensor-core fragments
(docs/layouts.md 7).

The first plane has a code's high bits, two of FP6 and one of FP5. The second plane has its low four
bits. Scales are unmodified: the kernels multiply by 2**12 or 2**14 for the exponents
(docs/layouts.md 6.4).

Names of tensors in a file are not established. Ours are `weight`, in the shape of fp6_llm, and
`scales` (7.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from msgspec import Struct
from torch import Tensor

from quantkit.core.formats import FORMATS, Format
from quantkit.core.quantized_tensor import Scheme, Shape, Tensors
from quantkit.errors import CheckpointError, LayoutError
from quantkit.layouts.arrangement import Arrangement, OnRows
from quantkit.layouts.base import Layout, Stored, Unpacking, codes_in_words, matrix
from quantkit.layouts.schemes import Schemes

_ROWS, _COLS = "N a:2 b:2 c:2 i:8", "K d:2 q:4 p:2"
LOW = Arrangement(_ROWS, _COLS, "N K a b i q p c d", "c d")
#: The plane of the bits above the low four, by the width of a code.
HIGH = {
    6: Arrangement(_ROWS, _COLS, "N K a i q p c b d", "b c d"),
    5: Arrangement(_ROWS, _COLS, "N K i q p c a b d", "a b c d"),
}


class TcFpxConfig(Struct, kw_only=True):
    """The config of TC-FPx: quantkit's own, because no other program has one."""

    format: str
    bits: int | None = None
    ignore: list[str] | None = None


class TcFpx(Layout):
    """TC-FPx: one scale per row, n % 64 == 0 and k % 64 == 0."""

    NAME = "tcfpx"
    QUANT_METHODS = ("tcfpx",)
    CONFIG = TcFpxConfig
    HOLDS = "fp6 and fp5"
    TENSORS = ("weight", "scales")
    MARKER = "scales"
    TITLE, MULTIPLES = "TC-FPx", (64, 64)
    STACKING_UNIT = 64

    def holds(self, fmt: Format) -> bool:
        return fmt.is_float and fmt.bits in HIGH

    def stored(self, scheme: Scheme, n: int, k: int) -> Stored:
        return {
            "weight": (torch.int32, (n, k * scheme.format.bits // 32)),
            "scales": (torch.float16, (n,)),
        }

    def size(self, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> Shape:
        n, words = matrix(shapes, "weight")
        return n, codes_in_words(words, scheme.format)

    def shape_in_words(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
        """Count bytes in words, since torchao stores words as bytes (docs/layouts.md 7.1)."""
        return (*shape[:-1], shape[-1] // 4) if shape and dtype == torch.uint8 else shape

    def packer(
        self,
        tensors: Tensors,
        scheme: Scheme,
        shape: Shape,
        scales: Tensor,
        zeros: Tensor | None,
    ) -> OnRows:
        bits = scheme.format.bits
        high, low = planes(tensors["weight"].view(-1), bits)
        pack_high, pack_low = HIGH[bits].packer(high, bits - 4, shape), LOW.packer(low, 4, shape)
        tensors["scales"].copy_(scales.view(-1))

        def add(first: int, codes: Tensor) -> None:
            pack_high(first, (codes >> 4).bitwise_and_((1 << bits - 4) - 1))
            pack_low(first, codes & 15)

        return add

    def unpacking(self, tensors: Tensors, scheme: Scheme) -> Unpacking:
        """Make a row-wise unpacker.

        `weight` may also have torchao's form, the same bytes as uint8 `[n, k*bits/8]`; `scales` may
        be `[n, 1]`.
        """
        return super().unpacking({**tensors, **_as_stored(tensors)}, scheme)

    def unpacker(
        self, tensors: Tensors, scheme: Scheme, shape: Shape
    ) -> tuple[Tensor, Tensor | None, OnRows]:
        bits = scheme.format.bits
        high, low = planes(tensors["weight"].reshape(-1), bits)
        fill_high, fill_low = (
            HIGH[bits].unpacker(high, bits - 4, shape),
            LOW.unpacker(low, 4, shape),
        )

        def fill(first: int, codes: Tensor) -> None:
            fill_low(first, codes)
            above = torch.empty_like(codes)
            fill_high(first, above)
            codes.bitwise_or_(above.bitwise_left_shift_(4))

        return tensors["scales"].view(-1, 1), None, fill

    def config(self, schemes: Schemes) -> TcFpxConfig:
        """Make the config; overrides are in the `quantkit` key only."""
        fmt = schemes.default.format
        return TcFpxConfig(format=fmt.split, bits=fmt.bits, ignore=list(schemes.ignore))

    def schemes(self, config: TcFpxConfig) -> Schemes:
        known = {fmt.split: fmt for fmt in FORMATS.values() if self.holds(fmt)}
        fmt = known.get(config.format)
        if fmt is None or config.bits not in (None, fmt.bits):
            raise CheckpointError(
                f"a TC-FPx checkpoint of format {config.format!r:.40} and bits {config.bits}: "
                f"quantkit reads {', '.join(f'{f.split} of {f.bits}' for f in known.values())}"
            )
        return Schemes(Scheme(fmt), ignore=tuple(config.ignore or ()))

    def stack(self, scheme: Scheme, parts: Sequence[Tensors]) -> dict[str, Tensor]:
        """Stack packed weights: `n` is the slowest axis of each plane, and each plane is joined."""
        planes = zip(*(_planes(part["weight"], scheme) for part in parts), strict=True)
        flat = torch.cat([piece.reshape(-1) for plane in planes for piece in plane])
        scales = torch.cat([part["scales"] for part in parts])
        return {"weight": flat.view(len(scales), -1), "scales": scales}

    def cut(self, scheme: Scheme, tensors: Tensors, n: int, rows: range) -> dict[str, Tensor]:
        pieces = [
            plane[rows.start : rows.stop].reshape(-1)
            for plane in _planes(tensors["weight"], scheme)
        ]
        return {
            "weight": torch.cat(pieces).view(len(rows), -1),
            "scales": tensors["scales"][rows.start : rows.stop].clone(),
        }


def planes(words: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Split flat words of codes of `bits` into two planes: the high bits and the low four."""
    high = len(words) * (bits - 4) // bits
    return words[:high], words[high:]


def _planes(words: Tensor, scheme: Scheme) -> list[Tensor]:
    """View both planes as `[n, words of a row]`."""
    return [plane.view(len(words), -1) for plane in planes(words.reshape(-1), scheme.format.bits)]


def _as_stored(tensors: Tensors) -> dict[str, Tensor]:
    """View a `weight` of bytes as words, and a column of `scales` as a vector."""
    changed = {}
    weight, scales = tensors.get("weight"), tensors.get("scales")
    if weight is not None and weight.dtype == torch.uint8 and weight.ndim == 2:
        if weight.shape[1] % 4:
            raise LayoutError(
                f"'weight' has rows of {weight.shape[1]} bytes, no whole words of four: it is "
                "damaged"
            )
        changed["weight"] = weight.contiguous().view(torch.int32)
    if scales is not None and scales.ndim == 2 and scales.shape[1] == 1:
        changed["scales"] = scales[:, 0].contiguous()
    return changed
