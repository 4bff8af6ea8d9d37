"""Launches the kernels of TC-FPx: the naive one of kernels/tcfpx.cu, or the fastest for the device."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quantkit.core.quantized_tensor import Scheme
from quantkit.kernels import loader, tcfpx_hopper, tcfpx_portable
from quantkit.kernels.naive import instances, multiply
from quantkit.kernels.weights import SPLITS, tcfpx_weight

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
    weight = tcfpx_weight(scheme, n, k)
    return multiply("tcfpx", INSTANCES, weight, x, tensors, bias, out, variant=SPLITS[scheme.format])


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
    kernel = tcfpx_hopper if loader.is_hopper(x.device) else tcfpx_portable
    return kernel.matmul(x, tensors, scheme, n, k, bias, out)
