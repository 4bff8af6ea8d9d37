"""Launches the kernels of QUICK, kernels/quick.cu."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.errors import KernelError
from quantkit.formats import INT4
from quantkit.kernels.contract import Weight
from quantkit.kernels.naive import instances, multiply
from quantkit.tensor import Scheme

INSTANCES = instances("quick_naive")


def naive(
    x: Tensor,
    tensors: Mapping[str, Tensor],
    scheme: Scheme,
    n: int,
    k: int,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply activations `[m, k]` with `qweight`, `qzeros` and `scales` (LAYOUTS 8.1); n % 128 == 0, k % 32 == 0.

    The product `[m, n]` is in the dtype of `out`, see `contract.check`. KernelError for what cannot be multiplied.
    """
    if scheme.format != INT4 or scheme.group_size is None or scheme.group_size % 32:
        raise KernelError(f"the quick kernel takes int4 in groups of a multiple of 32, not {scheme.label}")
    g = scheme.groups(k)
    parts = {
        "qweight": (torch.int32, (k // 4, n // 2)),
        "qzeros": (torch.int32, (g, n // 4)),
        "scales": (torch.float16, (g, 2 * n)),
    }
    weight = Weight("quick", parts, n, k, of_n=128, of_k=32)
    return multiply("quick", INSTANCES, weight, x, tensors, bias, out, sizes=[k // g])
