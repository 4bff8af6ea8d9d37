"""A layout is a line of axis names: `Arrangement` permutes, `pack_words` puts codes into 32-bit words.

`Arrangement("N j:4 y:2 w:8", "K d:2 e:4 f:2", "K N w e j f y d")` names the axes of the rows, of the columns (slow to
fast), and their order in memory. The inverse is computed, never written, so both directions come from the one line.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from quantkit.errors import LayoutError


@dataclass(frozen=True)
class Arrangement:
    """A permutation of a matrix given by axis names; the first axis of each side takes what its sizes leave.

    `flip` names axes that run backwards.
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
        back = sorted(range(len(sizes)), key=self._permutation.__getitem__)
        return self._flipped(arranged.permute(back)).reshape(shape)

    @cached_property
    def _names(self) -> list[str]:
        return [axis.split(":")[0] for axis in (self.rows + " " + self.cols).split()]

    @cached_property
    def _permutation(self) -> list[int]:
        return [self._names.index(name) for name in self.order.split()]

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


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes of `bits` (1, 2 or 4) along the last axis into int32 words, the first code in the lowest bits.

    `[..., m]` with `m` a multiple of `32 / bits` becomes `[..., m * bits / 32]`.
    """
    per_byte = 8 // bits
    if codes.shape[-1] % (4 * per_byte):
        raise LayoutError(f"{codes.shape[-1]} codes of {bits} bits do not fill 32-bit words")
    packed = codes[..., ::per_byte].contiguous()
    for i in range(1, per_byte):
        packed |= codes[..., i::per_byte] << (bits * i)
    return packed.view(torch.int32)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return the uint8 codes of int32 words, the inverse of `pack_words`: `[..., m]` becomes `[..., m * 32 / bits]`."""
    packed = words.contiguous().view(torch.uint8)
    low = (1 << bits) - 1
    parts = [(packed >> (bits * i)) & low for i in range(8 // bits)]
    return torch.stack(parts, dim=-1).flatten(-2)
