"""Launches the kernels of TC-FPx, kernels/tcfpx.cu, for every split of six or five bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.errors import KernelError
from quantkit.formats import FORMATS
from quantkit.kernels.contract import Weight
from quantkit.kernels.naive import instances, multiply
from quantkit.tensor import Scheme

#: Format -> its exponent and mantissa bits as template arguments.
SPLITS = {fmt: f"{fmt.ebits}, {fmt.mbits}" for fmt in FORMATS.values() if fmt.is_float}
INSTANCES = instances("tcfpx_naive", *SPLITS.values())


def naive(
    x: Tensor,
    tensors: Mapping[str, Tensor],
    scheme: Scheme,
    n: int,
    k: int,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply activations `[m, k]` with `weight` and `scales` (LAYOUTS 7.1); n % 64 == 0, k % 64 == 0.

    The product `[m, n]` is in the dtype of `out`, see `contract.check`. KernelError for what cannot be multiplied.
    """
    if scheme.format not in SPLITS or scheme.group_size is not None:
        raise KernelError(f"the tcfpx kernel takes fp6 and fp5 with one scale per row, not {scheme.label}")
    words = (n, k * scheme.format.bits // 32)
    parts = {"weight": (torch.int32, words), "scales": (torch.float16, (n,))}
    weight = Weight("tcfpx", parts, n, k, of_n=64, of_k=64)
    return multiply("tcfpx", INSTANCES, weight, x, tensors, bias, out, variant=SPLITS[scheme.format])
