"""Launches the Sparse-MARLIN kernel for sm_80 and newer, kernels/marlin24_portable.cu."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quantkit.core.quantized_tensor import Scheme
from quantkit.kernels.portable import Kernel, Tile, multiply
from quantkit.kernels.weights import marlin24_weight

#: Few tokens are spread along k, so that there is work for all multiprocessors.
TILES = (
    Tile(eights=1, wn=2, wm=1, wk=4, stages=4, blocks=2, cost=15.0),
    Tile(eights=2, wn=4, wm=1, wk=2, stages=4, blocks=2, cost=18.3),
    Tile(eights=4, wn=4, wm=1, wk=2, stages=4, blocks=1, cost=30.5),
    Tile(eights=4, wn=4, wm=2, wk=1, stages=4, blocks=1, cost=52.9),
)


def _stage(n: int, k: int) -> int:
    """Codes of half of the weights, metadata, and scales of groups of at least 32."""
    return n * k // 4 + n * k // 8 + k // 32 * n * 2


KERNEL = Kernel("marlin24_portable", TILES, _stage)
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
    """Multiply activations `[m, k]` with the tensors of LAYOUTS 5.1; see `marlin24_weight`, `multiply`."""
    weight, tensors = marlin24_weight(scheme, n, k, tensors)
    return multiply(KERNEL, weight, x, tensors, bias, out, tile, [k // scheme.groups(k)])
