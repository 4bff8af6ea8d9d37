"""Launches the kernels of Sparse-MARLIN, kernels/marlin24.cu, under both spellings of its tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.errors import KernelError
from quantkit.formats import INT4
from quantkit.kernels.contract import Weight
from quantkit.kernels.naive import instances, multiply
from quantkit.tensor import Scheme

INSTANCES = instances("marlin24_naive")
GROUPS = (128, None)
#: The names of compressed-tensors -> those of vLLM (LAYOUTS 5.1).
OTHER = {"weight_packed": "B_24", "meta": "B_meta", "scale_packed": "s"}


def naive(
    x: Tensor,
    tensors: Mapping[str, Tensor],
    scheme: Scheme,
    n: int,
    k: int,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply activations `[m, k]` with `B_24`, `B_meta` and `s` (LAYOUTS 5.1); n % 64 == 0, k % 32 == 0.

    The product `[m, n]` is in the dtype of `out`, see `contract.check`. KernelError for what cannot be multiplied.
    """
    if scheme.format != INT4 or scheme.sparsity is None or scheme.group_size not in GROUPS:
        raise KernelError(f"the marlin24 kernel takes 2:4 int4 in groups of 128 or none, not {scheme.label}")
    g = scheme.groups(k)
    words = (k // 32, 2 * n)
    parts = {"B_24": (torch.int32, words), "B_meta": (torch.int16, words), "s": (torch.float16, (g, n))}
    weight = Weight("marlin24", parts, n, k, of_n=64, of_k=32)
    tensors = {OTHER.get(name, name): tensor for name, tensor in tensors.items()}
    return multiply("marlin24", INSTANCES, weight, x, tensors, bias, out, sizes=[k // g])
