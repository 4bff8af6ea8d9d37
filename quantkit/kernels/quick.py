"""Launches the kernels of QUICK: the naive one of kernels/quick.cu, or the fastest for the device."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quantkit.core.quantized_tensor import Scheme
from quantkit.kernels import loader, quick_hopper, quick_portable
from quantkit.kernels.naive import instances, multiply
from quantkit.kernels.weights import quick_weight

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
    weight = quick_weight(scheme, n, k)
    return multiply("quick", INSTANCES, weight, x, tensors, bias, out, sizes=[k // scheme.groups(k)])


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
    hopper = loader.is_hopper(x.device) and scheme.group_size in quick_hopper.GROUPS
    return (quick_hopper if hopper else quick_portable).matmul(x, tensors, scheme, n, k, bias, out)
