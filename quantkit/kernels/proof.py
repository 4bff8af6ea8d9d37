"""Prove a packed weight on the GPU: compare its products with the products of the unpacked record.

Two tests, for the fastest and for the naive kernel. Products of random activations must agree with
float32, as in a model. Each unit vector must return its column of the weight exactly, which shows
every wrong code, scale and metadata bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quantkit.core.formats import dtype_name
from quantkit.core.quantized_tensor import QuantizedTensor, Tensors
from quantkit.kernels import JUDGES, MATMULS
from quantkit.kernels.contract import ACTIVATIONS
from quantkit.progress import Clock

#: Upper bound of mean|y - reference| / mean|reference|.
BOUND = 1e-3
#: Upper bound of |y - reference| / (|reference| + its root mean square) for each number: a mean
#: would hide one.
BOUND_OF_ONE = 0.02
TOKENS = (1, 3, 16)
#: Most products of unit vectors in memory at a time.
MAX_PRODUCTS = 1 << 26

Kernel = Callable[..., Tensor]


@dataclass(frozen=True)
class Proof:
    """The largest relative error of random products, and one line for each problem."""

    error: float
    problems: tuple[str, ...]


def prove(layout: str, tensors: Tensors, q: QuantizedTensor, clock: Clock | None = None) -> Proof:
    """Multiply with the packed `tensors` of a layout in MATMULS and compare with the record `q`,
    both on one GPU.

    Outputs are filled with NaN first. The naive kernel writes float32; the fast one is compared
    with the reference rounded to its dtype. `clock` records the seconds of each phase. KernelError
    if a kernel cannot be run.
    """
    clock = clock or Clock(q.codes.device)
    n, k = q.shape
    errors: list[float] = []
    problems: list[str] = []
    with clock.phase("reference"):
        weight = q.dequantize()
        inputs = [activations(weight, m, dtype) for dtype in ACTIVATIONS for m in TOKENS]
        expected = [reference(x, weight) for x in inputs]
    for kind, table, exact in (("naive", JUDGES, True), ("fast", MATMULS, False)):
        multiply = partial(_multiply, table[layout], tensors, q, exact)
        with clock.phase(f"{kind} kernel"):
            for x, product in zip(inputs, expected, strict=True):
                y = multiply(x)
                rounded = product.to(y.dtype)
                errors.append(relative_error(y, rounded))
                wrong = mismatch(y, rounded)
                if wrong is not None:
                    problems.append(
                        f"the {kind} {layout} kernel with {len(x)} {dtype_name(x.dtype)} tokens "
                        f"{wrong}"
                    )
            wrong_weights = sum(_unit_vectors(multiply, weight))
        if wrong_weights:
            problems.append(
                f"the {kind} {layout} kernel multiplies {wrong_weights} of {n * k} weights as "
                "other values"
            )
    return Proof(max(errors), tuple(problems))


def mismatch(y: Tensor, reference: Tensor) -> str | None:
    """Describe how a product differs from the reference, on average or in one number; None within
    the bounds.
    """
    error = relative_error(y, reference)
    if not error < BOUND:
        return f"is off by {error:.2g}, more than {BOUND:g}"
    y, reference = y.float(), reference.float()
    typical = reference.square().mean().sqrt()
    most = float(((y - reference).abs() / (reference.abs() + typical).clamp(min=1e-30)).max())
    return (
        None
        if most < BOUND_OF_ONE
        else f"has a number that is off by {most:.2g} of its size, more than {BOUND_OF_ONE:g}"
    )


def relative_error(y: Tensor, reference: Tensor) -> float:
    """Compute `mean|y - reference| / mean|reference|` in float32; infinite if `y` is not, 0 if they
    are equal.
    """
    y, reference = y.float(), reference.float()
    wrong, size = float((y - reference).abs().mean()), float(reference.abs().mean())
    if wrong == 0:
        return 0.0
    return wrong / size if size > 0 and torch.isfinite(y).all() else float("inf")


def reference(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply activations `[m, k]` with a float32 weight `[n, k]` in float32; returns `[m, n]`."""
    return x.float() @ weight.t()


def activations(weight: Tensor, m: int, dtype: torch.dtype) -> Tensor:
    """Make signed random activations `[m, k]`, the same in every run, whose products are around 1.

    `weight` is float32 `[n, k]`. Multiplying by a power of two keeps products far from float16's
    limits for all scales.
    """
    k = weight.shape[1]
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
    size = float(weight.square().mean().sqrt()) * k**0.5
    if size > 0:
        x *= 2.0 ** max(-14, min(12, -round(torch.log2(torch.tensor(size)).item())))
    return x.to(dtype).to(weight.device)


def _multiply(
    kernel: Kernel, tensors: Tensors, q: QuantizedTensor, exact: bool, x: Tensor
) -> Tensor:
    """Multiply `x` `[m, k]` into a tensor of NaN: float32 if `exact`, else of the dtype of `x`."""
    n, k = q.shape
    out = torch.full(
        (x.shape[0], n),
        float("nan"),
        dtype=torch.float32 if exact else x.dtype,
        device=x.device,
    )
    return kernel(x, tensors, q.scheme, n, k, out=out)


def _unit_vectors(multiply: Callable[[Tensor], Tensor], weight: Tensor) -> Iterator[int]:
    """Yield the number of wrong weights of `[n, k]`, for some unit vectors at a time."""
    n, k = weight.shape
    rows = max(1, min(k, MAX_PRODUCTS // max(n, k)))
    for start in range(0, k, rows):
        column = torch.arange(start, min(start + rows, k), device=weight.device)
        x = torch.zeros(len(column), k, dtype=torch.float16, device=weight.device)
        x[torch.arange(len(column), device=weight.device), column] = 1
        y = multiply(x)
        yield int((y != weight[:, start : start + rows].t().to(y.dtype)).sum())
