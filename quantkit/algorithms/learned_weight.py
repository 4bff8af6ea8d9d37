"""A quantized weight with scales, and optionally codes, that are learned by gradients.

A model always computes with the values of a record: scales are rounded to float16 and positions to
codes first. The gradient passes both roundings unchanged (straight-through estimator, Bengio et al.
2013).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantkit.algorithms.grid import LARGEST_HALF, half_precision, largest_value
from quantkit.core.formats import Format
from quantkit.core.quantized_tensor import QuantizedTensor

#: The farthest that a position starts from its code. Many codes of GPTQ are not the nearest to
#: their weights, because they make up for others: nearer to the half, the noise of a few steps
#: would undo that.
INSIDE = 0.3
#: Bytes for each weight whose code is learned: position, gradient, both moments of Adam, and the
#: best position.
LEARNED = 20


class LearnedWeight:
    """A quantized weight `[n, k]` with float32 parameters in place of its scales and, optionally,
    its codes.

    `factors` `[n, g]` are logarithms: a scale is its start value times `exp(factor)`, and keeps its
    sign. `positions` `[n, k]` count the format's values in order, and the nearest whole number is
    the code; None leaves all codes fixed. Zero codes of a 2:4 weight stay zero. Until a parameter
    changes, the values equal the record's. `stored` is the dtype of the source's weights, as for
    `grid.stored_scale`. `source` `[n, k]` is the unquantized weight, if codes are learned:
    positions start as near to it as the codes allow.
    """

    def __init__(
        self, tensor: QuantizedTensor, stored: torch.dtype, source: Tensor | None = None
    ) -> None:
        fmt = tensor.scheme.format
        self._start, self._stored = tensor, stored
        self._zeros = None if tensor.zeros is None else fmt.decode(tensor.zeros).unsqueeze(-1)
        zeros = None if tensor.zeros is None else tensor.zeros.float()
        self._limit = LARGEST_HALF / torch.as_tensor(
            largest_value(fmt, zeros), device=tensor.scales.device
        )
        self.factors = torch.zeros_like(tensor.scales, dtype=torch.float32).requires_grad_()
        self.positions: Tensor | None = None
        if source is not None:
            self._order = _codes_by_value(fmt, source.device)
            self.positions = self._positions_near(source).requires_grad_()
        self._fixed = None if tensor.scheme.sparsity is None else tensor.codes == fmt.zero_code

    @property
    def is_sparse(self) -> bool:
        """Whether the weight is 2:4."""
        return self._fixed is not None

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Compute the weight `[n, k]` in `dtype`, with a gradient for the parameters."""
        scales = self._start.scales.float() * self.factors.exp()
        found: Tensor = _Dequantize.apply(  # type: ignore[no-untyped-call]
            _round(scales, self._half), self.positions, self, dtype
        )
        return found

    @torch.no_grad()
    def record(self) -> QuantizedTensor:
        """Return the record of the values that `dense` has now."""
        scales = self._half(self._start.scales.float() * self.factors.exp()).half()
        return QuantizedTensor(self._start.scheme, self._codes(), scales, self._start.zeros)

    def _half(self, scales: Tensor) -> Tensor:
        """Round scales to storable values that do not overflow float16 when multiplied by codes."""
        return half_precision(scales.clamp(-self._limit, self._limit), self._stored)

    def _codes(self) -> Tensor:
        if self.positions is None:
            return self._start.codes
        at = self.positions.detach().round().clamp_(0, len(self._order) - 1)
        codes = self._order[at.int()]
        return codes if self._fixed is None else torch.where(self._fixed, self._start.codes, codes)

    def _values(self) -> Tensor:
        """Return the values of the codes in steps of their scales, float32 `[n, g, k / g]`."""
        n, g = self._start.scales.shape
        values = self._start.scheme.format.decode(self._codes()).view(n, g, -1)
        return values if self._zeros is None else values.sub_(self._zeros)

    def _positions_near(self, source: Tensor) -> Tensor:
        """Return the source's weights as positions among the format's values, at most INSIDE from
        their codes.
        """
        fmt, (n, g) = self._start.scheme.format, self._start.scales.shape
        values = fmt.decode(self._order)
        scales = self._start.scales.float().unsqueeze(-1)
        exact = source.float().view(n, g, -1) / torch.where(scales == 0, 1.0, scales)
        if self._zeros is not None:
            exact += self._zeros
        above = torch.searchsorted(values, exact.view(source.shape)).clamp_(1, len(values) - 1)
        below = values[above - 1]
        places = above - 1 + (exact.view(source.shape) - below) / (values[above] - below)
        start = torch.searchsorted(values, fmt.decode(self._start.codes)).float()
        return torch.minimum(torch.maximum(places, start - INSIDE), start + INSIDE)


class LearnedVector:
    """A vector of any dtype, such as the weight of a norm, with a float32 parameter.

    `moves` counts in units of the vector's root mean square, 1 for zeros. The values are rounded to
    the vector's dtype.
    """

    def __init__(self, start: Tensor) -> None:
        self._start = start
        self._unit = float(start.float().square().mean().sqrt()) or 1.0
        self.moves = torch.zeros_like(start, dtype=torch.float32).requires_grad_()

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Compute the vector in `dtype`, with a gradient for the parameter."""
        return _round(
            self._start.float() + self._unit * self.moves, lambda x: x.to(self._start.dtype)
        ).to(dtype)

    def record(self) -> Tensor:
        """Return the vector that `dense` has now, in its own dtype."""
        return self.dense(self._start.dtype).detach()


def _round(x: Tensor, to: Callable[[Tensor], Tensor]) -> Tensor:
    """Round a float32 tensor by the function `to`, whose gradient counts as 1."""
    return x + (to(x).float() - x).detach()


class _Dequantize(torch.autograd.Function):
    """Multiply the values of codes by their scales; the backward pass decodes again, to store no
    floats.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scales: Tensor,
        positions: Tensor | None,
        weight: LearnedWeight,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(scales)
        ctx.weight = weight
        found: Tensor = (
            weight._values().mul_(scales.unsqueeze(-1)).view(weight._start.shape).to(dtype)
        )
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (scales,), weight = ctx.saved_tensors, ctx.weight
        grouped = grad.float().view(*scales.shape, -1)
        of_scales = (grouped * weight._values()).sum(-1)
        if weight.positions is None:
            return of_scales, None, None, None
        of_positions = (grouped * scales.unsqueeze(-1)).view(grad.shape)
        return of_scales, of_positions, None, None


def _codes_by_value(fmt: Format, device: torch.device) -> Tensor:
    """Return the codes of a format's values, uint8, from the lowest value to the highest; minus
    zero has none.
    """
    codes = {value: code for code, value in reversed(list(enumerate(fmt.values)))}
    return torch.tensor([codes[value] for value in sorted(codes)], dtype=torch.uint8, device=device)
