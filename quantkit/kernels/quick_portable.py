"""Launches the QUICK kernel for sm_80 and newer, kernels/quick_portable.cu."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import KernelError
from quantkit.kernels.portable import Kernel, Tile, multiply
from quantkit.kernels.weights import quick_weight

#: Few tokens are spread along k, so that there is work for all multiprocessors.
TILES = (
    Tile(eights=1, wn=2, wm=1, wk=4, stages=3, blocks=2, cost=31.7),
    Tile(eights=2, wn=2, wm=1, wk=4, stages=3, blocks=2, cost=37.3),
    Tile(eights=4, wn=4, wm=1, wk=2, stages=3, blocks=1, cost=51.5),
    Tile(eights=4, wn=4, wm=2, wk=1, stages=4, blocks=1, cost=77.5),
)


def _stage(n: int, k: int) -> int:
    """Codes, and for groups of at least 32 scales and zero points, each twice."""
    return n * k // 2 + k // 32 * n * (4 + 1)


KERNEL = Kernel("quick_portable", TILES, _stage)
INSTANCES = KERNEL.instances


def matmul(
    x: Tensor,
    tensors: Mapping[str, Tensor],
    scheme: Scheme,
    n: int,
    k: int,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """Multiply activations `[m, k]` with the tensors of LAYOUTS 8.1; see `quick_weight`, `multiply`."""
    weight = quick_weight(scheme, n, k)
    group = k // scheme.groups(k)
    if group < k and group * k >= 1 << 34:
        raise KernelError(f"the quick kernel takes groups of fewer than {(1 << 34) // k} for k = {k}, not {group}")
    return multiply(KERNEL, weight, x, tensors, bias, out, tile, [group])
