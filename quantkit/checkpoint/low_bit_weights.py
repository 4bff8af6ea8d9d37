"""The arithmetic of weights in few bits: `(code - zero point) * scale` in float32, rounded once to
the model's dtype.

Codes are 8-bit floats, integers, or E2M1 floats of four bits; scales are floats, or bare exponents
(E8M0). Sources: the model card and code of DeepSeek-V3 (blocks), the OCP Microscaling specification
1.0 (E2M1, E8M0), the gpt-oss model card (MXFP4), NVIDIA's description of NVFP4 (E4M3 scales over a
float32 one), and docs/layouts.md 9 (integers).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.algorithms.numerics import row_slices
from quantkit.checkpoint.stored_tensors import Derived, Read
from quantkit.core.formats import NVFP4
from quantkit.errors import CheckpointError
from quantkit.io.json_files import AGAIN

#: The values of the two E2M1 codes of each byte, the first in its low bits.
E2M1_PAIRS = torch.tensor(
    [[NVFP4.values[byte & 15], NVFP4.values[byte >> 4]] for byte in range(256)], device="cpu"
)


class LowBitWeight(NamedTuple):
    """Describe a weight `[n, k]` or experts `[e, n, k]` by the names of its tensors.

    `unpack` turns codes `[m, c]` into float32 `[m, k]`, or more columns. `block` are the rows and
    columns that share a scale. `order` has the group of each column, all -1 for none; `divisor`
    divides all scales; `others` are tensors that are known already. The model has `[k, n]` if
    `transposed`.
    """

    codes: str
    scale: str
    shape: tuple[int, ...]
    block: tuple[int, int]
    unpack: Callable[[Tensor], Tensor]
    zero: str | None = None
    order: str | None = None
    divisor: str | None = None
    others: tuple[str, ...] = ()
    transposed: bool = False

    def derived(self, dtype: torch.dtype) -> Derived:
        """Return the dense tensor, which is read and dequantized by experts, or by
        ranges of rows.
        """
        *outer, n, k = self.shape
        inputs = (self.codes, self.scale, self.zero, self.order, self.divisor, *self.others)
        return Derived(
            (*outer, *((k, n) if self.transposed else (n, k))),
            dtype,
            tuple(name for name in inputs if name),
            partial(_read, self, dtype),
        )


def unpack_words(bits: int, words: Tensor) -> Tensor:
    """Unpack int32 words `[m, w]`, the first code in the lowest bits, into signed values `[m, 32 w
    / bits]`.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes: Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.flatten(1).float().sub_(2 ** (bits - 1))


def unpack_float8(codes: Tensor) -> Tensor:
    """Look up the values of 8-bit floats, which torch converts several times as slowly."""
    table = torch.arange(256, dtype=torch.uint8).view(codes.dtype).float()
    return table.index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)


def unpack_e2m1(pairs: Tensor) -> Tensor:
    """Unpack bytes `[m, c]` of two E2M1 codes each into their values `[m, 2 c]`."""
    return E2M1_PAIRS.index_select(0, pairs.flatten().int()).view(len(pairs), -1)


def grid(shape: tuple[int, ...], rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape of the scales of a weight."""
    *outer, n, k = shape
    return *outer, -(-n // rows), -(-k // columns)


def _read(w: LowBitWeight, dtype: torch.dtype, read: Read, index: int | slice | None) -> Tensor:
    """Read and dequantize a weight, or the entry or range `index` of its experts, or of the rows of
    a matrix.
    """
    *outer, n, k = w.shape
    if outer and not isinstance(index, int):
        experts = range(outer[0])[index or slice(None)]
        stacked = torch.empty(len(experts), *((k, n) if w.transposed else (n, k)), dtype=dtype)
        for place, each in enumerate(experts):
            stacked[place] = _read(w, dtype, read, each)
        return stacked
    expert = index if outer and outer[0] > 1 and isinstance(index, int) else None
    scales, zeros = _scales(w, read, expert), _zeros(w, read, expert)
    column = _groups(w, read)
    rows = torch.arange(n) if outer or index is None else torch.arange(n)[index].reshape(-1)
    codes = read(w.codes, index).reshape(len(rows), -1)
    out = torch.empty(len(rows), k, dtype=dtype)
    for some in row_slices(codes, k):
        at = rows[some] // w.block[0]
        values = w.unpack(codes[some])[:, :k]
        if column is None:  # whole groups in their order: each scale meets a view of its columns
            values = values.unflatten(1, (-1, w.block[1]))
        if zeros is not None:
            values -= _spread(zeros[at], column)
        values *= _spread(scales[at], column)
        out[some] = values.flatten(1) if column is None else values
    if w.transposed:  # a view: experts are transposed again before they are used
        out = out.t()
    return out if outer or not isinstance(index, int) else out[0]


def _spread(scales: Tensor, column: Tensor | None) -> Tensor:
    """Give the scales `[m, g]` of each column; without `column`, of each group `[m, g, 1]`."""
    return scales.unsqueeze(-1) if column is None else scales.index_select(1, column)


def _scales(w: LowBitWeight, read: Read, expert: int | None) -> Tensor:
    """Read the scales float32 `[rows of blocks, columns of blocks]`; CheckpointError if one is not
    finite.
    """
    stored = read(w.scale, expert)
    scales = (stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored).float()
    if not bool(torch.isfinite(scales).all()):  # of E8M0: a byte of 255
        first = (~torch.isfinite(scales)).nonzero()[0].tolist()
        at = first if expert is None else [expert, *first]
        raise CheckpointError(
            f"{w.scale} has a scale that is NaN or infinite, first at {at}", AGAIN
        )
    scales = scales.reshape(grid(w.shape[-2:], *w.block))
    if w.divisor is None:
        return scales
    divisors = read(w.divisor, None).float().flatten()
    divisor = divisors[expert or 0] if len(divisors) > 1 else divisors[0]
    if divisor == 0 or not bool(torch.isfinite(scales / divisor).all()):
        raise CheckpointError(f"{w.divisor} is {float(divisor)}, which divides no scale", AGAIN)
    return scales / divisor


def _zeros(w: LowBitWeight, read: Read, expert: int | None) -> Tensor | None:
    """Read the zero points like the scales; None if there are none. int32 zero points are packed
    along the rows.
    """
    if w.zero is None:
        return None
    stored, (rows, groups) = read(w.zero, expert), grid(w.shape[-2:], *w.block)
    if stored.dtype != torch.int32:
        return stored.float().reshape(rows, groups)
    return w.unpack(stored.reshape(-1, groups).t())[:, :rows].t()


def _groups(w: LowBitWeight, read: Read) -> Tensor | None:
    """Map each column of the weight to its column of scales; None for whole groups in their order.
    CheckpointError for a column out of range.
    """
    static = torch.arange(w.shape[-1]) // w.block[1]
    order = static if w.order is None else read(w.order, None).long()
    if w.order is None or bool((order == -1).all()):
        return static if w.shape[-1] % w.block[1] else None
    if bool(((order < 0) | (order > static[-1])).any()):
        raise CheckpointError(
            f"{w.order} names a group that is not one of {int(static[-1]) + 1}", AGAIN
        )
    return order
