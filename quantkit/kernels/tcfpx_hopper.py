"""Launches TC-FPx's kernel for Hopper, kernels/tcfpx_hopper.cu, on the tile that a model of the device finds best.

The model's figures were fitted to a sweep of nine layer shapes and eight token counts on an H200
(benchmarks/h200/tcfpx_tiles.csv).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.core.formats import FP5, FP6, Format
from quantkit.core.quantized_tensor import Scheme
from quantkit.kernels import hopper
from quantkit.kernels.contract import ACTIVATIONS, TYPES, check, same_dtype
from quantkit.kernels.hopper import K_STEP, MANY, Tile
from quantkit.kernels.tensormap import tensor_map
from quantkit.kernels.weights import SPLITS, tcfpx_weight

SOURCE = "tcfpx_hopper"
#: Columns of a tile -> GB/s that weights are read with.
BANDWIDTH = {256: 4150.0, 128: 4100.0, 64: 3000.0}
#: Tiles of so many tokens are also tried where it takes some of them to hold all.
SEVERAL = 128
#: Fewest tokens first. Of equals the first is taken.
TILES = {
    FP6: (
        Tile(8, 2, 1, 6, False, MANY, 0.59, 1.1),
        Tile(8, 2, 1, 7, False, 0, 0.633, 0.6, 3.2),
        Tile(8, 2, 2, 8, False, 2, 0.306, 0.3),
        Tile(8, 4, 1, 3, False, MANY, 1.207, 0.5),
        Tile(8, 4, 2, 8, False, 0, 0.616, 0.8, 5.4),
        Tile(16, 2, 1, 5, False, MANY, 0.536, 2.6),
        Tile(16, 2, 1, 6, False, 0, 0.32, 9.7, 0.5),
        Tile(16, 2, 2, 8, False, 2, 0.312, 1.0),
        Tile(16, 4, 2, 6, False, 0, 0.36, 1.2, 7.8),
        Tile(32, 1, 1, 6, False, 2, 0.323, 0.2),
        Tile(32, 2, 2, 8, False, 0, 0.387, 2.3, 1.0),
        Tile(32, 2, 2, 8, False, 2, 0.449, 0.1),
        Tile(32, 4, 2, 4, False, 0, 0.36, 9.5, 2.8),
        Tile(64, 1, 2, 6, True, 2, 0.471, 1.1),
        Tile(64, 2, 1, 3, False, 0, 0.845, 4.6, 0.7),
        Tile(64, 2, 2, 5, True, 0, 0.722, 0.7, 9.2),
        Tile(128, 1, 2, 5, True, 0, 0.558, 5.9, 1.3),
        Tile(128, 1, 2, 5, True, 2, 0.6, 3.3),
        Tile(128, 2, 2, 3, True, 0, 0.622, 10.0, 9.7),
        Tile(256, 1, 2, 2, True, 2, 0.861, 8.8),
    ),
    FP5: (
        Tile(8, 2, 1, 6, False, MANY, 0.47, 2.3),
        Tile(8, 2, 1, 7, False, 0, 0.628, 0.9, 1.6),
        Tile(8, 2, 2, 8, False, 2, 0.373, 0.1),
        Tile(8, 4, 1, 3, False, MANY, 0.803, 2.9),
        Tile(8, 4, 2, 8, False, 0, 0.522, 0.2, 4.5),
        Tile(16, 2, 1, 5, False, MANY, 0.547, 2.6),
        Tile(16, 2, 1, 6, False, 0, 0.393, 0.0, 7.8),
        Tile(16, 2, 2, 8, False, 2, 0.388, 0.7),
        Tile(16, 4, 2, 6, False, 0, 0.447, 0.6, 7.2),
        Tile(32, 1, 1, 6, False, 2, 0.381, 0.3),
        Tile(32, 2, 2, 8, False, 0, 0.374, 3.2, 0.6),
        Tile(32, 4, 2, 4, False, 0, 0.391, 0.5, 10.0),
        Tile(64, 1, 2, 6, True, 2, 0.503, 0.3),
        Tile(64, 2, 1, 3, False, 0, 0.834, 3.0, 2.1),
        Tile(64, 2, 2, 5, True, 0, 0.808, 0.1, 5.7),
        Tile(128, 1, 2, 5, True, 0, 0.587, 4.7, 0.6),
        Tile(128, 1, 2, 5, True, 2, 0.641, 0.4),
        Tile(128, 2, 2, 3, True, 0, 0.934, 0.3, 9.9),
        Tile(256, 1, 2, 2, True, 2, 0.877, 6.8),
    ),
}
#: Enough for the formats that are rare.
FEW = tuple(tile for tile in TILES[FP5] if tile.words == 2 and not tile.cluster and not tile.shared)


def tiles(fmt: Format) -> tuple[Tile, ...]:
    """Return the tiles that exist for a format."""
    return TILES.get(fmt, FEW)


def instance(tile: Tile, dtype: torch.dtype, fmt: Format) -> str:
    """Return the name expression of a tile's kernel."""
    return f"{SOURCE}<{TYPES[dtype]}, {SPLITS[fmt]}, {tile.sizes}, {tile.sharing}>"


