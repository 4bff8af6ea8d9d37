"""The 2:4 encoding: which two of each four values are kept, and where the metadata saying so lies (LAYOUTS 4).

Four neighbouring values are moved as one word of four times their width, so that choosing two of them is two shifts.
Four of four bits are a number of sixteen, for which a table made in that way has both answers at once. Rows are worked
on in pieces that stay in the cache, since every step touches each word once.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from quantkit.core import sparsity
from quantkit.core.tensors import aligned
from quantkit.errors import LayoutError
from quantkit.layouts.arrangement import Arrangement, RowsOf, pieces

#: Index: bit i says that value i of the quad is not zero; entry: i0 | i1 << 2, or REFUSED for three and four (4.1).
REFUSED = 0
CODES = (0xE, 0x8, 0x9, 0x4, 0xE, 0x8, 0x9, REFUSED, 0xE, 0xC, 0xD, REFUSED, 0xE, REFUSED, REFUSED, REFUSED)

#: The order of 4.3 by the dtype of its words, whose metadata columns hold four and eight quads.
CUTLASS = {
    torch.int16: Arrangement("M r4:2 r3:2 r2:2 r1:2 r0:2", "C d:2 q:4", "C M r2 r1 r0 r4 d r3 q"),
    torch.int32: Arrangement("M r3:2 r2:2 r1:2 r0:2", "C d:2 q:8", "C M r2 r1 r0 d r3 q"),
}
#: The order of 4.4.
SPARSE_MARLIN = Arrangement("N e:8 n2:2 n1:2 n0:2", "C d:2 q:4", "C N n1 e n0 d n2 q")

#: Bytes of a value -> dtypes of two and of four of them.
WORDS = {1: (torch.int16, torch.int32), 2: (torch.int32, torch.int64)}


def encode(values: Tensor, zero: int = 0) -> Tensor:
    """Return the code of each quad, uint8 `[n, k/4]`, by the table of LAYOUTS 4.1; -0.0 is a zero.

    `values` `[n, k]` of any dtype, of which `zero` is the one that goes. LayoutError for a quad with three or four
    others, and unless `k` is a multiple of 4.
    """
    n, k = values.shape
    table = torch.tensor(CODES, dtype=torch.uint8, device=values.device)
    codes = torch.empty((n, sparsity.quads(k)), dtype=torch.uint8, device=values.device)
    for some, found in pieces(k, values, codes):
        which = sparsity.flags(some, zero).mul_(0x01020408).bitwise_right_shift_(24).bitwise_and_(15)
        torch.index_select(table, 0, which, out=found.view(-1))
    _require_codes(codes, values, zero)
    return codes


def check(codes: Tensor) -> None:
    """Raise LayoutError unless every code of `codes` `[n, k/4]` names two different places in rising order."""
    wrong = (codes & 3) >= (codes >> 2)
    if bool(wrong.any()):
        row, quad = wrong.nonzero()[0].tolist()
        raise LayoutError(
            f"metadata does not describe two of four: {int(wrong.sum())} codes are none of 4, 8, 9, C, D, E, first "
            f"{int(codes[row, quad]):X} at row {row}, columns {4 * quad} to {4 * quad + 3}: the file is damaged"
        )


def compress(values: Tensor, codes: Tensor) -> Tensor:
    """Return the two values of each quad that its code keeps, `[n, k/2]`, bit for bit (LAYOUTS 4.1).

    `values` `[n, k]` of one or two bytes each; `codes` uint8 `[n, k/4]`, valid ones.
    """
    n, k = values.shape
    kept = torch.empty((n, k // 2), dtype=values.dtype, device=values.device)
    bits, (two, four) = 8 * values.element_size(), WORDS[values.element_size()]
    for some, places, out in pieces(k, values, codes, kept):
        quads, (low, high) = some.clone(memory_format=torch.contiguous_format).view(four), _shifts(places, bits, four)
        pairs = (quads >> low) & ((1 << bits) - 1)
        pairs |= (quads >> high) << bits
        out.view(two).copy_(pairs)  # which drops what lies above
    return kept


def expand(kept: Tensor, codes: Tensor, zero: int = 0) -> Tensor:
    """Return the values `[n, k]` whose kept ones `compress` gave as `kept` `[n, k/2]`; the others' bits are `zero`."""
    n, k = kept.shape[0], 2 * kept.shape[1]
    values = torch.empty((n, k), dtype=kept.dtype, device=kept.device)
    bits, (two, four) = 8 * kept.element_size(), WORDS[kept.element_size()]
    zeros = sum(zero << bits * i for i in range(sparsity.QUAD))
    for some, places, out in pieces(k, kept, codes, values):
        pairs = some.clone(memory_format=torch.contiguous_format).view(two).to(four)
        pairs ^= zeros  # so that what is left out is zero here
        low, high = _shifts(places, bits, four)
        quads = (pairs & ((1 << bits) - 1)) << low
        quads |= ((pairs >> bits) & ((1 << bits) - 1)) << high
        torch.bitwise_xor(quads, zeros, out=out.view(four))
    return values


