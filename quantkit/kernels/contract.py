"""What every launcher asks of its operands, before anything is launched: one line for the first that is not so.

A kernel that read the wrong bytes would give a wrong number, and one that read past them would poison the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.core.quantized_tensor import dtype_name
from quantkit.errors import KernelError

#: dtype of activations and outputs -> its name in the sources.
TYPES = {torch.float16: "half", torch.bfloat16: "bfloat", torch.float32: "float"}
ACTIVATIONS = (torch.float16, torch.bfloat16)
#: Bytes that vector loads are aligned to.
ALIGNMENT = 16


@dataclass(frozen=True)
class Weight:
    """A packed weight as a kernel takes it: `tensors` are suffix -> (dtype, shape), `n` and `k` multiples of these."""

    layout: str
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    n: int
    k: int
    of_n: int
    of_k: int


def check(weight: Weight, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None, out: Tensor | None) -> Tensor:
    """Return where the product goes: `out`, or a new tensor `[m, n]` of the dtype of `x`.

    KernelError unless `x` is float16 or bfloat16 `[m, k]`, m at least 1, `tensors` are those of `weight`, `bias` is
    `[n]` of the dtype of `x`, `out` is `[m, n]` of that or float32, and all are contiguous on one CUDA device, at
    addresses that are multiples of 16 bytes (but for the bias).
    """
    name, n, k = weight.layout, weight.n, weight.k
    for letter, size, unit in (("n", n, weight.of_n), ("k", k, weight.of_k)):
        if size < 1 or size % unit:
            raise KernelError(f"the {name} kernel needs {letter} to be a multiple of {unit}, and it is {size}")
    if x.ndim != 2 or x.shape[1] != k or not 1 <= x.shape[0] < 2**31:
        raise KernelError(f"the {name} kernel takes activations [m, {k}] with m >= 1, not {list(x.shape)}")
    _operand(name, "activations", x, ACTIVATIONS, (x.shape[0], k), x.device)
    for suffix, (dtype, shape) in weight.tensors.items():
        if suffix not in tensors:
            raise KernelError(f"the {name} kernel needs the tensor {suffix!r}, which is missing")
        _operand(name, suffix, tensors[suffix], (dtype,), shape, x.device)
    if bias is not None:
        _operand(name, "bias", bias, (x.dtype,), (n,), x.device, alignment=1)
    if out is not None:
        _operand(name, "out", out, (x.dtype, torch.float32), (x.shape[0], n), x.device)
    if x.device.type != "cuda":  # where all others are
        raise _not_on_a_gpu(name, "activations", x.device)
    return torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device) if out is None else out


def same_dtype(layout: str, x: Tensor, out: Tensor) -> None:
    """Raise KernelError if a product is asked in another dtype than its activations: only naive kernels have both."""
    if out.dtype != x.dtype:
        wanted, asked = dtype_name(x.dtype), dtype_name(out.dtype)
        raise KernelError(f"the fast {layout} kernels write {wanted} as their activations are, not {asked}")


def _operand(
    layout: str,
    what: str,
    tensor: Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...],
    device: torch.device,
    alignment: int = ALIGNMENT,
) -> None:
    where = f"the {layout} kernel's {what}"
    if tensor.device != device:
        if device.type != "cuda":
            raise _not_on_a_gpu(layout, "activations", device)
        if tensor.device.type != "cuda":
            raise _not_on_a_gpu(layout, what, tensor.device)
        raise KernelError(f"{where} must be on {device} as the activations are, not on {tensor.device}: move it there")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(map(dtype_name, dtypes))
        raise KernelError(f"{where} must be {wanted}, not {dtype_name(tensor.dtype)}: convert it with .to()")
    if tuple(tensor.shape) != shape:
        raise KernelError(f"{where} must have shape {list(shape)}, not {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise KernelError(f"{where} must be contiguous: call .contiguous() first")
    if tensor.data_ptr() % alignment:
        raise KernelError(f"{where} must begin at a multiple of {alignment} bytes: call .clone() first")


def _not_on_a_gpu(layout: str, what: str, device: torch.device) -> KernelError:
    return KernelError(
        f"the {layout} kernel's {what} must be on a CUDA device, not on {device}: move it with .to('cuda')"
    )
