"""Which dtype the arithmetic uses, how many rows it handles at once, and which inputs
it refuses.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quantkit.core.tensors import FLOATS
from quantkit.errors import NumericError, Setting, Words

_FULL_RATE_FLOAT64 = {
    (6, 0),
    (7, 0),
    (8, 0),
    (9, 0),
    (10, 0),
}  # compute capabilities of data-centre GPUs

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


def row_slices(weight: Tensor, width: int, least: int = 1) -> Iterator[slice]:
    """Yield slices of at least `least` rows; their temporaries of `width` columns fit in a CPU's
    cache.
    """
    entries = 2**18 if weight.device.type == "cpu" else 2**26
    rows = max(least, entries // width)
    for a in range(0, len(weight), rows):
        yield slice(a, min(a + rows, len(weight)))


def check_weight(weight: Tensor) -> None:
    """Raise NumericError unless `weight` is a non-empty float matrix `[n, k]` of finite numbers."""
    if weight.ndim != 2 or not weight.numel() or weight.dtype not in FLOATS:
        raise NumericError(
            "a weight is a non-empty float16, bfloat16, float32 or float64 matrix, not "
            f"{weight.dtype} "
            f"{list(weight.shape)}",
            "convert it",
            Words("leave it dense with", Setting("skip")),
        )
    check_finite(weight)


def is_finite(tensor: Tensor) -> bool:
    """Return True if a tensor of float16, bfloat16, float32 or float64 has neither NaN nor
    infinity.

    On a CPU, comparing the bits of the magnitudes is several times as fast as `torch.isfinite`.
    """
    bits = _BITS[tensor.itemsize]
    infinity = torch.tensor(torch.inf, dtype=tensor.dtype).view(bits).item()
    return not tensor.numel() or bool((tensor.view(bits) & torch.iinfo(bits).max).max() < infinity)


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
