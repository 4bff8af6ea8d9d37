"""Rows of codes as little-endian bit streams in int32 words, without gaps (docs/layouts.md 9 and
9b).

Code `j` of a row has the bits from `j * bits` on; bit 0 of word 0 comes first. The bits behind the
last code are 0.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.core.tensors import aligned
from quantkit.errors import LayoutError
from quantkit.layouts.arrangement import Arrangement, OnRows, blocks


def words_of(k: int, bits: int) -> int:
    """Count the words of a row of `k` codes."""
    return -(-k * bits // 32)


def packer(words: Tensor, bits: int, k: int) -> OnRows:
    """Make a function that packs uint8 rows `[some, k]` into contiguous int32 `words` `[n,
    words_of(k)]`.
    """
    whole = _whole(k, bits)

    def pack_rows(first: int, codes: Tensor) -> None:
        out = words[first : first + len(codes)]
        if whole == k:
            _pack(codes, out, bits)
            return
        padded = words.new_empty(len(codes), whole * bits // 32)
        _pack(pad(codes, (0, whole - k)), padded, bits)
        out.copy_(padded[:, : out.shape[1]])

    return pack_rows


def unpacker(words: Tensor, bits: int, k: int, name: str) -> OnRows:
    """Make a function that fills contiguous uint8 rows `[some, k]` from `words`: the inverse of
    `packer`.

    It raises LayoutError for bits behind the last code of the tensor called `name` that are not 0.
    """
    whole, words = _whole(k, bits), words.contiguous()

    def unpack_rows(first: int, codes: Tensor) -> None:
        some = words[first : first + len(codes)]
        if whole == k:
            _unpack(some, codes, bits)
            return
        padded = codes.new_empty(len(codes), whole)
        _unpack(pad(some, (0, whole * bits // 32 - some.shape[1])), padded, bits)
        if bool(padded[:, k:].any()):
            raise LayoutError(
                f"{name!r} holds codes past its true shape, where it must be 0: the file is damaged"
            )
        codes.copy_(padded[:, :k])

    return unpack_rows


def pack_zeros(zeros: Tensor, bits: int) -> Tensor:
    """Pack zero points uint8 `[n, g]` down their columns into int32 `[words_of(n), g]`."""
    n, groups = zeros.shape
    words = torch.empty((groups, words_of(n, bits)), dtype=torch.int32, device=zeros.device)
    packer(words, bits, n)(0, zeros.t().contiguous())
    return words.t().clone(memory_format=torch.contiguous_format)


def unpack_zeros(words: Tensor, bits: int, n: int, name: str) -> Tensor:
    """Unpack zero points uint8 `[n, g]`, the inverse of `pack_zeros`; LayoutError as `unpacker`."""
    zeros = torch.empty((words.shape[1], n), dtype=torch.uint8, device=words.device)
    unpacker(words.t(), bits, n, name)(0, zeros)
    return zeros.t().clone(memory_format=torch.contiguous_format)


def _whole(k: int, bits: int) -> int:
    """Round `k` up to a number of codes that fills whole words."""
    unit = 32 // gcd(32, bits)
    return -(-k // unit) * unit


def _pack(codes: Tensor, words: Tensor, bits: int) -> None:
    """Pack rows of whole words: eight codes, in one 64-bit word, become `bits` bytes."""
    if 32 % bits == 0:
        _order(bits).packer(words.view(-1), bits, (len(codes), codes.shape[1]))(0, codes)
        return
    unit = _unit(bits)
    for some, out in blocks(codes.shape[1], codes, words):
        wide = aligned(some.reshape(-1)).view(torch.int64)
        for lane in (8, 16, 32):
            width = lane * bits // 8
            low = _low_lanes(width, lane)
            high = (wide >> (lane - width)).bitwise_and_(low << width)
            wide = high.bitwise_or_(wide & low)
        stream = out.view(-1).view(unit).view(wide.numel(), -1)
        stream.copy_(wide.view(unit).view(wide.numel(), -1)[:, : stream.shape[1]])


def _unpack(words: Tensor, codes: Tensor, bits: int) -> None:
    """Unpack rows of whole words into contiguous `codes`: the inverse of `_pack`."""
    if 32 % bits == 0:
        _order(bits).unpacker(words, bits, (len(codes), codes.shape[1]))(0, codes)
        return
    unit = _unit(bits)
    for some, out in blocks(codes.shape[1], words, codes):
        wide = torch.empty(out.numel() // 8, dtype=torch.int64, device=out.device)
        stream = some.reshape(-1).view(unit).view(wide.numel(), -1)
        wide.view(unit).view(wide.numel(), -1)[:, : stream.shape[1]] = stream
        for lane in (32, 16, 8):  # the first step drops bits that were not written
            width = lane * bits // 8
            low = _low_lanes(width, lane)
            high = (wide & (low << width)).bitwise_left_shift_(lane - width)
            wide = wide.bitwise_and_(low).bitwise_or_(high)
        out.copy_(wide.view(torch.uint8).view(out.shape))


def _order(bits: int) -> Arrangement:
    """Give the order of codes that do not straddle words."""
    return Arrangement("N", f"K i:{32 // bits}", "N K i")


def _unit(bits: int) -> torch.dtype:
    """Choose the integer type to copy `bits` bytes in: wider types are copied faster."""
    return torch.uint8 if bits % 2 else torch.int16


def _low_lanes(width: int, lane: int) -> int:
    """Set the lowest `width` bits of every second lane of an int64 with lanes of `lane` bits."""
    return sum(((1 << width) - 1) << at for at in range(0, 64, 2 * lane))
