"""Launches the kernels of dense MARLIN: the naive one of kernels/marlin.cu, or the fastest for the device."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quantkit.core.quantized_tensor import Scheme
from quantkit.kernels import loader, marlin_hopper, marlin_portable
from quantkit.kernels.naive import instances, multiply
from quantkit.kernels.weights import marlin_weight

INSTANCES = instances("marlin_naive")


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
    weight = marlin_weight(scheme, n, k)
    return multiply("marlin", INSTANCES, weight, x, tensors, bias, out, sizes=[k // scheme.groups(k)])


def matmul(
    x: Tensor,
    tensors: Mapping[str, Tensor],
    scheme: Scheme,
    n: int,
    k: int,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `naive`, by the kernel for the device of `x`; the product has the dtype of `x`."""
    kernel = marlin_hopper if loader.is_hopper(x.device) else marlin_portable
    return kernel.matmul(x, tensors, scheme, n, k, bias, out)