@functools.cache
def instances(dtype: torch.dtype, fmt: Format) -> tuple[str, ...]:
    """Return the name expressions of all tiles for activations of a dtype and a format."""
    return tuple(instance(tile, dtype, fmt) for tile in tiles(fmt))


INSTANCES = tuple(name for dtype in ACTIVATIONS for fmt in SPLITS for name in instances(dtype, fmt))


@functools.lru_cache(maxsize=4096)
def choose_tile(m: int, n: int, k: int, sms: int, fmt: Format) -> Tile:
    """Return the tile that a product `[m, k] x [k, n]` is expected to be fastest on; see `hopper.choose`."""
    return hopper.choose(hopper.holding(tiles(fmt), m, SEVERAL), m, n, k, sms, lambda tile: reading(tile, n, k, fmt))


def reading(tile: Tile, n: int, k: int, fmt: Format) -> float:
    """Return the microseconds in which a weight is read by a tile's boxes."""
    return n * k * fmt.bits / 8 / BANDWIDTH[tile.columns] / 1e3


def room(tile: Tile, fmt: Format) -> int:
    """Return the bytes of a stage's codes."""
    return tile.columns * K_STEP * fmt.bits // 8


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
    """Multiply activations `[m, k]` with the tensors of LAYOUTS 7.1; see `tcfpx_weight`.

    The product `[m, n]` has the dtype of `x`; `tile` overrides the choice. Sums are float32, in an order that depends
    on the shapes and the device alone. See `workspace` about streams and CUDA graphs. KernelError for what cannot be
    multiplied.
    """
    weight = tcfpx_weight(scheme, n, k)
    out = check(weight, x, tensors, bias, out)
    same_dtype(weight.layout, x, out)
    fmt = scheme.format
    tile = tile or choose_tile(x.shape[0], n, k, hopper.multiprocessors(x.device), fmt)
    words, scales = (tensors[name] for name in weight.tensors)
    high, blocks = fmt.bits - 4, tile.columns // 64
    # 64 rows are contiguous along k in each plane, of eight bytes a word; a box has no more than 256 of them in a row.
    low = words.view(-1)[n * k // 32 * high :]
    maps = [
        tensor_map(low, (n // 64, k // 64, 256), (blocks, K_STEP // 64, 256), 8),
        tensor_map(words, (n // 64, k * high), (blocks, K_STEP * high), 8),
    ]
    names, name = instances(x.dtype, fmt), instance(tile, x.dtype, fmt)
    hopper.launch(SOURCE, names, name, tile, room(tile, fmt), x, maps, scales, [words], bias, out)
    return out
