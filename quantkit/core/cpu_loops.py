"""Loops over codes that a CPU runs as machine code, outside Python's lock.

numba compiles each when it is first called and keeps the result on the disk. A step of torch is a pass over memory;
here some rows go through all steps in a processor's cache, eight bytes at a time. Arrays are flat or whole matrices of
unsigned integers, and callers have checked everything: nothing is checked here. What indexes is unsigned where a loop
is not a plain one, since numba asks of signed integers whether they are below 0.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, uint8, uint16, uint32, uint64
from numba.core import cgutils, types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

_ZERO, _NONE, _EVERY = np.uint64(0), np.uint32(0), np.uint64(2**64 - 1)
#: The first of each two bytes, pairs of bytes, and fours.
_BYTES, _PAIRS, _FOURS = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFFFFFFFF)
#: Eights that go through two steps of a loop at a time.
_MANY = 1 << 10
#: Rows that memory is asked for before their turn.
_ROWS = 3
#: Eights in a line of a processor's cache.
_LINE = 8


class _Kept(FunctionCache):
    """What was compiled, on the disk. Where that is full or a file is damaged, a loop is compiled again, no more."""

    def load_overload(self, *args: Any) -> Any:
        try:
            return super().load_overload(*args)
        except Exception:
            with suppress(Exception):
                self.flush()  # else it could not be kept either
            return None

    def save_overload(self, *args: Any) -> None:
        with suppress(Exception):
            super().save_overload(*args)


def _compiled(loop: Callable[..., Any]) -> Any:
    found: Any = njit(nogil=True)(loop)
    with suppress(RuntimeError):  # which says that there is no folder for it
        found._cache = _Kept(loop)
    return found


@intrinsic
def _ahead(context: Any, array: Any, index: Any) -> Any:
    """Ask memory for the line of a flat array's entry, or one past its end, before it is read.

    Processors do that by themselves in memory that is read without a pause: not behind the end of a row or a page.
    """

    def generated(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind, number, byte = signature.args[0], ir.IntType(32), ir.IntType(8).as_pointer()
        found = context.make_array(kind)(context, builder, values[0])
        place = cgutils.get_item_pointer(context, builder, kind, found, values[1:])
        ask = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        to_read, to_all_caches, data = number(0), number(3), number(1)
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], ask)
        builder.call(prefetch, [builder.bitcast(place, byte), to_read, to_all_caches, data])
        return context.get_dummy_value()

    return types.none(array, index), generated


@_compiled
def _lanes(width):
    """Return the lowest `width` bits of every byte."""
    return uint64(0x0101010101010101) * uint64((1 << width) - 1)


@_compiled
def _joined(given, begin, pitch, rows, line, out, apart, turned, width, above, mask):
    """Let each byte of the matrix `out` be two of `rows` of `line` eights, which lie in the flat `given`.

    There they begin at `begin`, with `pitch` from row to row, and two are `apart` rows, or 8 columns (0), or one (-1).
    Of each counts what `mask` has above `above` bits; the second, or with `turned` the first, goes above the other's
    `width` bits.
    """
    up = uint64(width)
    if apart > 0:
        for row in range(rows // 2):
            at = begin + (row // apart * 2 * apart + row % apart) * pitch
            low, high, both = given[at : at + line], given[at + apart * pitch :][:line], out[row]
            if turned:
                low, high = high, low
            for i in range(0, line, _LINE):
                _ahead(given, at + _ROWS * pitch + i)
                _ahead(given, at + (apart + _ROWS) * pitch + i)
            for i in range(line):
                both[i] = low[i] >> above & mask | (high[i] >> above & mask) << up
    elif apart == 0:
        first, second = (1, 0) if turned else (0, 1)
        for row in range(rows):
            some, both = given[begin + row * pitch :][:line], out[row]
            for i in range(0, line, _LINE):
                _ahead(given, begin + (row + _ROWS) * pitch + i)
            for i in range(line // 2):
                both[i] = some[2 * i + first] >> above & mask | (some[2 * i + second] >> above & mask) << up
    else:
        back = uint64(8 - width)
        for row in range(rows):
            some, both = given[begin + row * pitch :][:line], out[row].view(np.uint32)
            for i in range(0, line, _LINE):
                _ahead(given, begin + (row + _ROWS) * pitch + i)
            for i in range(line):
                x = some[i] >> above & mask
                x = (x << up | x >> uint64(8)) if turned else (x | x >> back)
                x &= _BYTES
                x = (x | x >> uint64(8)) & _PAIRS
                both[i] = uint32(x | x >> uint64(16))


@_compiled
def _parted(given, rows, line, out, begin, pitch, apart, turned, width, above, onto):
    """Undo `_joined`: fill `rows` of `line` eights of the flat `out` from the matrix `given`.

    With `onto`, their bits are added to those there.
    """
    down, mask, keep = uint64(width), _lanes(width), _EVERY if onto else _ZERO
    if apart > 0:
        for row in range(rows // 2):
            at = begin + (row // apart * 2 * apart + row % apart) * pitch
            low, high, both = out[at : at + line], out[at + apart * pitch :][:line], given[row]
            if turned:
                low, high = high, low
            for i in range(line):
                low[i] = low[i] & keep | (both[i] & mask) << above
                high[i] = high[i] & keep | (both[i] >> down & mask) << above
    elif apart == 0:
        first, second = (1, 0) if turned else (0, 1)
        for row in range(rows):
            some, both = out[begin + row * pitch :][:line], given[row]
            for i in range(line // 2):
                some[2 * i + first] = some[2 * i + first] & keep | (both[i] & mask) << above
                some[2 * i + second] = some[2 * i + second] & keep | (both[i] >> down & mask) << above
    else:
        back = uint64(8 - width)
        for row in range(rows):
            some, both = out[begin + row * pitch :][:line], given[row].view(np.uint32)
            for i in range(line):
                x = uint64(both[i])
                x = (x | x << uint64(16)) & _PAIRS
                x = (x | x << uint64(8)) & _BYTES
                x = (x << uint64(8) | x >> down) if turned else (x | x << back)
                some[i] = some[i] & keep | (x & mask) << above


@_compiled
def _exchanged(eights, rows, line, stages, backwards):
    """Let bytes of `rows` of `line` eights trade places as `stages` say, with `backwards` the last one first.

    A stage is a shift, a mask of bytes, how many rows apart partners are (0: each is its own), and if the second comes
    first.
    """
    for s in range(len(stages)):
        shift, mask, away, turned = stages[len(stages) - 1 - s if backwards else s]
        apart = int(away)
        if apart:
            for row in range(rows // 2):
                at = row // apart * 2 * apart + row % apart
                first, second = eights[at], eights[at + apart]
                if turned:
                    first, second = second, first
                for i in range(line):
                    trade = (first[i] >> shift ^ second[i]) & mask
                    second[i] ^= trade
                    first[i] ^= trade << shift
        else:
            for row in range(rows):
                some = eights[row]
                for i in range(line):
                    trade = (some[i] >> shift ^ some[i]) & mask
                    some[i] ^= trade ^ trade << shift


@_compiled
def pack(codes, words, shape, block, joins, stages, source, target, steps, above, mask):
    """Fill `words` with `codes`, both flat uint64, `shape` rows and eights; `mask` above `above` bits of a code counts.

    `block` rows and eights at a time, with a pitch for what is made of them, are joined as `joins` say (apart, turned,
    width) until bytes are full, and exchanged by `stages`. Then those at `source` go to `target`: a step, from which
    the next is `steps[0]` eights and `steps[1]` eights of words away; `steps[2]` such are between one block of rows and
    the next. Without any `source`, what is joined, once, is in its order.
    """
    rows, columns = shape
    high, wide, pitch = block
    if len(source) == 0:
        apart, turned, width = joins[0]
        _joined(codes, 0, columns, rows, columns, words.reshape(rows, -1), apart, turned, width, above, mask)
        return
    given, taken = np.empty((high, pitch), np.uint64), np.empty((high, pitch), np.uint64)
    for top in range(0, rows, high):
        done = 0
        for begin in range(0, columns, wide):
            left, line = high, min(wide, columns - begin)
            for i in range(len(joins)):
                apart, turned, width = joins[i]
                if i == 0:
                    at = top * columns + begin
                    _joined(codes, at, columns, left, line, taken, apart, turned, width, above, mask)
                else:
                    _joined(given.reshape(-1), 0, pitch, left, line, taken, apart, turned, width, _ZERO, _EVERY)
                left, line = (left // 2, line) if apart > 0 else (left, line // 2)
                given, taken = taken, given
            _exchanged(given, left, line, stages, False)
            flat = given.reshape(-1)
            for step in range(line // steps[0]):
                at, out = uint64(step * steps[0]), uint64(top // high * steps[2] + (done + step) * steps[1])
                for i in range(len(source)):
                    words[out + target[i]] = flat[at + source[i]]
            done += line // steps[0]


@_compiled
def unpack(codes, words, shape, block, joins, stages, source, target, steps, above, onto):
    """Fill `codes` with what `pack` made `words` of; with `onto` add their bits to those there."""
    rows, columns = shape
    high, wide, pitch = block
    if len(source) == 0:
        apart, turned, width = joins[0]
        _parted(words.reshape(rows, -1), rows, columns, codes, 0, columns, apart, turned, width, above, onto)
        return
    given, taken = np.empty((high, pitch), np.uint64), np.empty((high, pitch), np.uint64)
    for top in range(0, rows, high):
        done = 0
        for begin in range(0, columns, wide):
            left, line = high, min(wide, columns - begin)
            for i in range(len(joins)):
                left, line = (left // 2, line) if joins[i][0] > 0 else (left, line // 2)
            flat = given.reshape(-1)
            for step in range(line // steps[0]):
                at, out = uint64(step * steps[0]), uint64(top // high * steps[2] + (done + step) * steps[1])
                for i in range(0, len(source), _LINE):
                    _ahead(words, out + uint64(steps[1]) + target[i])
                for i in range(len(source)):
                    flat[at + source[i]] = words[out + target[i]]
            done += line // steps[0]
            _exchanged(given, left, line, stages, True)
            for i in range(len(joins) - 1, -1, -1):
                apart, turned, width = joins[i]
                left, line = (left * 2, line) if apart > 0 else (left, line * 2)
                if i == 0:
                    at = top * columns + begin
                    _parted(given, left, line, codes, at, columns, apart, turned, width, above, onto)
                else:
                    _parted(given, left, line, taken.reshape(-1), 0, pitch, apart, turned, width, _ZERO, False)
                given, taken = taken, given


@_compiled
def looked_up(index, table, out):
    """Fill `out` with the entries of `table` at `index`, an array of unsigned integers."""
    for i in range(len(index)):
        out[i] = table[index[i]]


@_compiled
def stream(codes, words, bits):
    """Fill the uint32 `words` with `bits` of each code, one behind the other; `codes` are a multiple of four eights."""
    one, two, four, length = uint64(8 - bits), uint64(16 - 2 * bits), uint64(32 - 4 * bits), uint64(8 * bits)
    eights, wide = np.empty(_MANY, np.uint64), words[: len(words) // 2 * 2].view(np.uint64)
    at, held, filled = 0, _ZERO, _ZERO
    for begin in range(0, len(codes), _MANY):
        some = codes[begin : begin + _MANY]
        for i in range(len(some)):
            x = some[i]
            x = x & _BYTES | (x & ~_BYTES) >> one
            x = x & _PAIRS | (x & ~_PAIRS) >> two
            eights[i] = x & _FOURS | (x & ~_FOURS) >> four
        for i in range(len(some)):
            held |= eights[i] << filled
            filled += length
            if filled >= uint64(64):
                wide[at] = held
                filled -= uint64(64)
                held = eights[i] >> (length - filled)
                at += 1
    if filled:
        words[-1] = uint32(held)


@_compiled
def unstream(codes, words, bits):
    """Fill `codes` with what `stream` made `words` of."""
    one, two, four, length = uint64(8 - bits), uint64(16 - 2 * bits), uint64(32 - 4 * bits), uint64(8 * bits)
    first = uint64((1 << bits) - 1) * uint64(0x0001000100010001)
    pair = uint64((1 << 2 * bits) - 1) * uint64(0x0000000100000001)
    fours = uint64((1 << 4 * bits) - 1)
    wide = words[: len(words) // 2 * 2].view(np.uint64)
    at, held, filled = 0, _ZERO, _ZERO
    for begin in range(0, len(codes), _MANY):
        some = codes[begin : begin + _MANY]
        for i in range(len(some)):
            if filled < length:
                more = wide[at] if at < len(wide) else uint64(words[-1])
                some[i] = held | more << filled
                held = more >> (length - filled)
                filled += uint64(64) - length
                at += 1
            else:
                some[i] = held
                held >>= length
                filled -= length
        for i in range(len(some)):
            x = some[i]
            x = x & fours | x << four & fours << uint64(32)
            x = x & pair | x << two & pair << uint64(16)
            some[i] = x & first | x << one & first << uint64(8)


@_compiled
def sparse(quads, zero, cases, kept, codes):
    """Fill `kept` (uint16) with two bytes of each of `quads`, four below 16 as a uint32, and `codes` (uint8).

    Bit i of a number says that byte i is not that of `zero` (uint32); the code, which says what is kept, is the
    number's four bits of `cases` (uint64). Return whether all codes are other than 0. In 32 bits, and without a table
    in memory, so that one instruction does as much for several quads.
    """
    wrong, low, high = _NONE, uint32(cases & _FOURS), uint32(cases >> uint64(32))
    for i in range(len(quads)):
        quad = quads[i]
        which = uint32(uint32((quad ^ zero) + uint32(0x7F7F7F7F)) >> uint32(7)) & uint32(0x01010101)
        which = uint32(which | which >> uint32(7))
        which = uint32((which | which >> uint32(14)) & uint32(15))
        eight = high if which & uint32(8) else low
        code = uint32(eight >> uint32(uint32(which & uint32(7)) << uint32(2))) & uint32(15)
        first = uint32(quad >> uint32(uint32(code & uint32(3)) << uint32(3))) & uint32(0xFF)
        second = uint32(quad >> uint32(uint32(code >> uint32(2)) << uint32(3)))
        kept[i] = uint16(first | second << uint32(8))
        codes[i] = uint8(code)
        wrong |= uint32(code == _NONE)
    return wrong == _NONE


@_compiled
def dense(kept, codes, zero, quads):
    """Fill `quads` (uint32) with two `kept` bytes (uint16) each where `codes` say; the other bytes are `zero`'s."""
    for i in range(len(quads)):
        two, code = uint64(kept[i]) ^ zero & uint64(0xFFFF), uint64(codes[i])
        first = (two & uint64(0xFF)) << ((code & uint64(3)) << uint64(3))
        second = (two >> uint64(8)) << ((code >> uint64(2)) << uint64(3))
        quads[i] = uint32((first | second) ^ zero)


@_compiled
def all_rise(words):
    """Return whether the upper two bits of each four of `words` (uint64) are a larger number than the lower two."""
    low, high = uint64(0x3333333333333333), uint64(0x4444444444444444)
    rising = high
    for i in range(len(words)):
        rising &= ((words[i] >> uint64(2)) & low) + low - (words[i] & low)
    return rising == high


@_compiled
def at_most_two(values, zero):
    """Return whether at most two of each four bytes of `values` (uint64) are not those of `zero`."""
    wrong, low, ones = _ZERO, uint64(0x7F7F7F7F7F7F7F7F), uint64(0x0101010101010101)
    for i in range(len(values)):
        x = values[i] ^ zero
        x = ((x & low) + low | x) >> uint64(7) & ones
        x += x >> uint64(16)
        wrong |= x + (x >> uint64(8)) + ones  # of which bit 2 of the lowest of four says 3 or 4
    return wrong & uint64(0x0000000400000004) == 0
