"""A layout is a line of axis names: `Arrangement` permutes a matrix, and packs codes into 32-bit words on the way.

`Arrangement("N j:4 y:2 w:8", "K d:2 e:4 f:2", "K N w e j f y d")` names the axes of the rows, of the columns (slow to
fast), and their order in memory. The inverse is computed, never written, so both directions come from the one line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from quantkit.errors import LayoutError

#: Codes that are packed or unpacked at a time on a CPU: with the words they become, about what a core's cache holds.
_CACHED = 1 << 18


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
        return self._flipped(split).permute(self._permutation).reshape(-1)

    def inverse(self, flat: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return the `[rows, cols]` matrix of `shape` whose arrangement is `flat`."""
        sizes = self._sizes(*shape)
        if flat.numel() != prod(sizes):
            raise LayoutError(f"{flat.numel()} packed entries do not fill a {shape[0]} x {shape[1]} matrix")
        arranged = flat.reshape([sizes[p] for p in self._permutation])
        return self._flipped(arranged.permute(self._back)).reshape(shape)

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        """Return uint8 `codes` `[rows, cols]` in memory order as flat int32 words, the first code in the lowest bits.

        The last axes of the order must fill a word. They are joined one by one while everything else still lies where
        `codes` has it, so that words are moved and not bytes: ten times quicker than permuting first. Some rows are
        joined at a time, so that what is joined stays in the cache.
        """
        sizes = self._sizes(*codes.shape)
        outer, _ = self._word(sizes, bits)
        words = torch.empty([sizes[a] for a in outer], dtype=torch.int32, device=codes.device)
        for part, some in self._slices(codes.reshape(sizes), words, outer):
            some.copy_(self._joined(self._flipped(part).permute(self._permutation), bits))
        return words.reshape(-1)

    def unpack(self, words: Tensor, bits: int, shape: tuple[int, int]) -> Tensor:
        """Return the uint8 codes `[rows, cols]` of `shape` that `pack` made the int32 `words` (any shape) of."""
        sizes = self._sizes(*shape)
        if words.numel() * 32 != prod(sizes) * bits:
            raise LayoutError(f"{words.numel()} packed words do not fill a {shape[0]} x {shape[1]} matrix")
        outer, inner = self._word(sizes, bits)
        codes = torch.empty(sizes, dtype=torch.uint8, device=words.device)
        for part, some in self._slices(codes, words.reshape([sizes[a] for a in outer]), outer):
            part.copy_(self._flipped(_split(some, outer, inner, list(part.shape), bits).permute(self._back)))
        return codes.view(shape)

    def _joined(self, parts: Tensor, bits: int) -> Tensor:
        width = bits
        while width < 32:
            size, low = parts.shape[-1], (1 << width) - 1
            dtype = _holding(width * size)
            joined = parts[..., 0].to(dtype) & low
            for i in range(1, size):
                joined |= (parts[..., i].to(dtype) & low) << (width * i)
            parts, width = joined, width * size
        return parts

    def _word(self, sizes: list[int], bits: int) -> tuple[list[int], list[int]]:
        """Return the axes in memory order that number the words, and those inside a word, fastest first."""
        outer, inner, width = list(self._permutation), [], bits
        while width < 32:
            inner.append(outer.pop())
            width *= sizes[inner[-1]]
        return outer, inner

    def _slices(self, codes: Tensor, words: Tensor, outer: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield some rows of `codes`, split into axes, and the words that they are packed into."""
        first = codes.shape[0]  # what the rows' other axes leave is never inside a word
        rows = max(1, _CACHED * first // max(1, codes.numel())) if codes.device.type == "cpu" else first
        axis = outer.index(0)
        for start in range(0, first, rows):
            count = min(rows, first - start)
            yield codes.narrow(0, start, count), words.narrow(axis, start, count)

    @cached_property
    def _names(self) -> list[str]:
        return [axis.split(":")[0] for axis in (self.rows + " " + self.cols).split()]

    @cached_property
    def _permutation(self) -> list[int]:
        return [self._names.index(name) for name in self.order.split()]

    @cached_property
    def _back(self) -> list[int]:
        return sorted(range(len(self._permutation)), key=self._permutation.__getitem__)

    def _flipped(self, split: Tensor) -> Tensor:
        return split.flip([self._names.index(name) for name in self.flip.split()]) if self.flip else split

    def _sizes(self, rows: int, cols: int) -> list[int]:
        sizes = []
        for line, total in ((self.rows, rows), (self.cols, cols)):
            inner = [int(axis.split(":")[1]) for axis in line.split()[1:]]
            if total % prod(inner):
                raise LayoutError(f"{total} is not a multiple of {prod(inner)}, as the layout needs")
            sizes += [total // prod(inner), *inner]
        return sizes


def _split(words: Tensor, outer: list[int], inner: list[int], sizes: list[int], bits: int) -> Tensor:
    """Return the codes of `words` (axes `outer`) with the axes `inner` behind; they lie in memory in plain order."""
    width = bits * prod(sizes[axis] for axis in inner)
    axes, parts = list(outer), words
    for axis in reversed(inner):
        width //= sizes[axis]
        axes.append(axis)
        split = _laid_out(axes, sizes, _holding(width), words.device)
        for i in range(sizes[axis]):
            split[..., i] = (parts >> (width * i)) & ((1 << width) - 1)
        parts = split
    return parts


def _holding(bits: int) -> torch.dtype:
    return torch.uint8 if bits <= 8 else torch.int16 if bits <= 16 else torch.int32


def _laid_out(axes: list[int], sizes: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an empty tensor with these axes that lies in memory as the plain matrix does (axes in rising order)."""
    plain = sorted(axes)
    empty = torch.empty([sizes[a] for a in plain], dtype=dtype, device=device)
    return empty.permute([plain.index(a) for a in axes])
