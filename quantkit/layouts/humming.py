"""humming: FP6 and FP5 in their true six and five bits, each row one little-endian bit stream (LAYOUTS 9b).

Four codes, a quad, are seen as one integer, within which they are moved together, without the bits between them. Eight
of these are then as many words as a code has bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit import room
from quantkit.abreast import each
from quantkit.errors import CheckpointError, LayoutError
from quantkit.formats import FP5, FP6
from quantkit.layouts import checks
from quantkit.layouts.arrange import pieces
from quantkit.layouts.config import Schemes
from quantkit.layouts.protocol import SideFile, Stored
from quantkit.tensor import QuantizedTensor, Scheme

NAME = "humming"
TENSORS: tuple[str, ...] = ("weight", "weight_scale")
MARKER = "weight_scale"
SIDE_FILE: SideFile | None = None

#: Quads that fill whole words.
QUADS = 8
DTYPES = {"float6e3m2": FP6, "float5e3m1": FP5}


def check(scheme: Scheme, n: int, k: int) -> None:
    """Raise LayoutError unless FP6 or FP5 with one scale per row and k % 32 == 0."""
    _check_scheme(scheme)
    way_out = "use --layout compressed-tensors, or --skip the weight"
    checks.multiples("humming", n, k, of_n=1, of_k=32, way_out=way_out)


def stored(scheme: Scheme, n: int, k: int) -> Stored:
    """Return suffix -> (dtype, shape) of what `pack` stores for an `[n, k]` weight."""
    return {"weight": (torch.int32, (n, k * scheme.format.bits // 32)), "weight_scale": (torch.float16, (n, 1))}


def size(shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
    """Return `(n, k)` from the shape of `weight`; LayoutError if its words are no whole number of codes."""
    n, words = checks.matrix(shapes, "weight")
    if words % scheme.format.bits:
        raise LayoutError(f"{words} words a row are no multiple of {scheme.format.bits}, as {scheme.format.name} has")
    return n, words // scheme.format.bits * 32


def pack(q: QuantizedTensor) -> dict[str, Tensor]:
    """Return `weight` int32 `[n, k*bits/32]` and `weight_scale` float16 `[n, 1]`."""
    n, k = q.shape
    check(q.scheme, n, k)
    bits = q.scheme.format.bits
    words = room.empty((n, k * bits // 32), torch.int32, q.codes.device)

    def join(codes: Tensor, out: Tensor) -> None:
        quads = _together(codes.clone(memory_format=torch.contiguous_format).view(-1).view(torch.int32), bits)
        stream, quads = out.view(-1, bits), quads.view(-1, QUADS)
        joined = quads[:, 0]
        for i, word, shift, rest in _places(bits):
            quad = quads[:, i]
            joined = joined | quad << shift if shift else quad
            if rest >= 0:
                stream[:, word], joined = joined, quad >> (32 - shift)

    each(join, pieces(k, q.codes, words))
    return {"weight": words, "weight_scale": checks.half(q.scales)}


def unpack(tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedTensor:
    """Return the record; LayoutError for malformed tensors."""
    n, k = size({name: tuple(t.shape) for name, t in tensors.items()}, scheme)
    check(scheme, n, k)
    checks.match(tensors, stored(scheme, n, k))
    words, bits = tensors["weight"], scheme.format.bits
    codes = room.empty((n, k), torch.uint8, words.device)

    def split(some: Tensor, out: Tensor) -> None:
        stream = some.reshape(-1, bits)
        quads = torch.empty(len(stream), QUADS, dtype=torch.int32, device=words.device)
        for i, word, shift, rest in _places(bits):
            quad = stream[:, word] >> shift
            if rest > 0:
                quad &= (1 << (32 - shift)) - 1
                quad |= stream[:, word + 1] << (32 - shift)
            quads[:, i] = quad
        out.view(-1).view(torch.int32).copy_(_apart(quads.view(-1), bits))

    each(split, pieces(k, words, codes))
    return QuantizedTensor(scheme, codes, checks.half(tensors["weight_scale"]))


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
    dtype = checks.entry(config, "b_dtype" if "b_dtype" in config else "dtype", str)
    key = "weight_scale_group_size" if "weight_scale_group_size" in config else "group_size"
    group = checks.entry(config, key, int, default=0)
    if dtype not in DTYPES:
        raise CheckpointError(f"a humming checkpoint of {dtype!r:.40}: quantkit reads {' and '.join(DTYPES)}")
    if group != 0:
        raise CheckpointError(f"a humming checkpoint with groups of {group}: quantkit reads one scale per row (0)")
    return Schemes(Scheme(DTYPES[dtype]), ignore=checks.strings(config, "ignore"))


def _places(bits: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield each quad of `bits` words, the word that it begins in, at which bit, and its bits in the next word."""
    for i in range(QUADS):
        word, shift = divmod(4 * bits * i, 32)
        yield i, word, shift, shift + 4 * bits - 32


def _together(quads: Tensor, bits: int) -> Tensor:
    """Return quads of a byte a code as quads of `bits` a code, the first lowest."""
    one, two = (1 << bits) - 1, (1 << 2 * bits) - 1
    pairs = (quads & one * 0x10001) | (quads & one * 0x1000100) >> (8 - bits)
    return (pairs & two) | (pairs >> (16 - 2 * bits) & two << 2 * bits)


def _apart(quads: Tensor, bits: int) -> Tensor:
    """Return what `_together` made `quads` of, whatever lies above their bits."""
    one, two = (1 << bits) - 1, (1 << 2 * bits) - 1
    pairs = (quads & two) | (quads & two << 2 * bits) << (16 - 2 * bits)
    return (pairs & one * 0x10001) | (pairs & (one * 0x10001 << bits)) << (8 - bits)


def _check_scheme(scheme: Scheme) -> None:
    if scheme.format not in DTYPES.values():
        raise LayoutError(f"humming holds fp6 and fp5, not {scheme.format.name}: use --layout compressed-tensors")
    if scheme.group_size is not None:
        raise LayoutError("humming has one scale per row: quantize with --group-size channel")
