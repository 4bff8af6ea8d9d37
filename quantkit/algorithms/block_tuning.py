"""Tune the codes and scales of quantized weights by the gradient of a shared loss (ALGORITHMS 8.1).

Each code has a latent value, and each scale a factor; the gradient passes the rounding unchanged
(straight through). A code stays one of the two next to its weight: farther ones fit the calibration
text, and lose on others.
"""

from __future__ import annotations

import struct
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.algorithms.numerics import (
    largest_value,
    round_to_codes,
    stored_scale,
)
from quantkit.core.formats import Format
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.kernels import gptq as kernels

#: How far a latent value may move, in steps of the grid: from the source, and in a 2:4 scheme from
#: the code that it starts at.
BOUND, SPARSE_BOUND = 0.5, 8.0
#: How much faster a latent value moves in a 2:4 scheme.
SPARSE_PACE = 6.0
#: Least and largest factor of a scale.
FACTORS = (0.5, 1.5)
#: Bytes for each weight: latent value, its center, mean square, step, dequantized weight, its
#: gradient, the same in bfloat16, the best codes so far, and the source.
TUNING_BYTES = 32
#: In a 2:4 scheme a latent value starts inside its code's interval, 0.5 steps to each side.
_INSIDE = 0.49
_DECAY = 0.95
_TINY = 1e-12


def is_moved_in_place(weight: Tensor, start: QuantizedTensor) -> bool:
    """Tell whether a kernel takes the steps of a TunedWeight; they change the bfloat16 tensor that
    `dense` returned.
    """
    return kernels.runs_on(weight.device) and tuple(weight.shape) == start.shape


class TunedWeight:
    """Learn the codes and scales of one weight `[n, k]`, from the scales of `solved`, which may be
    padded.

    The codes start at the nearest to the weight; in a 2:4 scheme at those of `solved`, whose zeros
    stay. Zero points stay. All arithmetic is float32.
    """

    def __init__(self, weight: Tensor, solved: QuantizedTensor) -> None:
        self.start, self._stored, self._size = solved, weight.dtype, tuple(weight.shape)
        fmt, is_sparse = solved.scheme.format, solved.scheme.sparsity is not None
        self._zeros = None if solved.zeros is None else solved.zeros.float().unsqueeze(-1)
        self._scales = solved.scales.float().contiguous()
        self._centers = self._grouped(weight.float()).div_(
            self._scales.masked_fill(self._scales == 0, 1.0).unsqueeze(-1)
        )
        self._latent = _Moved(self._centers.clone())
        self._factors = _Moved(torch.ones_like(self._scales))
        self._bound, self._pace = BOUND, 1.0
        if not is_sparse:
            self.start = self.tensor()
        steps = _steps(fmt, weight.device)
        even = bool((steps == steps[0]).all())  # then no memory is needed for them
        codes = self.start.codes.contiguous()
        self._step = steps[0] if even else steps[codes.int()].view_as(self._centers)
        if is_sparse:
            self._bound, self._pace, self._centers = SPARSE_BOUND, SPARSE_PACE, solved.values()
            inside = _INSIDE * self._step
            self._latent.value.clamp_(self._centers - inside, self._centers + inside)
        self._dense: Tensor | None = None
        if is_moved_in_place(weight, solved):
            self._dense = self.dense().to(torch.bfloat16)
            zeros = None if self._zeros is None else self._zeros.flatten()
            self._given = (self._scales, zeros, self._centers, codes, steps)

    def dense(self) -> Tensor:
        """Return the dequantized weight `[n, k]`, without padding; in bfloat16 where a kernel takes
        the steps.

        The next step may overwrite it.
        """
        if self._dense is not None:
            return self._dense
        n, k = self._size
        values = self._values() * self._tuned_scales().unsqueeze(-1)
        return values.flatten(1)[:n, :k].contiguous()

    def descend(self, gradient: Tensor, rate: float) -> None:
        """Take one step against the gradient `[n, k]` of the loss by `dense()`; `rate` is in steps
        of the grid.

        A factor moves by `rate` too, relative to its start of 1; the latent values of a 2:4 scheme
        are faster by `SPARSE_PACE`.
        """
        if self._dense is not None:
            self._descend_by_kernel(self._dense, gradient, rate)
            return
        slope = self._grouped(gradient).mul_(self._scales.unsqueeze(-1))
        self._factors.descend((slope * self._values()).sum(-1), rate)
        self._factors.value.clamp_(*FACTORS)
        self._latent.descend(slope.mul_(self._step), rate * self._pace * self._step)
        bound = self._bound * self._step
        low, high = _range(self.start.scheme.format, self._zeros)
        self._latent.value.clamp_(
            (self._centers - bound).clamp_(min=low), (self._centers + bound).clamp_(max=high)
        )

    def _descend_by_kernel(self, dense: Tensor, gradient: Tensor, rate: float) -> None:
        scheme, latent, factors = self.start.scheme, self._latent, self._factors
        frozen = -1 if scheme.sparsity is None else scheme.format.zero_code
        numbers = (
            rate * self._pace,
            rate,
            latent.count(),
            _DECAY,
            _TINY,
            self._bound,
            *FACTORS,
            scheme.format.smallest_scale,
            scheme.format.largest_weight,
        )
        step = struct.pack("<10f2i", *numbers, frozen, scale_digits(scheme.format, self._stored))
        moved = (latent.value, latent.square, factors.value, factors.square)
        kernels.tune(dense, gradient.to(dense.dtype), moved, self._given, scheme.format, step)

    def tensor(self) -> QuantizedTensor:
        """Return the weight with its present codes and scales."""
        start, values = self.start, self._values()
        codes = (
            start.scheme.format.encode(values)
            if self._zeros is None
            else (values + self._zeros).to(torch.uint8)
        )
        # An unchanged value keeps its code, and with it the sign of a zero.
        codes = torch.where(values == start.values(), start.codes.view_as(codes), codes)
        return QuantizedTensor(
            start.scheme, codes.flatten(1), self._tuned_scales().to(torch.float16), start.zeros
        )

    def _grouped(self, matrix: Tensor) -> Tensor:
        """Return a matrix `[n, k]` in groups `[n', groups, g]`, padded with zeros; a copy."""
        rows, columns = self.start.shape
        padding = (0, columns - matrix.shape[1], 0, rows - matrix.shape[0])
        return pad(matrix, padding).view(*self._scales.shape, -1).clone()

    def _values(self) -> Tensor:
        """Return the value of each code in steps of its scale, `[n, groups, g]`."""
        scheme = self.start.scheme
        values = round_to_codes(self._latent.value.clone(), scheme.format, self._zeros)
        if scheme.sparsity is not None:
            values.masked_fill_((self.start.codes == scheme.format.zero_code).view_as(values), 0)
        return values

    def _tuned_scales(self) -> Tensor:
        zeros = None if self._zeros is None else self._zeros.squeeze(-1)
        fmt, factors = self.start.scheme.format, self._factors.value
        return usable_scales(self._scales, factors, fmt, zeros, self._stored)


