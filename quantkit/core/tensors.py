"""Dtypes of dense weights, and views of a tensor's memory."""

from __future__ import annotations

import torch
from torch import Tensor

#: Dtypes of a dense weight that can be read and quantized.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as configs and messages do: `float16`."""
    return str(dtype).removeprefix("torch.")


def raw_bytes(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU if it is elsewhere, and view its elements as flat uint8 bytes."""
    tensor = tensor if tensor.is_cpu and not tensor.requires_grad else tensor.detach().cpu()
    return tensor.reshape(-1).view(torch.uint8)


def aligned(tensor: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Make a tensor contiguous and aligned, so that it can be viewed as `dtype`."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.storage_offset() * tensor.itemsize % dtype.itemsize else tensor
