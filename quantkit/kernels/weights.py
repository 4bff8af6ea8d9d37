"""What the kernels of a layout take, the naive one and the fast ones alike."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.core.formats import FORMATS, INT4
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import KernelError
from quantkit.kernels.contract import Weight

#: Floating format -> its exponent and mantissa bits as template arguments.
SPLITS = {fmt: f"{fmt.ebits}, {fmt.mbits}" for fmt in FORMATS.values() if fmt.is_float}
#: Groups of dense MARLIN: a checkpoint has 128 or one scale per row, vLLM repacks to 64 and 32 (LAYOUTS 3.6).
MARLIN_GROUPS = (128, 64, 32, None)
#: The names of compressed-tensors -> those of vLLM (LAYOUTS 5.1).
OTHER = {"weight_packed": "B_24", "meta": "B_meta", "scale_packed": "s"}


def marlin_weight(scheme: Scheme, n: int, k: int) -> Weight:
    """Return the packed weight that kernels take for a scheme; KernelError for one that they do not take.

    n % 64 == 0, k % 16 == 0 (LAYOUTS 3.1).
    """
    if scheme.format != INT4 or not scheme.symmetric or scheme.group_size not in MARLIN_GROUPS:
        raise KernelError(
            f"the marlin kernel takes symmetric int4 in groups of 128, 64, 32 or none, not {scheme.label}"
        )
    parts = {"B": (torch.int32, (k // 16, 2 * n)), "s": (torch.float16, (scheme.groups(k), n))}
    return Weight("marlin", parts, n, k, of_n=64, of_k=16)


def marlin24_weight(
    scheme: Scheme, n: int, k: int, tensors: Mapping[str, Tensor]
) -> tuple[Weight, Mapping[str, Tensor]]:
    """Return the packed weight, and its tensors under vLLM's names; KernelError for a scheme that kernels do not take.

    n % 64 == 0, k % 32 == 0 (LAYOUTS 5.1).
    """
    if scheme.format != INT4 or scheme.sparsity is None or scheme.group_size not in (128, None):
        raise KernelError(f"the marlin24 kernel takes 2:4 int4 in groups of 128 or none, not {scheme.label}")
    words = (k // 32, 2 * n)
    scales = (torch.float16, (scheme.groups(k), n))
    parts = {"B_24": (torch.int32, words), "B_meta": (torch.int16, words), "s": scales}
    named = {OTHER.get(name, name): tensor for name, tensor in tensors.items()}
    return Weight("marlin24", parts, n, k, of_n=64, of_k=32), named


def tcfpx_weight(scheme: Scheme, n: int, k: int) -> Weight:
    """Return the packed weight that kernels take for a scheme; KernelError for one that they do not take.

    n % 64 == 0, k % 64 == 0 (LAYOUTS 7.1).
    """
    if scheme.format not in SPLITS or scheme.group_size is not None:
        raise KernelError(f"the tcfpx kernel takes fp6 and fp5 with one scale per row, not {scheme.label}")
    words = (n, k * scheme.format.bits // 32)
    parts = {"weight": (torch.int32, words), "scales": (torch.float16, (n,))}
    return Weight("tcfpx", parts, n, k, of_n=64, of_k=64)


def quick_weight(scheme: Scheme, n: int, k: int) -> Weight:
    """Return the packed weight that kernels take for a scheme; KernelError for one that they do not take.

    n % 128 == 0, k % 32 == 0 (LAYOUTS 8.1).
    """
    if scheme.format != INT4 or scheme.group_size is None or scheme.group_size % 32:
        raise KernelError(f"the quick kernel takes int4 in groups of a multiple of 32, not {scheme.label}")
    g = scheme.groups(k)
    parts = {
        "qweight": (torch.int32, (k // 4, n // 2)),
        "qzeros": (torch.int32, (g, n // 4)),
        "scales": (torch.float16, (g, 2 * n)),
    }
    return Weight("quick", parts, n, k, of_n=128, of_k=32)