class _Moved:
    """A tensor that moves against gradients, each divided by the root of its mean
    square (RMSprop).
    """

    def __init__(self, value: Tensor) -> None:
        self.value, self.square = value, torch.zeros_like(value)
        self._weight = 0.0  # of all gradients so far in the mean square

    def count(self) -> float:
        """Count one more gradient, and return the weight of all of them in the mean square."""
        self._weight += (1 - _DECAY) * (1 - self._weight)
        return self._weight

    def descend(self, gradient: Tensor, rate: float | Tensor) -> None:
        """Take one step of about `rate` against the gradient."""
        self.square.mul_(_DECAY).addcmul_(gradient, gradient, value=1 - _DECAY)
        size = (self.square / self.count()).sqrt_().add_(_TINY)
        self.value.sub_(torch.div(gradient, size, out=size).mul_(rate))


def scale_digits(fmt: Format, stored: torch.dtype) -> int:
    """Count the bits of the mantissa of a scale that `stored_scale` makes."""
    steps = fmt.scale_steps if fmt.is_microscaled else round(1 / torch.finfo(stored).eps)
    return min(10, steps.bit_length() - 1)


def usable_scales(
    scales: Tensor, factors: Tensor, fmt: Format, zeros: Tensor | None, stored: torch.dtype
) -> Tensor:
    """Multiply scales by factors, and round them as a weight of dtype `stored` stores them. Scales
    that would overflow, and scales of zero, stay.
    """
    found = stored_scale(scales * factors, stored, fmt)
    usable = (found.abs() * largest_value(fmt, zeros) <= fmt.largest_weight) & (scales != 0)
    return torch.where(usable, found, scales)


def _steps(fmt: Format, device: torch.device) -> Tensor:
    """Return the distance of each code's value from its nearest neighbour, float32."""
    values = sorted(set(fmt.values))
    gaps = [b - a for a, b in pairwise(values)]
    nearest = [min(pair) for pair in zip([gaps[0], *gaps], [*gaps, gaps[-1]], strict=True)]
    return torch.tensor(
        [nearest[values.index(value)] for value in fmt.values], dtype=torch.float32, device=device
    )


def _range(fmt: Format, zeros: Tensor | None) -> tuple[Tensor | float, Tensor | float]:
    """Return the least and the largest value of a code in steps of the scale."""
    if zeros is not None:
        return -zeros, 2**fmt.bits - 1 - zeros
    return min(fmt.values), max(fmt.values)
