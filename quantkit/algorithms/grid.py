"""A grid is the set of values of a group's codes; this module rounds weights to it.

A scale is rounded to float16 before it is used, so the search compares the scales that are stored
(ALGORITHMS 3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.algorithms.numerics import row_slices, working_dtype
from quantkit.core.formats import Format
from quantkit.core.scheme import Scheme
from quantkit.errors import NumericError, Setting, Words

LARGEST_HALF = 65504.0
SMALLEST_SCALE = 2.0**-20


class Grid(NamedTuple):
    """Hold scales float16 and, if asymmetric, zeros uint8 of the same shape."""

    scales: Tensor
    zeros: Tensor | None


def encode(weight: Tensor, scheme: Scheme, grid: Grid) -> Tensor:
    """Return the codes uint8 `[n, k]` nearest to `weight` `[n, k]` on a grid `[n, groups]`."""
    n, k = weight.shape
    codes = torch.empty(n, k, dtype=torch.uint8, device=weight.device)
    dtype = working_dtype(weight)
    for rows in row_slices(weight, weight.shape[1]):
        x = weight[rows].to(dtype).reshape(-1, grid.scales.shape[1], k // grid.scales.shape[1])
        x = x / grid.scales[rows].to(dtype).unsqueeze(-1)
        if grid.zeros is None:
            codes[rows] = scheme.format.encode(x).view(-1, k)
        else:
            zeros = grid.zeros[rows].to(dtype).unsqueeze(-1)
            codes[rows] = round_to_codes(x, scheme.format, zeros).add_(zeros).view(-1, k)
    return codes


def round_to_codes(x: Tensor, fmt: Format, zeros: Tensor | None) -> Tensor:
    """Round `x` (a weight divided by its scale) in place to the nearest value of a code, ties to
    the even code.
    """
    if zeros is not None:
        return x.add_(zeros).clamp_(0, 2**fmt.bits - 1).round_().sub_(zeros)
    if fmt.is_float:
        return x.copy_(fmt.nearest(x))
    return x.round_().clamp_(fmt.values[0], fmt.values[-1])


def largest_value(fmt: Format, zeros: Tensor | None) -> Tensor | float:
    """Return the largest magnitude of a code in steps of the scale, given float `zeros` of any
    shape.
    """
    return fmt.largest if zeros is None else torch.maximum(zeros, 2**fmt.bits - 1 - zeros)


def stored_scale(scale: Tensor, stored: torch.dtype) -> Tensor:
    """Round scales to float16 values, at least 2^-20 in magnitude, and 1 for groups of zeros; dtype
    and sign stay.

    `stored` is the dtype of the weight. For bfloat16 the scales are bfloat16 values as well: a
    loader that runs the model in bfloat16 then reads the same scale.
    """
    half = half_precision(scale, stored).abs_().clamp_(min=SMALLEST_SCALE)
    return half.copysign_(scale).masked_fill_(scale == 0, 1.0)


def half_precision(scale: Tensor, stored: torch.dtype) -> Tensor:
    """Round scales to float16 values, through bfloat16 if the weight is `stored` in it; the dtype
    stays.
    """
    through = scale.to(torch.bfloat16) if stored == torch.bfloat16 else scale
    return through.to(torch.float16).to(scale.dtype)


def divide(x: Tensor, divisor: float) -> Tensor:
    """Divide by a plain number; on a GPU torch would multiply by its reciprocal, which rounds
    differently.
    """
    return x / torch.full_like(x, divisor)


def refuse_overflow(overflow: Tensor, row: int, groups: int) -> None:
    """Raise NumericError if `overflow` bool `[m]` is set anywhere; entry `i` belongs to row `row +
    i // groups`.
    """
    if bool(overflow.any()):
        rows = sorted({row + i // groups for i in overflow.nonzero().flatten().tolist()})
        raise NumericError(
            f"row {', '.join(map(str, rows[:5]))}{' ...' if len(rows) > 5 else ''} has weights too "
            "large: its "
            f"scale or its dequantized weights pass {LARGEST_HALF:.0f}, the end of float16",
            Words("leave it dense with", Setting("skip")),
        )
