"""Calls of kernels with bad operands, and the errors that they must raise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quantkit.core.scheme import Scheme
from quantkit.kernels import JUDGES, MATMULS
from tests.kernels.operands import ONE_EACH

KERNELS = pytest.mark.parametrize("table", [MATMULS, JUDGES], ids=["fast", "naive"])
LAYOUTS = pytest.mark.parametrize(("layout", "label", "n", "k"), ONE_EACH)

Kernel = Callable[..., Tensor]
#: Returns a call of a kernel with some operands changed.
Change = Callable[..., Callable[[], Tensor]]


def off_by_one(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Copy `like` into a contiguous tensor of another shape, misaligned by one element."""
    whole = torch.zeros(like.numel() + 1, dtype=like.dtype, device=like.device)
    count = torch.Size(shape).numel()
    whole[1 : 1 + count].copy_(like.reshape(-1)[:count])
    return whole[1 : 1 + count].view(shape)


def scattered(tensor: Tensor) -> Tensor:
    """Make a strided tensor of the same values, with a gap behind each."""
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype, device=tensor.device)
    wide[..., 0] = tensor
    return wide[..., 0]


def calls(kernel: Kernel, x: Tensor, tensors: dict[str, Tensor], scheme: Scheme, n: int, k: int) -> Change:
    """Make a function that builds calls of a kernel with some of these operands replaced."""

    def call(
        x: Tensor = x,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        scheme: Scheme = scheme,
        n: int = n,
        k: int = k,
        **changed: Tensor,
    ) -> Callable[[], Tensor]:
        return lambda: kernel(x, {**tensors, **changed}, scheme, n, k, bias, out)

    return call


def unfit(
    call: Change, layout: str, x: Tensor, tensors: dict[str, Tensor], n: int, k: int
) -> list[tuple[str, Callable[[], Tensor]]]:
    """List error patterns and calls for all kinds of bad operands, for activations [4, k]."""
    codes, scales = next(iter(tensors)), list(tensors)[-1]
    zeros = torch.zeros(2 * n, dtype=x.dtype, device=x.device)
    out = zeros.new_empty(4, n)
    return [
        ("m >= 1", call(x[:0])),
        (rf"\[m, {k}\]", call(x[:, :-16].contiguous())),
        (rf"\[m, {k}\]", call(x[0])),
        (rf"\[m, {k}\]", call(x[None])),
        *(
            ("activations must be float16 or bfloat16", call(x.to(t)))
            for t in (torch.float32, torch.float64, torch.int16)
        ),
        ("activations must be contiguous", call(torch.empty_like(x.t().contiguous()).t())),
        ("activations must be contiguous", call(scattered(x))),
        ("activations must be contiguous", call(x[:1].expand(4, k))),
        ("activations must begin at a multiple of 16", call(off_by_one((4, k), x))),
        ("must be int32", call(**{codes: tensors[codes].to(torch.int64)})),
        ("must be float16, not bfloat16", call(**{scales: tensors[scales].bfloat16()})),
        ("must have shape", call(**{codes: tensors[codes][:-1]})),
        ("must have shape", call(**{scales: tensors[scales].reshape(-1)[:-1]})),
        *(
            (f"{name} must be contiguous", call(**{name: scattered(tensor)}))
            for name, tensor in tensors.items()
            if layout != "marlin24-ct"  # whose tensors go by their other names
        ),
        ("must begin at a multiple of 16", call(**{codes: off_by_one(tensors[codes].shape, tensors[codes])})),
        ("must begin at a multiple of 16", call(**{scales: off_by_one(tensors[scales].shape, tensors[scales])})),
        ("bias must be float16", call(bias=zeros[:n].float())),
        ("bias must have shape", call(bias=zeros[: n - 1])),
        ("bias must be contiguous", call(bias=zeros[::2])),
        ("out must have shape", call(out=out[:3])),
        ("out must be float16 or float32", call(out=out.bfloat16())),
        ("out must be contiguous", call(out=zeros.new_empty(n, 4).t())),
        ("out must begin at a multiple of 16", call(out=off_by_one((4, n), out))),
        ("n to be a multiple", call(n=n - 8)),
        ("n to be a multiple", call(n=0)),
        ("multiple of|does not divide", call(k=k + 8)),
        ("kernel takes", call(scheme=Scheme.parse("int4:g16"))),
    ]
