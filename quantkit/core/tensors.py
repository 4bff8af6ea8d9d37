"""Views of a tensor's memory."""

from __future__ import annotations

import torch
from torch import Tensor


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor on the CPU, uint8 `[bytes]`, in the order of its elements."""
    tensor = tensor if tensor.is_cpu and not tensor.requires_grad else tensor.detach().cpu()
    return tensor.reshape(-1).view(torch.uint8)


def aligned(tensor: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a contiguous tensor that can be viewed as `dtype`; copy it if it starts between two such integers."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.storage_offset() * tensor.itemsize % dtype.itemsize else tensor
