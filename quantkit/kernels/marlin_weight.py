"""What MARLIN's kernels take, the naive one and the fast ones alike."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.errors import KernelError
from quantkit.formats import INT4
from quantkit.kernels.contract import Weight
from quantkit.tensor import Scheme, dtype_name

#: The checkpoint has groups of 128 or one scale per row; 64 and 32 are what vLLM repacks to (LAYOUTS 3.6).
GROUPS = (128, 64, 32, None)


def marlin_weight(scheme: Scheme, n: int, k: int) -> Weight:
    """Return the packed weight that kernels take for a scheme; KernelError for one that they do not take."""
    if scheme.format != INT4 or not scheme.symmetric or scheme.group_size not in GROUPS:
        raise KernelError(
            f"the marlin kernel takes symmetric int4 in groups of 128, 64, 32 or none, not {scheme.label}"
        )
    parts = {"B": (torch.int32, (k // 16, 2 * n)), "s": (torch.float16, (scheme.groups(k), n))}
    return Weight("marlin", parts, n, k, of_n=64, of_k=16)


def same_dtype(x: Tensor, out: Tensor) -> None:
    """Raise KernelError if a product is asked in another dtype than its activations: only the naive kernel has both."""
    if out.dtype != x.dtype:
        raise KernelError(
            f"the fast marlin kernels write {dtype_name(x.dtype)} as their activations are, not {dtype_name(out.dtype)}"
        )
