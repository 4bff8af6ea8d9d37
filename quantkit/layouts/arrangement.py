"""A layout is a line of axis names: `Arrangement` permutes a matrix, and packs codes into 32-bit words on the way.

`Arrangement("N j:4 y:2 w:8", "K d:2 e:4 f:2", "K N w e j f y d")` names the axes of the rows, of the columns (slow to
fast), and their order in memory. The inverse is computed, never written, so both directions come from the one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch
from torch import Tensor

from quantkit.core.tensors import aligned
from quantkit.errors import LayoutError

#: Codes that torch packs or unpacks at a time on a CPU, so that what becomes of them takes little memory.
_CACHED = 1 << 20
#: Neighbours from which on it is quicker to widen all than to move each.
_LONG = 32

#: What takes or fills some rows of a matrix, given the number of the first.
RowsOf = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class Arrangement:
    """A permutation of a matrix given by axis names; the first axis of each side takes what its sizes leave.

    `flip` names axes that run backwards; the first of the rows never does.
    """

    rows: str
    cols: str
    order: str
    flip: str = ""

    def __call__(self, matrix: Tensor) -> Tensor:
        """Return the entries of `matrix` `[rows, cols]` in memory order, flat and contiguous."""
        split = matrix.reshape(self._sizes(*matrix.shape))
        return self._flipped(split, self._permutation).permute(self._permutation).reshape(-1)

    def inverse(self, flat: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return the `[rows, cols]` matrix of `shape` whose arrangement is `flat`."""
        sizes = self._sizes(*shape)
        if flat.numel() != prod(sizes):
            raise LayoutError(f"{flat.numel()} packed entries do not fill a {shape[0]} x {shape[1]} matrix")
        arranged = flat.reshape([sizes[p] for p in self._permutation])
        return self._flipped(arranged.permute(_rising(self._permutation)), self._permutation).reshape(shape)

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        """Return uint8 `codes` `[rows, cols]` of `bits` each in memory order as flat int32 words, the first lowest."""
        words = torch.empty([codes.numel() * bits // 32], dtype=torch.int32, device=codes.device)
        self.packing(words, bits, (len(codes), codes.shape[1]))(0, codes)
        return words

    def unpack(self, words: Tensor, bits: int, shape: tuple[int, int]) -> Tensor:
        """Return the uint8 codes `[rows, cols]` of `shape` that `pack` made the int32 `words` (any shape) of."""
        codes = torch.empty(shape, dtype=torch.uint8, device=words.device)
        self.unpacking(words, bits, shape)(0, codes)
        return codes

    def packing(self, words: Tensor, bits: int, shape: tuple[int, int], above: int | None = None) -> RowsOf:
        """Return what packs rows of a matrix of `shape` into its flat int32 `words`, given the number of the first.

        Rows are uint8 codes `[some, cols]`; their number and that of the first are multiples of what the sizes of the
        rows' axes make. With `above`, only the `bits` above that many of each code.

        The last axes of the order must fill a word. They are joined one by one while everything else still lies where
        `codes` has it, so that a processor's word of codes is joined at a time and only words are permuted, not codes.
        """
        places = _places(self, bits, shape)
        order, outer = places.order, places.outer
        places.require(words)

        def packed(first: int, codes: Tensor) -> None:
            codes = aligned(codes)
            sizes, those = places.split(words, first, codes)
            for part, some in _slices(codes.view(sizes), those, outer):
                parts, width = order._flipped(part, outer).contiguous().view(-1), bits
                if above is not None:
                    eights = _eights(parts) >> above if above else _eights(parts)
                    parts = (eights & _lanes(bits, torch.int64)).view(torch.uint8)
                for axis, run in _runs(places.inner, sizes):
                    parts = _joined(parts, sizes[axis], run, width, axis in order._backwards)
                    width *= sizes[axis]
                back = _rising(outer)
                some.copy_(parts.view([some.shape[axis] for axis in back]).permute(_rising(back)))

        return packed

    def unpacking(self, words: Tensor, bits: int, shape: tuple[int, int], onto: bool = False, above: int = 0) -> RowsOf:
        """Return what fills rows of contiguous uint8 codes with what `packing` made `words` (any shape) of.

        With `onto`, their bits are added to those there, above as many as `above`.
        """
        places, words = _places(self, bits, shape), aligned(words).view(-1)
        order, outer = places.order, places.outer
        places.require(words)
        direct = not onto and not order._backwards.intersection(outer)

        def unpacked(first: int, codes: Tensor) -> None:
            sizes, those = places.split(words, first, codes)
            last, *runs = _runs(places.inner, sizes)
            for part, some in _slices(codes.view(sizes), those, outer):
                parts, width = some.permute(_rising(outer)).contiguous().view(-1), 32
                for axis, run in reversed(runs):
                    width //= sizes[axis]
                    parts = _split(parts, sizes[axis], run, width, axis in order._backwards)
                found = part if direct else torch.empty_like(part)
                _split(parts, sizes[last[0]], last[1], bits, last[0] in order._backwards, out=found.view(-1))
                if onto:
                    _eights(found).bitwise_left_shift_(above)
                    _eights(part).bitwise_or_(_eights(order._flipped(found, outer)))
                elif not direct:
                    part.copy_(order._flipped(found, outer))

        return unpacked

    @cached_property
    def _names(self) -> list[str]:
        return [axis.split(":")[0] for axis in (self.rows + " " + self.cols).split()]

    @cached_property
    def _permutation(self) -> list[int]:
        return [self._names.index(name) for name in self.order.split()]

    @cached_property
    def _backwards(self) -> set[int]:
        return {self._names.index(name) for name in self.flip.split()}

    def _flipped(self, split: Tensor, axes: list[int]) -> Tensor:
        """Return a matrix that is split into axes with those of `axes` turned around that run backwards."""
        turned = sorted(self._backwards.intersection(axes))
        return split.flip(turned) if turned else split

    def _sizes(self, rows: int, cols: int) -> list[int]:
        sizes = []
        for line, total in ((self.rows, rows), (self.cols, cols)):
            inner = [int(axis.split(":")[1]) for axis in line.split()[1:]]
            if total % prod(inner):
                raise LayoutError(f"{total} is not a multiple of {prod(inner)}, as the layout needs")
            sizes += [total // prod(inner), *inner]
        return sizes


@dataclass(frozen=True, eq=False)
class _Places:
    """Where the codes of a matrix with axes of `sizes` by `order` lie in its words.

    These have the axes `outer`, slowest first; those of `inner`, of `bits` each, lie within one.
    """

    order: Arrangement
    bits: int
    inner: list[int]
    outer: list[int]
    sizes: list[int]

    def require(self, words: Tensor) -> None:
        """Raise LayoutError if `words` are not as many as the matrix has."""
        if words.numel() * 32 != prod(self.sizes) * self.bits:
            rows = len(self.order.rows.split())
            n, k = prod(self.sizes[:rows]), prod(self.sizes[rows:])
            raise LayoutError(f"{words.numel()} packed words do not fill a {n} x {k} matrix")

    def split(self, words: Tensor, first: int, codes: Tensor) -> tuple[list[int], Tensor]:
        """Return the sizes of the axes of the rows `codes` from `first` on, and those of the flat `words` for them."""
        sizes = self.order._sizes(*codes.shape)
        axes = words.view([self.sizes[axis] for axis in self.outer])
        return sizes, axes.narrow(self.outer.index(0), first * sizes[0] // len(codes), sizes[0])


@lru_cache(maxsize=64)
def _places(whole: Arrangement, bits: int, shape: tuple[int, int]) -> _Places:
    """Return where the codes of a matrix of `shape` lie; LayoutError if the order's axes do not divide it."""
    order, inner = _within(whole, bits)
    sizes, outer = order._sizes(*shape), [axis for axis in order._permutation if axis not in inner]
    return _Places(order, bits, inner, outer, sizes)


def pieces(k: int, *matrices: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of all `matrices` at a time, as many of `k` codes as a processor's cache holds.

    On a GPU all of them, which has no cache to stay in.
    """
    rows = max(1, _CACHED // max(1, k) if matrices[0].device.type == "cpu" else len(matrices[0]))
    return zip(*(matrix.split(rows) for matrix in matrices), strict=True)


def _slices(codes: Tensor, words: Tensor, outer: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some rows of `codes`, split into axes, and the words that they are packed into."""
    first = codes.shape[0]  # what the rows' other axes leave is never inside a word
    rows = max(1, _CACHED * first // max(1, codes.numel())) if codes.device.type == "cpu" else first
    axis = outer.index(0)
    for start in range(0, first, rows):
        count = min(rows, first - start)
        yield codes.narrow(0, start, count), words.narrow(axis, start, count)


@lru_cache
def _within(whole: Arrangement, bits: int) -> tuple[Arrangement, list[int]]:
    """Return the same order with axes of two wherever codes share a byte, and its axes inside a word, fastest first."""
    inner: list[int] = []
    width, sizes = bits, dict(axis.split(":") for axis in f"{whole.rows} {whole.cols}".split() if ":" in axis)
    for name in reversed(whole.order.split()):
        if width >= 32:
            break
        size = int(sizes[name])
        if width < 8 and size > 2:
            return _within(_halved(whole, name, size // 2), bits)
        inner.append(whole._names.index(name))
        width *= size
    return whole, inner


def _halved(whole: Arrangement, name: str, half: int) -> Arrangement:
    """Return the same order with the axis `name` as two, of the sizes `half` and 2."""
    two = {f"{name}:{2 * half}": f"{name}':{half} {name}:2", name: f"{name}' {name}"}
    lines = (whole.rows, whole.cols, whole.order, whole.flip)
    return Arrangement(*(" ".join(two.get(axis, axis) for axis in line.split()) for line in lines))


def _runs(inner: list[int], sizes: list[int]) -> list[tuple[int, int]]:
    """Return each axis inside a word, and how many parts one of its steps is in plain order when it is joined."""
    behind = [[axis for axis in range(last + 1, len(sizes)) if axis not in inner[:i]] for i, last in enumerate(inner)]
    return [(axis, prod(sizes[b] for b in after)) for axis, after in zip(inner, behind, strict=True)]


def _rising(axes: list[int]) -> list[int]:
    return sorted(range(len(axes)), key=axes.__getitem__)


def _joined(parts: Tensor, size: int, run: int, width: int, backwards: bool) -> Tensor:
    """Return flat `parts` `[..., size, run]` of `width` bits as `[..., run]`, the first of `size` in the lowest bits.

    With `backwards` the last one.
    """
    if run == 1:
        parts = parts.view(-1, size).flip(1).view(-1) if backwards else parts
        if width >= 8:
            return parts.view(_holding(width * size))
        pairs = parts.view(torch.int32)  # two pairs of bytes
        return (pairs >> (8 - width)).bitwise_or_(pairs).view(torch.int16).to(torch.uint8)  # which drops what is above
    if width < 8:
        wide = _wide(run)
        halves = parts.view(wide).view(-1, 2, run // wide.itemsize).unbind(1)
        low, high = reversed(halves) if backwards else halves
        return torch.add(low, high, alpha=1 << width).view(-1).view(torch.uint8)  # shift and or in one
    whole = _holding(width * size)
    each_one = parts.view(-1, size, run).unbind(1)
    each_one = each_one[::-1] if backwards else each_one
    if run >= _LONG:
        *lower, part = each_one
        words = part.to(whole)
        for part in reversed(lower):
            below = part.to(whole)
            below = below if part.dtype == torch.uint8 else below.bitwise_and_((1 << width) - 1)
            words = torch.add(below, words, alpha=1 << width)
        return words.view(-1)
    moved = parts.new_empty(parts.numel() // (size * run), run, size)
    for i, part in enumerate(each_one):  # at once would go by twos and fours
        moved[..., i] = part
    return moved.view(-1).view(whole)


def _split(parts: Tensor, size: int, run: int, width: int, backwards: bool, out: Tensor | None = None) -> Tensor:
    """Return what `_joined` made `parts` of, each of `width` bits; with `out`, flat and of their dtype, in that."""
    if out is None:
        if width >= 8 and run == 1 and not backwards:
            return parts.view(_holding(width))
        out = torch.empty(parts.numel() * size, dtype=_holding(width), device=parts.device)
    if width < 8 and run > 1:
        wide = _wide(run)
        low = parts.view(wide).view(-1, run // wide.itemsize)
        both = out.view(wide).view(-1, 2, run // wide.itemsize)
        torch.stack((low >> width, low) if backwards else (low, low >> width), 1, out=both)
        both &= _lanes(width, wide)
    elif width < 8:
        pairs, both = parts.to(torch.int16).view(torch.int32), out.view(torch.int32)
        torch.bitwise_left_shift(pairs, 8 - width, out=both)
        both |= pairs
        both &= _lanes(width, torch.int32)
        if backwards:
            out.copy_(out.view(-1, 2).flip(1).view(-1))
    else:
        apart = out.view(-1, size, run)
        for i in range(size):
            part = (parts.view(torch.int32) >> width * i).view(parts.dtype) if i else parts
            apart[:, size - 1 - i if backwards else i] = part.view(-1, run)  # which drops what lies above
    return out


def _eights(codes: Tensor) -> Tensor:
    """Return contiguous uint8 codes as flat integers of eight."""
    return codes.view(-1).view(torch.int64)


def _holding(bits: int) -> torch.dtype:
    return torch.uint8 if bits <= 8 else torch.int16 if bits <= 16 else torch.int32


def _wide(run: int) -> torch.dtype:
    """Return the widest integers that `run` bytes are whole ones of."""
    return next(dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8) if run % dtype.itemsize == 0)


def _lanes(width: int, dtype: torch.dtype) -> int:
    """Return the mask of the lowest `width` bits of every byte."""
    return int.from_bytes(bytes([(1 << width) - 1] * dtype.itemsize), "little")
