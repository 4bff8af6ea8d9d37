"""Launches QUICK's kernel for Hopper, kernels/quick_hopper.cu, on the tile that a model of the device finds best.

The model's figures were fitted to a sweep of nine layer shapes and eight token counts on an H200
(benchmarks/h200/quick_tiles.csv).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import KernelError
from quantkit.kernels import hopper
from quantkit.kernels.contract import ACTIVATIONS, TYPES, check, same_dtype
from quantkit.kernels.hopper import K_STEP, MANY, Tile, ceil
from quantkit.kernels.tensormap import tensor_map
from quantkit.kernels.weights import quick_weight

SOURCE = "quick_hopper"
#: Groups that a step of k is whole ones of.
GROUPS = (128, 64, 32)
#: Columns of a tile -> GB/s that weights are read with.
BANDWIDTH = {256: 4200.0, 128: 4100.0}
#: Tiles of so many tokens are also tried where it takes some of them to hold all.
SEVERAL = 64
#: Fewest tokens first. Of equals the first is taken.
TILES = (
    Tile(8, 2, 1, 6, False, 0, 0.476, 0.1, 3.9),
    Tile(8, 2, 1, 6, False, MANY, 0.358, 3.8),
    Tile(8, 4, 1, 4, False, MANY, 0.632, 4.2),
    Tile(16, 2, 1, 6, False, 0, 0.518, 0.3, 4.3),
    Tile(16, 2, 1, 6, False, MANY, 0.63, 1.8),
    Tile(16, 4, 1, 4, False, 0, 0.674, 6.8, 1.6),
    Tile(32, 2, 1, 5, False, 0, 0.573, 0.3, 5.6),
    Tile(32, 2, 2, 8, False, 2, 0.474, 0.5),
    Tile(32, 4, 2, 6, False, 0, 0.495, 0.5, 7.2),
    Tile(64, 1, 2, 6, True, 2, 0.575, 0.2),
    Tile(64, 2, 1, 4, False, 0, 0.757, 0.3, 6.1),
    Tile(128, 1, 2, 5, True, 0, 0.636, 0.1, 4.5),
    Tile(128, 1, 2, 5, True, 2, 0.655, 0.2),
    Tile(128, 2, 2, 4, True, 0, 1.052, 0.9, 9.3),
    Tile(256, 1, 2, 3, True, 0, 0.967, 0.9, 9.1),
    Tile(256, 1, 2, 3, True, 2, 0.917, 8.5),
)
#: Enough for groups that are rare.
FEW = tuple(tile for tile in TILES if tile.words == 2 and tile.warpgroups == 1 and not tile.cluster)


def tiles(dtype: torch.dtype, group_size: int) -> tuple[Tile, ...]:
    """Return the tiles that exist for activations of a dtype and a group size."""
    some = TILES if group_size == 128 else FEW
    # Where warpgroups share a stage, float16 scales go into the weights; bfloat16 has no room for both.
    return tuple(tile for tile in some if dtype == torch.float16 or not tile.shared or tile.summed_twice)


def instance(tile: Tile, dtype: torch.dtype, group_size: int) -> str:
    """Return the name expression of a tile's kernel."""
    return f"{SOURCE}<{TYPES[dtype]}, {tile.sizes}, {group_size}, {tile.sharing}>"


@functools.cache
def instances(dtype: torch.dtype, group_size: int) -> tuple[str, ...]:
    """Return the name expressions of all tiles for activations of a dtype and a group size."""
    return tuple(instance(tile, dtype, group_size) for tile in tiles(dtype, group_size))


INSTANCES = tuple(name for dtype in ACTIVATIONS for group_size in GROUPS for name in instances(dtype, group_size))


@functools.lru_cache(maxsize=4096)
def choose_tile(m: int, n: int, k: int, sms: int, dtype: torch.dtype, group_size: int) -> Tile:
    """Return the tile that a product `[m, k] x [k, n]` is expected to be fastest on; see `hopper.choose`."""
    some = hopper.holding(tiles(dtype, group_size), m, SEVERAL)
    return hopper.choose(some, m, n, k, sms, lambda tile: reading(tile, n, k, group_size))


def reading(tile: Tile, n: int, k: int, group_size: int) -> float:
    """Return the microseconds in which a weight is read by a tile's boxes."""
    return n * k * (0.5 + 5 / group_size) / BANDWIDTH[tile.columns] / 1e3


def room(tile: Tile, group_size: int) -> int:
    """Return the bytes of a stage's codes, scales and zero points, which are there twice; swizzled by 1024."""
    return ceil(tile.columns * (K_STEP // 2 + K_STEP // group_size * 5), 1024) * 1024


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
    """Multiply activations `[m, k]` with the tensors of LAYOUTS 8.1 in groups of 128, 64 or 32; see `quick_weight`.

    The product `[m, n]` has the dtype of `x`; `tile` overrides the choice. Sums are float32, in an order that depends
    on the shapes and the device alone. See `workspace` about streams and CUDA graphs. KernelError for what cannot be
    multiplied.
    """
    weight = quick_weight(scheme, n, k)
    out = check(weight, x, tensors, bias, out)
    same_dtype(weight.layout, x, out)
    g = scheme.groups(k)
    group_size = k // g
    if group_size not in GROUPS:
        raise KernelError(f"the quick kernel for Hopper takes groups of 128, 64 or 32, not {group_size}")
    tile = tile or choose_tile(x.shape[0], n, k, hopper.multiprocessors(x.device), x.dtype, group_size)
    words, zeros, scales = (tensors[name] for name in weight.tensors)
    rows = 4 * (K_STEP // group_size)
    # Rows of memory are a quarter of the columns each (LAYOUTS 8.2): of codes in pieces of 128 bytes.
    maps = [
        tensor_map(words, (k // 8, n // 32, 16), (K_STEP // 8, tile.columns // 32, 16), 8, swizzled=True),
        tensor_map(zeros, (4 * g, n // 32), (rows, tile.columns // 32), 8),
        tensor_map(scales, (4 * g, n // 2), (rows, tile.columns // 2), 2),
    ]
    names, name = instances(x.dtype, group_size), instance(tile, x.dtype, group_size)
    hopper.launch(SOURCE, names, name, tile, room(tile, group_size), x, maps, scales, [words, zeros], bias, out)
    return out
