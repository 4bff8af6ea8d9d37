"""Products on a GPU: operands, and the comparison with float32."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.kernels import LAUNCHERS, proof
from tests.kernels.operands import packed, weight

TYPES = (torch.float16, torch.bfloat16)


def on_gpu(layout: str, q: QuantizedTensor) -> tuple[dict[str, Tensor], QuantizedTensor]:
    """Move the packed tensors and the record of a weight to the GPU."""
    zeros = None if q.zeros is None else q.zeros.cuda()
    there = QuantizedTensor(q.scheme, q.codes.cuda(), q.scales.cuda(), zeros)
    return {name: tensor.cuda() for name, tensor in packed(layout, q).items()}, there


@functools.lru_cache(maxsize=16)
def operand(layout: str, label: str, n: int, k: int) -> tuple[dict[str, Tensor], QuantizedTensor]:
    """Make a weight on the GPU: its packed tensors and its record. Tests must not change them."""
    return on_gpu(layout, weight(label, n, k))


def poisoned(m: int, n: int, dtype: torch.dtype) -> Tensor:
    """Make an output that is filled with NaN."""
    return torch.full((m, n), float("nan"), dtype=dtype, device="cuda")


def product(
    layout: str, tensors: dict[str, Tensor], q: QuantizedTensor, x: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """Multiply into a poisoned output; `options` are `portable` and `tile`."""
    out = poisoned(x.shape[0], q.shape[0], x.dtype)
    return LAUNCHERS[layout].matmul(x, tensors, q.scheme, *q.shape, bias, out, **options)


def agrees(
    layout: str, label: str, n: int, k: int, m: int, dtype: torch.dtype, *, bias: bool, times: int = 3, **options: Any
) -> None:
    """Compare with float32; no output may be missing, and no bit may vary from time to time."""
    tensors, q = operand(layout, label, n, k)
    w = q.dequantize()
    x = proof.activations(w, m, dtype)
    shift = torch.linspace(-3, 3, n).to(dtype).cuda() if bias else None
    reference = proof.reference(x, w) + (0 if shift is None else shift.float())
    found = [product(layout, tensors, q, x, shift, **options) for _ in range(times)]
    assert proof.mismatch(found[0], reference.to(dtype)) is None, (label, n, k, m, dtype, options)
    assert all(torch.equal(found[0], y) for y in found), (label, n, k, m, dtype, options)


def every_count(
    layout: str, label: str, n: int, k: int, counts: Iterable[int], *, bias: bool = False, **options: Any
) -> None:
    """Compare with float32 for some numbers of tokens, in both dtypes."""
    for m, dtype in itertools.product(counts, TYPES):
        agrees(layout, label, n, k, m, dtype, bias=bias, times=1, **options)