def compress4(values: Tensor, zero: int) -> tuple[Tensor, Tensor]:
    """Return what `compress` and `encode` make of `values` uint8 `[n, k]` below 16; LayoutError as the latter."""
    n, k = values.shape
    kept = torch.empty((n, k // 2), dtype=torch.uint8, device=values.device)
    codes = torch.empty((n, sparsity.quads(k)), dtype=torch.uint8, device=values.device)
    table = _compressed(zero, values.device)
    for some, two, code in pieces(k, aligned(values), kept, codes):
        quad = some.view(-1).view(torch.int32)
        quad = (quad >> 12).bitwise_or_(quad).bitwise_and_(0xFFFF)
        found = torch.index_select(table, 0, quad)
        two.view(-1).view(torch.int16).copy_(found)  # which drops what lies above
        code.view(-1).copy_(found.bitwise_right_shift_(16))
    _require_codes(codes, values, zero)
    return kept, codes


def expand4(kept: Tensor, codes: Tensor, zero: int, out: Tensor) -> None:
    """Fill uint8 `out` `[n, k]` with what `expand` makes of `kept` uint8 `[n, k/2]` below 16 and valid `codes`."""
    table = _expanded(zero, kept.device)
    for some, code, part in pieces(out.shape[1], aligned(kept), codes, out):
        index = code.to(torch.int16).bitwise_left_shift_(4).view(-1)
        index |= some.view(-1).view(torch.int16)
        torch.index_select(table, 0, index.to(torch.int32), out=part.view(-1).view(torch.int32))


def pack_codes(codes: Tensor, order: Arrangement, dtype: torch.dtype) -> Tensor:
    """Return `codes` uint8 `[n, k/4]` as flat words of `dtype` (int16: four quads, int32: eight) in `order`.

    The first quad lies in the lowest bits. LayoutError unless `n` and `k` are multiples of what the order moves.
    """
    return order.pack(codes, 4).view(dtype)


def unpack_codes(words: Tensor, order: Arrangement, shape: tuple[int, int]) -> Tensor:
    """Return the codes of an `[n, k]` weight of `shape` that `pack_codes` made `words` of.

    They are as the file has them, so a quad's code need not be the one that its values give: metadata made from a
    pruning mask means the same values. LayoutError for a code that is none.
    """
    codes = torch.empty((shape[0], shape[1] // 4), dtype=torch.uint8, device=words.device)
    unpacking_codes(words, order, shape)(0, codes)
    return codes


def unpacking_codes(words: Tensor, order: Arrangement, shape: tuple[int, int]) -> RowsOf:
    """Return what fills rows of what `unpack_codes` returns; LayoutError as there, for all codes."""
    n, k = shape
    words = aligned(words).view(-1).view(torch.int32)
    fill = order.unpacking(words, 4, (n, k // 4))
    if not _all_rise(words):
        codes = words.new_empty((n, k // 4), dtype=torch.uint8)
        fill(0, codes)
        check(codes)  # which names the first one
    return fill


def _all_rise(words: Tensor) -> bool:
    """Return whether the second place is above the first in all codes of flat int32 `words`, wherever these lie."""
    low = 0x33333333
    for (some,) in pieces(8, words):  # eight codes in a word
        rising = ((some >> 2) & low).add_(low).sub_(some & low)  # 3 + second - first is at least 4
        if rising.numel() and int(rising.bitwise_and_(0x44444444).min()) != 0x44444444:
            return False
    return True


def _require_codes(codes: Tensor, values: Tensor, zero: int) -> None:
    if codes.numel() and int(codes.min()) == REFUSED:
        sparsity.check(values, zero)  # which names the first one


@lru_cache(maxsize=4)
def _compressed(zero: int, device: torch.device) -> Tensor:
    """By the values of a quad, four bits each, the third before the second: the two kept, a byte each, and the code."""
    number = torch.arange(1 << 16, dtype=torch.int32)
    quads = torch.stack([number >> shift & 15 for shift in (0, 8, 4, 12)], 1).to(torch.uint8)
    found = torch.full_like(number, REFUSED << 16)
    legal = (quads != zero).sum(1) <= 2
    codes = encode(quads[legal], zero)
    kept = compress(quads[legal], codes).view(torch.int16)
    found[legal] = (codes.int() << 16 | kept.int()).view(-1)
    return found.to(device)


@lru_cache(maxsize=4)
def _expanded(zero: int, device: torch.device) -> Tensor:
    """By the kept values of a quad, a byte each, with the code between them: the quad, a byte each."""
    number = torch.arange(1 << 12, dtype=torch.int32)
    codes = (number >> 4 & 15).to(torch.uint8).view(-1, 1)
    kept = (number & 0xF0F).to(torch.int16).view(-1, 1).view(torch.uint8)
    legal = (codes & 3) < (codes >> 2)
    found = torch.zeros_like(number)
    found[legal.view(-1)] = expand(kept[legal.view(-1)], codes[legal.view(-1)], zero).view(torch.int32).view(-1)
    return found.to(device)


def _shifts(codes: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return by how many bits the first and the second kept value of each quad stand above its lowest one."""
    codes = codes.to(dtype)
    return (codes & 3) * bits, (codes >> 2) * bits
