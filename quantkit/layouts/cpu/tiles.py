"""What compiled loops do with a matrix of codes: which bytes trade places, and where eight bytes at a time then go.

Every axis of a layout's tile has a power of two of places, so packing permutes the bits of an address: those of a byte
within eight, and those of the eights. A bit of the one kind trades places with one of the other by shifts and masks
between two eights (Warren, Hacker's Delight, 2nd edition, 7-3); when all bytes are right, eights only move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Eights between the end of a row and the next in what loops work on: rows of a power of two would fall into the same
#: few places of a processor's cache.
APART = 8
#: Rows, and eights of columns, that are worked on at a time: few, to stay in the second cache, and long.
HIGH, WIDE = 128, 1024
#: Words that are written one after another, if the order and HIGH allow so many.
RUN = 256

#: A bit of a place on an axis: the axis, and what it counts there.
Bit = tuple[int, int]


class Tiles(NamedTuple):
    """What `compiled.pack` and `compiled.unpack` ask for behind the shape, in their order; they say what each is."""

    block: tuple[int, int, int]
    joins: NDArray[np.int64]
    stages: NDArray[np.uint64]
    source: NDArray[np.uint64]
    target: NDArray[np.uint64]
    steps: tuple[int, int, int]


def tiles(
    rows: tuple[int, ...],
    columns: tuple[int, ...],
    order: tuple[int, ...],
    inner: tuple[int, ...],
    backwards: frozenset[int],
    bits: int,
    total: int,
) -> Tiles | None:
    """Return how a matrix with axes of sizes `rows` and `columns`, numbered through, slowest first, is packed.

    It may be some rows of a larger one, whose first axis has the size `total`.

    Words lie in memory as the axes `order`, slowest first, has them, and hold `inner`, fastest first, of `bits` each;
    those of `backwards` run backwards. None where the loops have no way: bytes that hold one code, axes whose
    sizes are no powers of two (but for the first of rows and of columns) or too few, codes of one byte from columns
    neither next to each other nor eight apart, columns that run backwards, eights of bytes from columns far apart.
    """
    sizes, k = [*rows, *columns], len(rows)
    shared = [axis for i, axis in enumerate(inner) if bits << i < 8]
    outer = [axis for axis in order if axis not in inner]
    joins = _joins(sizes, k, shared, backwards, bits)
    in_words = dict(zip(outer, _strides([sizes[axis] if axis else total for axis in outer]), strict=True))

    # Of the first axes, what is worked on at once has as many bits as whole eights ask for, and a run of words.
    halvings = sum(axis >= k for axis in shared)
    high, wide = prod(rows[1:]), prod(columns[1:])
    needed = {0: 1, k: max(1, (8 << halvings) // wide)}
    if outer[-1] in needed:
        needed[outer[-1]] = max(2, needed[outer[-1]])
    faster = min(needed, key=in_words.__getitem__)
    run = min(RUN * 32 // (high * wide * bits), HIGH // high if faster == 0 else RUN)
    for axis, least in needed.items():
        size = max(least, run) if axis == faster else least
        sizes[axis] = min(size, sizes[axis] & -sizes[axis])
    if not joins or any(sizes[axis] < needed[axis] for axis in needed) or any(size & size - 1 for size in sizes):
        return None
    if any(in_words[axis] % 2 for axis in outer[:-1]):  # words of some rows that begin inside eights
        return None

    left = [axis for axis in range(len(sizes)) if axis not in shared]
    by_column = _bits([axis for axis in reversed(left) if axis >= k], sizes)
    in_rows = {bit: 1 << i for i, bit in enumerate(_bits([axis for axis in reversed(left) if axis < k], sizes))}
    by_word = _bits([axis for axis in reversed(order) if axis not in shared], sizes)
    given, taken = by_column[:3], by_word[:3]
    if any(axis in backwards for axis, _ in by_column) or not in_rows.keys() >= set(taken) - set(given):
        return None
    stages, after = _stages(given, taken, in_rows, backwards)

    high, wide = high * sizes[0], wide * sizes[k] // 8
    block = wide * max(1, min(WIDE, prod(columns) // 8) // wide)
    pitch = block + APART
    in_block = {bit: 1 << i >> 3 for i, bit in enumerate(by_column)}
    in_block |= {bit: pitch * row for bit, row in in_rows.items()}
    in_result = {(axis, value): in_words[axis] * value // 2 for axis, value in by_word if axis in in_words}
    moved = [bit for bit in by_word if bit not in taken]
    places = [after.get(bit, bit) for bit in moved]
    eights = sorted(
        (
            sum(in_result[bit] for bit, digit in zip(moved, digits, strict=True) if digit),
            sum(in_block[bit] for bit, digit in zip(places, digits, strict=True) if digit ^ (bit[0] in backwards)),
        )
        for digits in product((0, 1), repeat=len(moved))
    )
    steps = wide >> halvings, in_words[k] * sizes[k] // 2, in_words[0] * sizes[0] // 2
    if len(joins) == 1 and not stages and high == 1 and steps[0] == steps[1] and all(a == b for a, b in eights):
        eights = []
    return Tiles(
        (high, block, pitch),
        np.array(joins, np.int64).reshape(-1, 3),
        np.array(stages, np.uint64).reshape(-1, 4),
        np.array([place for _, place in eights], np.uint64),
        np.array([place for place, _ in eights], np.uint64),
        steps,
    )


def _joins(
    sizes: Sequence[int], k: int, shared: list[int], backwards: frozenset[int], bits: int
) -> list[tuple[int, bool, int]] | None:
    """Return for each axis whose values share a byte how far apart they are, as loops have it, if turned, and bits."""
    joins: list[tuple[int, bool, int]] = []
    for i, axis in enumerate(shared):
        of_rows = axis < k
        apart = prod(sizes[later] for later in range(axis + 1, k if of_rows else len(sizes)) if later not in shared[:i])
        if not of_rows and apart != 8 and (apart != 1 or i + 1 < len(shared)):
            return None
        joins.append((apart if of_rows else 0 if apart == 8 else -1, axis in backwards, bits << i))
    return joins


def _stages(
    given: list[Bit], taken: list[Bit], in_rows: Mapping[Bit, int], backwards: frozenset[int]
) -> tuple[list[tuple[int, int, int, bool]], dict[Bit, Bit]]:
    """Return the stages that make of eights with bytes numbered by the bits `given` such by `taken`, fastest first.

    A stage is a shift, a mask, how many rows apart partners are (0: none), and if the second comes first. Also in whose
    place each bit is then that was in `given` and is not in `taken`.
    """
    now, after = list(given), dict[Bit, Bit]()
    stages: list[tuple[int, int, int, bool]] = []
    for low, bit in enumerate(taken):
        if bit in now:
            high = now.index(bit)
            if high != low:
                now[low], now[high] = now[high], now[low]
                mask = _bytes([i for i in range(8) if i >> low & 1 and not i >> high & 1])
                stages.append((8 * ((1 << high) - (1 << low)), mask, 0, False))
            continue
        where = after.pop(bit, bit)
        mask = _bytes([i for i in range(8) if not i >> low & 1])
        stages.append((8 << low, mask, in_rows[where], where[0] in backwards))
        after[now[low]], now[low] = where, bit
    return stages, after


def _bytes(chosen: list[int]) -> int:
    return sum(255 << 8 * i for i in chosen)


def _bits(axes: list[int], sizes: Sequence[int]) -> list[Bit]:
    """Return the bits of axes, all fastest first."""
    return [(axis, 1 << i) for axis in axes for i in range(sizes[axis].bit_length() - 1)]


def _strides(sizes: list[int]) -> list[int]:
    return [prod(sizes[i + 1 :]) for i in range(len(sizes))]
