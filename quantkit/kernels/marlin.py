"""Launches the kernels of dense MARLIN, kernels/marlin.cu."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.errors import KernelError
from quantkit.formats import INT4
from quantkit.kernels.contract import Weight
from quantkit.kernels.naive import instances, multiply
from quantkit.tensor import Scheme

INSTANCES = instances("marlin_naive")
#: The checkpoint has groups of 128 or one scale per row; 64 and 32 are what vLLM repacks to (LAYOUTS 3.6).
GROUPS = (128, 64, 32, None)


def naive(
    x: Tensor,
    tensors: Mapping[str, Tensor],
    scheme: Scheme,
    n: int,
    k: int,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply activations `[m, k]` with `B` and `s` (LAYOUTS 3.1); n % 64 == 0, k % 16 == 0.

    The product `[m, n]` is in the dtype of `out`, see `contract.check`. KernelError for what cannot be multiplied.
    """
    if scheme.format != INT4 or not scheme.symmetric or scheme.group_size not in GROUPS:
        raise KernelError(
            f"the marlin kernel takes symmetric int4 in groups of 128, 64, 32 or none, not {scheme.label}"
        )
    g = scheme.groups(k)
    parts = {"B": (torch.int32, (k // 16, 2 * n)), "s": (torch.float16, (g, n))}
    weight = Weight("marlin", parts, n, k, of_n=64, of_k=16)
    return multiply("marlin", INSTANCES, weight, x, tensors, bias, out, sizes=[k // g])
