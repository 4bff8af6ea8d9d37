"""The arithmetic that all solvers share: dtypes, rows at a time, inputs that are refused, and the
grid of the values of a group's codes.

A scale is rounded to float16 before it is used, so the search compares the scales that are stored
(ALGORITHMS 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.core.formats import FLOATS, Format
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import NumericError, Setting, Words

_FULL_RATE_FLOAT64 = {
    (6, 0),
    (7, 0),
    (8, 0),
    (9, 0),
    (10, 0),
}  # compute capabilities of data-centre GPUs

#: A matrix as a sum of one or two, the second one smaller.
Terms = tuple[Tensor, ...]
#: Bytes of a float -> the integers of its size.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def working_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype for arithmetic on a weight: float64 for float64, float32 for all others."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def factor_dtype(device: torch.device) -> torch.dtype:
    """Return float64 where factorisations in it are fast (CPUs, data-centre GPUs), else float32
    (ALGORITHMS 5.1).
    """
    slow = (
        device.type == "cuda" and torch.cuda.get_device_capability(device) not in _FULL_RATE_FLOAT64
    )
    return torch.float32 if slow else torch.float64


def product_dtype(weight: Tensor, otherwise: torch.dtype) -> torch.dtype:
    """Return the dtype of the terms of `product` for a weight: bfloat16 on data-centre GPUs, whose
    tensor cores are 15 times as fast as float32, and `otherwise` elsewhere.
    """
    is_fast = weight.is_cuda and torch.cuda.get_device_capability(weight.device) >= (8, 0)
    is_fast = is_fast and factor_dtype(weight.device) == torch.float64
    return torch.bfloat16 if is_fast and weight.dtype != torch.float64 else otherwise


def terms(x: Tensor, dtype: torch.dtype) -> Terms:
    """Write a matrix as a sum: as itself in `dtype`, or as two of bfloat16, which keep 16 bits of a
    number.
    """
    high = x.to(dtype)
    if dtype != torch.bfloat16 or x.dtype == dtype:
        return (high,)
    return high, (x - high).to(dtype)


def part_of(matrix: Terms, *at: slice) -> Terms:
    """Take some rows, or rows and columns, of a matrix, as views."""
    return tuple(term[at] for term in matrix)


def renew(matrix: Terms, rows: slice, x: Tensor) -> None:
    """Put changed rows `x` into a matrix."""
    for term, new in zip(matrix, terms(x, matrix[0].dtype), strict=True):
        term[rows] = new


def product(a: Terms, b: Terms, to: Tensor | None = None, alpha: int = 1) -> Tensor:
    """Return `a @ b`, or add it `alpha` times to `to`. Of half-precision terms it is float32. Two
    terms of bfloat16 err by 1e-5: the product of the two lower ones is left out.
    """
    if to is not None and not a[0].shape[1]:
        return to
    for i, x in enumerate(a):
        for y in b[: 2 - i]:
            if x.itemsize > 2:
                to = x @ y if to is None else to.addmm_(x, y, alpha=alpha)
            elif to is None:
                to = torch.mm(x, y, out_dtype=torch.float32)
            else:
                torch.addmm(to, x, y, alpha=alpha, out_dtype=torch.float32, out=to)
    assert to is not None
    return to


def row_slices(weight: Tensor, width: int, least: int = 1, most: int = 2**20) -> Iterator[slice]:
    """Yield slices of at least `least` rows, with temporaries of `width` columns.

    On a CPU those have `most` numbers, and fit in a cache. Of a large weight they take so long that
    threads seldom wait for Python's lock between two operations.
    """
    entries = min(max(2**18, weight.numel() // 8), most) if weight.device.type == "cpu" else 2**26
    rows = max(least, entries // width)
    for a in range(0, len(weight), rows):
        yield slice(a, min(a + rows, len(weight)))


def check_weight(weight: Tensor) -> None:
    """Raise NumericError unless `weight` is a non-empty float matrix `[n, k]` of finite numbers."""
    if weight.ndim != 2 or not weight.numel() or weight.dtype not in FLOATS:
        raise NumericError(
            "a weight is a non-empty float16, bfloat16, float32 or float64 matrix, not "
            f"{weight.dtype} {list(weight.shape)}",
            "convert it",
            Words("leave it dense with", Setting("skip")),
        )
    check_finite(weight)


def is_finite(tensor: Tensor) -> bool:
    """Return True if a tensor of float16, bfloat16, float32 or float64 has neither NaN nor
    infinity.

    Both extremes are NaN if any number is, and are found several times as fast as by
    `torch.isfinite` of all.
    """
    return not tensor.numel() or bool(torch.isfinite(torch.stack(tensor.aminmax())).all())


def extent(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest nonzero and the largest magnitude along the last dimension of a finite
    tensor; -0 and 0 if all are zero. Integers of the magnitudes' bits have their order.
    """
    bits, most = tensor.view(_BITS[tensor.itemsize]), torch.iinfo(_BITS[tensor.itemsize]).max
    sizes = bits & most
    least = (sizes - 1).bitwise_and_(most).amin(-1).add_(1)  # zeros become the largest number
    return least.view(tensor.dtype), sizes.amax(-1).view(tensor.dtype)


def check_finite(tensor: Tensor) -> None:
    """Raise NumericError, with count and first index, if a float tensor of any shape holds NaN or
    infinity.
    """
    if not tensor.is_floating_point():
        return
    flat = tensor.reshape(-1)
    count, first = 0, 0
    for part in row_slices(flat, 1):
        found = flat[part] if tensor.itemsize > 1 else flat[part].float()
        if not is_finite(found):
            finite = torch.isfinite(found)
            first = first if count else part.start + int((~finite).nonzero()[0])
            count += int((~finite).sum())
    if count:
        index = [int(i) for i in torch.unravel_index(torch.tensor(first), tensor.shape)]
        raise NumericError(
            f"{count} of {tensor.numel()} weights are NaN or infinite, the first {index} = "
            f"{flat[first].item()}",
            "repair or download it again",
        )


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


def stored_scale(scale: Tensor, stored: torch.dtype, fmt: Format) -> Tensor:
    """Round scales to values that the format stores, at least its smallest in magnitude, and 1 for
    groups of zeros; dtype and sign stay.

    `stored` is the dtype of the weight. For bfloat16 the scales are bfloat16 values as well: a
    loader that runs the model in bfloat16 then reads the same scale.
    """
    rounded = fmt.nearest_scale(scale) if fmt.is_microscaled else half_precision(scale, stored)
    size = rounded.abs_().clamp_(min=fmt.smallest_scale)
    return size.copysign_(scale).masked_fill_(scale == 0, 1.0)


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


def refuse_overflow(overflow: Tensor, row: int, groups: int, fmt: Format) -> None:
    """Raise NumericError, naming the first row, if `overflow` bool `[m]` is set anywhere; entry `i`
    belongs to row `row + i // groups`.
    """
    if bool(overflow.any()):
        end = fmt.name if fmt.is_microscaled else "float16"
        raise NumericError(
            f"row {row + int(overflow.nonzero()[0]) // groups} has weights too large: its scale or "
            f"its dequantized weights pass {fmt.largest_weight:.0f}, the end of {end}",
            Words("leave it dense with", Setting("skip")),
        )
