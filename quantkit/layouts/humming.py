"""humming: FP6 and FP5 in their true six and five bits, each row one little-endian bit stream (LAYOUTS 9b).

Eight codes are seen as one integer, within which they are moved together, without the bits between them. Some of these
are then whole integers of the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import gcd
from typing import Any

import torch
from torch import Tensor

from quantkit.core.formats import FP5, FP6
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.core.tensors import aligned
from quantkit.errors import CheckpointError, LayoutError
from quantkit.layouts import validation
from quantkit.layouts.arrangement import pieces
from quantkit.layouts.base import Packing, SideFile, Stored, Unpacking
from quantkit.layouts.schemes import Schemes

NAME = "humming"
TENSORS: tuple[str, ...] = ("weight", "weight_scale")
MARKER = "weight_scale"
SIDE_FILE: SideFile | None = None

#: Bits of the integers that eight codes, and the stream, are seen as.
WIDE = 64
DTYPES = {"float6e3m2": FP6, "float5e3m1": FP5}


def check(scheme: Scheme, n: int, k: int) -> None:
    """Raise LayoutError unless FP6 or FP5 with one scale per row and k % 32 == 0."""
    _check_scheme(scheme)
    way_out = "use --layout compressed-tensors, or --skip the weight"
    validation.multiples("humming", n, k, of_n=1, of_k=32, way_out=way_out)


def stored(scheme: Scheme, n: int, k: int) -> Stored:
    """Return suffix -> (dtype, shape) of what `pack` stores for an `[n, k]` weight."""
    return {"weight": (torch.int32, (n, k * scheme.format.bits // 32)), "weight_scale": (torch.float16, (n, 1))}


def size(shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
    """Return `(n, k)` from the shape of `weight`; LayoutError if its words are no whole number of codes."""
    n, words = validation.matrix(shapes, "weight")
    if words % scheme.format.bits:
        raise LayoutError(f"{words} words a row are no multiple of {scheme.format.bits}, as {scheme.format.name} has")
    return n, words // scheme.format.bits * 32


def pack(q: QuantizedTensor) -> dict[str, Tensor]:
    """Return `weight` int32 `[n, k*bits/32]` and `weight_scale` float16 `[n, 1]`."""
    return packing(q.scheme, q.shape, q.scales, q.zeros).whole(q.codes)


def packing(scheme: Scheme, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None) -> Packing:
    """Return what `pack` does with rows of codes, and its tensors, of which those without codes are filled."""
    n, k = shape
    check(scheme, n, k)
    words = torch.empty((n, k * scheme.format.bits // 32), dtype=torch.int32, device=scales.device)

    def add(first: int, codes: Tensor) -> None:
        _stream(codes, words[first : first + len(codes)], scheme.format.bits)

    return Packing({"weight": words, "weight_scale": validation.half(scales)}, add)


def unpack(tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedTensor:
    """Return the record; LayoutError for malformed tensors."""
    return unpacking(tensors, scheme).record()


def unpacking(tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
    """Return what `unpack` does, rows of codes at a time."""
    n, k = size({name: tuple(t.shape) for name, t in tensors.items()}, scheme)
    check(scheme, n, k)
    validation.match(tensors, stored(scheme, n, k))
    words = tensors["weight"].contiguous()

    def fill(first: int, codes: Tensor) -> None:
        _unstream(words[first : first + len(codes)], codes, scheme.format.bits)

    return Unpacking(scheme, (n, k), validation.half(tensors["weight_scale"]), None, fill)


def write_config(schemes: Schemes) -> dict[str, Any]:
    """Return the `quantization_config` of LAYOUTS 9b; it has no place for overrides (the `quantkit` key has)."""
    for scheme in (schemes.default, *(scheme for _, scheme in schemes.overrides)):
        _check_scheme(scheme)
    names = {fmt: name for name, fmt in DTYPES.items()}
    return {
        "quant_method": "humming",
        "b_dtype": names[schemes.default.format],
        "weight_scale_group_size": 0,
        "ignore": list(schemes.ignore),
    }


def read_config(config: Mapping[str, Any]) -> Schemes | None:
    """Return the schemes of a humming config, also with the older keys `dtype` and `group_size`; else None."""
    if config.get("quant_method") != "humming":
        return None
    dtype = validation.entry(config, "b_dtype" if "b_dtype" in config else "dtype", str)
    key = "weight_scale_group_size" if "weight_scale_group_size" in config else "group_size"
    group = validation.entry(config, key, int, default=0)
    if dtype not in DTYPES:
        raise CheckpointError(f"a humming checkpoint of {dtype!r:.40}: quantkit reads {' and '.join(DTYPES)}")
    if group != 0:
        raise CheckpointError(f"a humming checkpoint with groups of {group}: quantkit reads one scale per row (0)")
    return Schemes(Scheme(DTYPES[dtype]), ignore=validation.strings(config, "ignore"))


def _stream(codes: Tensor, words: Tensor, bits: int) -> None:
    """Fill rows of `words` with rows of codes."""
    count, places = _places(bits)
    for some, out in pieces(codes.shape[1], codes, words):
        eights = _together(_seen(some, 8 * count), bits).view(-1, count)
        stream = _seen(out, count * bits // 4)
        wide = stream.view(len(eights), -1)
        joined = eights[:, 0]
        for i, word, shift, rest in places[1:]:
            joined = (eights[:, i] << shift).bitwise_or_(joined)
            if rest >= 0:
                wide[:, word] = joined
            if rest > 0:
                joined = eights[:, i] >> (WIDE - shift)
        _filled(out, stream)


def _unstream(words: Tensor, codes: Tensor, bits: int) -> None:
    """Fill rows of `codes` with what `_stream` made `words` of."""
    count, places = _places(bits)
    for some, out in pieces(codes.shape[1], words, codes):
        seen = _seen(out, 8 * count)
        eights = seen.view(-1, count)
        stream = _seen(some, count * bits // 4).view(len(eights), -1)
        for i, word, shift, rest in places:
            eight = stream[:, word] >> shift if shift else stream[:, word]
            if rest > 0:
                eight &= (1 << (WIDE - shift)) - 1
                eight |= stream[:, word + 1] << (WIDE - shift)
            eights[:, i] = eight
        _filled(out, _apart(seen, bits))


@cache
def _places(bits: int) -> tuple[int, list[tuple[int, int, int, int]]]:
    """Return how many eights fill whole words, and of each the word it is in, from which bit, its bits in the next.

    The words are as wide as eights.
    """
    count = WIDE // gcd(WIDE, 8 * bits)
    begins = [divmod(8 * bits * i, WIDE) for i in range(count)]
    return count, [(i, word, shift, shift + 8 * bits - WIDE) for i, (word, shift) in enumerate(begins)]


def _seen(part: Tensor, multiple: int) -> Tensor:
    """Return contiguous `part` as wide integers, flat; where they do not fit, a copy with zeros up to `multiple`."""
    flat = part.reshape(-1)
    if len(flat) % multiple:
        flat = torch.cat((flat, flat.new_zeros(-len(flat) % multiple)))
    return aligned(flat).view(torch.int64)


def _filled(part: Tensor, seen: Tensor) -> None:
    """Let `part` hold what `_seen` made of it."""
    if seen.data_ptr() != part.data_ptr():
        part.view(-1).copy_(seen.view(part.dtype)[: part.numel()])


def _together(eights: Tensor, bits: int) -> Tensor:
    """Return eights of a byte a code as eights of `bits` a code, the first lowest."""
    fours = eights.view(torch.int32)  # which are multiplied faster
    for half, width in ((8, bits), (16, 2 * bits)):
        second = (fours >> half).bitwise_and_(_lowest(width, 2 * half))
        fours = torch.sub(fours, second, alpha=(1 << half) - (1 << width))  # moves it down
    eights, four = fours.view(torch.int64), (1 << 4 * bits) - 1
    second = (eights >> (32 - 4 * bits)).bitwise_and_(four << 4 * bits)
    return eights.bitwise_and_(four).bitwise_or_(second)


def _apart(eights: Tensor, bits: int) -> Tensor:
    """Undo `_together` in place, whatever lies above the bits of an eight; return `eights`."""
    four = (1 << 4 * bits) - 1
    second = (eights & four << 4 * bits).bitwise_left_shift_(32 - 4 * bits)
    fours = eights.bitwise_and_(four).bitwise_or_(second).view(torch.int32)
    for half, width in ((16, 2 * bits), (8, bits)):
        second = (fours >> width).bitwise_and_(_lowest(width, 2 * half))
        fours.add_(second, alpha=(1 << half) - (1 << width))
    return eights


def _lowest(width: int, lane: int) -> int:
    """Return the mask of the lowest `width` bits of every `lane` bits of an int32."""
    return sum(((1 << width) - 1) << at for at in range(0, 32, lane))


def _check_scheme(scheme: Scheme) -> None:
    if scheme.format not in DTYPES.values():
        raise LayoutError(f"humming holds fp6 and fp5, not {scheme.format.name}: use --layout compressed-tensors")
    if scheme.group_size is not None:
        raise LayoutError("humming has one scale per row: quantize with --group-size channel")
