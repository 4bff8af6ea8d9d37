"""Launches the TC-FPx kernels for sm_80 and newer, kernels/tcfpx_portable.cu, for every split of six or five bits."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quantkit.core.formats import FP5, FP6, Format
from quantkit.core.quantized_tensor import Scheme
from quantkit.kernels.portable import Kernel, Tile, multiply
from quantkit.kernels.weights import SPLITS, tcfpx_weight

#: Few tokens are spread along k, so that there is work for all multiprocessors.
TILES = (
    Tile(eights=1, wn=2, wm=1, wk=4, stages=3, blocks=2, cost=21.6),
    Tile(eights=2, wn=4, wm=1, wk=2, stages=3, blocks=2, cost=23.8),
    Tile(eights=4, wn=4, wm=1, wk=2, stages=3, blocks=2, cost=32.4),
    Tile(eights=8, wn=4, wm=2, wk=1, stages=3, blocks=1, cost=106.5),
)
#: Enough for the formats that are rare.
FEW = TILES[1::2]


def _kernel(fmt: Format) -> Kernel:
    tiles = TILES if fmt in (FP6, FP5) else FEW
    return Kernel("tcfpx_portable", tiles, lambda n, k: n * k * fmt.bits // 8, SPLITS[fmt])


#: Format -> its kernels.
KERNELS = {fmt: _kernel(fmt) for fmt in SPLITS}
INSTANCES = tuple(instance for kernel in KERNELS.values() for instance in kernel.instances)


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
    """Multiply activations `[m, k]` with the tensors of LAYOUTS 7.1; see `tcfpx_weight`, `multiply`."""
    weight = tcfpx_weight(scheme, n, k)
    return multiply(KERNELS[scheme.format], weight, x, tensors, bias, out, tile)
