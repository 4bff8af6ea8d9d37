"""Launches the kernels of Sparse-MARLIN: the naive one of kernels/marlin24.cu, or the fastest for the device."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quantkit.core.quantized_tensor import Scheme
from quantkit.kernels import loader, marlin24_hopper, marlin24_portable
from quantkit.kernels.naive import instances, multiply
from quantkit.kernels.weights import marlin24_weight

INSTANCES = instances("marlin24_naive")


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
    weight, tensors = marlin24_weight(scheme, n, k, tensors)
    return multiply("marlin24", INSTANCES, weight, x, tensors, bias, out, sizes=[k // scheme.groups(k)])


def matmul(
    x: Tensor,
    tensors: Mapping[str, Tensor],
    scheme: Scheme,
    n: int,
    k: int,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `naive`, by the fastest kernel for the device of `x`; the product has the dtype of `x`."""
    hopper = loader.is_hopper(x.device) and marlin24_hopper.takes(n, k)
    return (marlin24_hopper if hopper else marlin24_portable).matmul(x, tensors, scheme, n, k, bias, out)
