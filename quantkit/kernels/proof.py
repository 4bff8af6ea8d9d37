"""What a packed weight is on the GPU: its products, beside those of the record that it was unpacked to.

Two questions, both of the fastest kernel and of the naive one. Are products of random activations those of float32, for
few and many tokens? And does each unit vector give back its column of the weight exactly? The first is what a model
will meet. The second looks at every weight alone: one wrong code, scale or metadata bit has nowhere to hide in a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.tensors import dtype_name
from quantkit.kernels import JUDGES, MATMULS
from quantkit.kernels.contract import ACTIVATIONS
from quantkit.progress import Clock

#: mean|y - reference| / mean|reference| must stay below (ARCHITECTURE 11).
BOUND = 1e-3
#: |y - reference| / (|reference| + its root mean square) must stay below for each number, which a mean would hide.
FAR = 0.02
TOKENS = (1, 3, 16)
#: Products of unit vectors that are held at a time.
HELD = 1 << 26

Kernel = Callable[..., Tensor]


@dataclass(frozen=True)
class Proof:
    """The largest relative error of random products, and a line for everything that is not as it should be."""

    error: float
    problems: tuple[str, ...]


def prove(layout: str, tensors: Mapping[str, Tensor], q: QuantizedTensor, clock: Clock | None = None) -> Proof:
    """Multiply with the packed `tensors` of a layout in MATMULS and compare with the record `q`, both on one GPU.

    Outputs are filled with NaN first. The naive kernel's are float32; the other's are compared with the reference
    rounded once to their dtype. `clock` is told what took how long. KernelError if a kernel cannot be run.
    """
    clock = clock or Clock(q.codes.device)
    n, k = q.shape
    errors: list[float] = []
    problems: list[str] = []
    with clock.phase("reference"):
        weight = q.dequantize()
        inputs = [activations(weight, m, dtype) for dtype in ACTIVATIONS for m in TOKENS]
        wanted = [reference(x, weight) for x in inputs]
    for kind, table, exact in (("naive", JUDGES, True), ("fast", MATMULS, False)):
        multiply = partial(_poisoned, table[layout], tensors, q, exact)
        with clock.phase(f"{kind} kernel"):
            for x, exactly in zip(inputs, wanted, strict=True):
                y = multiply(x)
                rounded = exactly.to(y.dtype)
                errors.append(relative_error(y, rounded))
                wrong = amiss(y, rounded)
                if wrong is not None:
                    problems.append(f"the {kind} {layout} kernel with {len(x)} {dtype_name(x.dtype)} tokens {wrong}")
            others = sum(_unit_vectors(multiply, weight))
        if others:
            problems.append(f"the {kind} {layout} kernel multiplies {others} of {n * k} weights as other values")
    return Proof(max(errors), tuple(problems))


def amiss(y: Tensor, reference: Tensor) -> str | None:
    """Return how a product is wrong, None if it is not: too far from the reference on average, or in one number."""
    error = relative_error(y, reference)
    if not error < BOUND:
        return f"is off by {error:.2g}, more than {BOUND:g}"
    y, reference = y.float(), reference.float()
    typical = reference.square().mean().sqrt()
    most = float(((y - reference).abs() / (reference.abs() + typical).clamp(min=1e-30)).max())
    return None if most < FAR else f"has a number that is off by {most:.2g} of its size, more than {FAR:g}"


def relative_error(y: Tensor, reference: Tensor) -> float:
    """Return `mean|y - reference| / mean|reference|` in float32; infinite if anything of `y` is not finite.

    0 for a reference of zeros alone if `y` is the same.
    """
    y, reference = y.float(), reference.float()
    wrong, size = float((y - reference).abs().mean()), float(reference.abs().mean())
    if wrong == 0:
        return 0.0
    return wrong / size if size > 0 and torch.isfinite(y).all() else float("inf")


def reference(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product `[m, n]` of activations `[m, k]` and a float32 weight `[n, k]` in full float32."""
    with _float32():
        return x.float() @ weight.t()


def activations(weight: Tensor, m: int, dtype: torch.dtype) -> Tensor:
    """Return signed random activations `[m, k]`, the same in every run, whose products are around 1.

    `weight` is float32 `[n, k]`. A power of two keeps products of any finite scales far from float16's limits.
    """
    k = weight.shape[1]
    random = torch.Generator().manual_seed(m)
    x = torch.randn(m, k, generator=random)
    size = float(weight.square().mean().sqrt()) * k**0.5
    if size > 0:
        x *= 2.0 ** max(-14, min(12, -round(torch.log2(torch.tensor(size)).item())))
    return x.to(dtype).to(weight.device)


def _poisoned(kernel: Kernel, tensors: Mapping[str, Tensor], q: QuantizedTensor, exact: bool, x: Tensor) -> Tensor:
    """Return the product of `x` `[m, k]` in float32 if `exact`, else in the dtype of `x`, in a tensor that was NaN."""
    n, k = q.shape
    dtype = torch.float32 if exact else x.dtype
    out = torch.full((x.shape[0], n), float("nan"), dtype=dtype, device=x.device)
    return kernel(x, tensors, q.scheme, n, k, out=out)


def _unit_vectors(multiply: Callable[[Tensor], Tensor], weight: Tensor) -> Iterator[int]:
    """Yield, for some unit vectors at a time, how many weights `[n, k]` their products are not."""
    n, k = weight.shape
    rows = max(1, min(k, HELD // max(n, k)))
    for start in range(0, k, rows):
        column = torch.arange(start, min(start + rows, k), device=weight.device)
        x = torch.zeros(len(column), k, dtype=torch.float16, device=weight.device)
        x[torch.arange(len(column), device=weight.device), column] = 1
        y = multiply(x)
        yield int((y != weight[:, start : start + rows].t().to(y.dtype)).sum())


@contextmanager
def _float32() -> Iterator[None]:
    """Multiply in full float32 inside, whatever the program around has asked for."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
