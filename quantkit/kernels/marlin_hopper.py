"""Launches MARLIN's kernel for Hopper, kernels/marlin_hopper.cu, on the tile that a model of the device finds best.

The model's figures were fitted to a sweep of nine layer shapes and eight token counts on an H200
(benchmarks/h200/marlin_tiles.csv).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.core.quantized_tensor import Scheme
from quantkit.kernels import hopper
from quantkit.kernels.contract import ACTIVATIONS, TYPES, check, same_dtype
from quantkit.kernels.hopper import K_STEP, MANY, Tile, ceil
from quantkit.kernels.tensormap import tensor_map
from quantkit.kernels.weights import MARLIN_GROUPS, marlin_weight

SOURCE = "marlin_hopper"
#: Columns of a tile -> GB/s that weights are read with.
BANDWIDTH = {256: 4200.0, 128: 4100.0, 64: 3000.0}
#: Tiles of so many tokens are also tried where it takes some of them to hold all.
SEVERAL = 128
#: Fewest tokens first. Of equals the first is taken.
TILES = (
    Tile(8, 2, 1, 6, False, 0, 0.507, 1.6, 1.5),
    Tile(8, 2, 1, 6, False, MANY, 0.377, 2.9),
    Tile(8, 4, 1, 4, False, 0, 0.605, 0.9, 5.3),
    Tile(8, 4, 1, 4, False, MANY, 0.688, 3.2),
    Tile(8, 4, 2, 8, False, 0, 0.289, 0.1, 8.0),
    Tile(16, 2, 1, 6, False, 0, 0.327, 2.0, 4.5),
    Tile(16, 2, 1, 6, False, MANY, 0.656, 0.8),
    Tile(16, 4, 1, 4, False, 0, 0.755, 0.1, 7.8),
    Tile(32, 1, 1, 6, False, 2, 0.438, 0.3),
    Tile(32, 2, 2, 8, False, 0, 0.355, 3.2, 0.3),
    Tile(32, 4, 2, 6, False, 0, 0.497, 3.0, 4.4),
    Tile(64, 1, 2, 6, True, 0, 0.434, 1.2, 3.6),
    Tile(64, 1, 2, 6, True, 2, 0.541, 0.0),
    Tile(64, 2, 1, 4, False, 0, 0.695, 1.6, 6.0),
    Tile(128, 1, 1, 3, False, 0, 0.811, 2.1),
    Tile(128, 1, 2, 5, True, 0, 0.528, 4.7, 0.3),
    Tile(128, 1, 2, 5, True, 2, 0.544, 0.2),
    Tile(128, 2, 2, 4, True, 0, 0.949, 1.2, 7.1),
    Tile(256, 1, 2, 3, True, 0, 0.736, 0.3, 10.0),
    Tile(256, 1, 2, 3, True, 2, 0.738, 7.7),
)
#: Enough for groups that MARLIN checkpoints do not have.
FEW = tuple(tile for tile in TILES if tile.words == 2 and tile.tokens < 128 and not tile.cluster and not tile.shared)


def tiles(dtype: torch.dtype, group_size: int | None) -> tuple[Tile, ...]:
    """Return the tiles that exist for activations of a dtype and a group size."""
    some = TILES if group_size in (128, None) else FEW
    # Where warpgroups share a stage, float16 scales go into the weights; bfloat16 has no room for both.
    return tuple(t for t in some if dtype == torch.float16 or group_size is None or not t.shared or t.summed_twice)


def instance(tile: Tile, dtype: torch.dtype, group_size: int | None) -> str:
    """Return the name expression of a tile's kernel."""
    return f"{SOURCE}<{TYPES[dtype]}, {tile.sizes}, {group_size or 0}, {tile.sharing}>"


@functools.cache
def instances(dtype: torch.dtype, group_size: int | None) -> tuple[str, ...]:
    """Return the name expressions of all tiles for activations of a dtype and a group size."""
    return tuple(instance(tile, dtype, group_size) for tile in tiles(dtype, group_size))


INSTANCES = tuple(
    name for dtype in ACTIVATIONS for group_size in MARLIN_GROUPS for name in instances(dtype, group_size)
)


@functools.lru_cache(maxsize=4096)
def choose_tile(m: int, n: int, k: int, sms: int, dtype: torch.dtype, group_size: int | None) -> Tile:
    """Return the tile that a product `[m, k] x [k, n]` is expected to be fastest on; see `hopper.choose`."""
    return hopper.choose(
        hopper.holding(tiles(dtype, group_size), m, SEVERAL), m, n, k, sms, lambda tile: reading(tile, n, k)
    )


def reading(tile: Tile, n: int, k: int) -> float:
    """Return the microseconds in which a weight is read by a tile's boxes."""
    return n * k * (0.5 + 2 / 128) / BANDWIDTH[tile.columns] / 1e3


def room(tile: Tile, group_size: int | None) -> int:
    """Return the bytes of a stage's codes and scales."""
    scales = 0 if group_size is None else K_STEP // group_size * tile.columns * 2
    return ceil(tile.columns * K_STEP // 2 + scales, 128) * 128


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
    """Multiply activations `[m, k]` with `B` and `s` (LAYOUTS 3.1); n % 64 == 0, k % 16 == 0.

    The product `[m, n]` has the dtype of `x`; `tile` overrides the choice. Sums are float32, in an order that depends
    on the shapes and the device alone. See `workspace` about streams and CUDA graphs. KernelError for what cannot be
    multiplied.
    """
    out = check(marlin_weight(scheme, n, k), x, tensors, bias, out)
    same_dtype("marlin", x, out)
    g = scheme.groups(k)
    # One group is one scale per column, permuted as such (LAYOUTS 3.3).
    group_size = scheme.group_size if g > 1 else None
    tile = tile or choose_tile(x.shape[0], n, k, hopper.multiprocessors(x.device), x.dtype, group_size)
    words, scales = tensors["B"], tensors["s"]
    w_map = tensor_map(words, (k // 16, n), (K_STEP // 16, tile.columns), 8)
    s_map = tensor_map(scales, (g, n), (K_STEP // group_size, tile.columns), 2) if group_size else w_map
    names, name = instances(x.dtype, group_size), instance(tile, x.dtype, group_size)
    hopper.launch(SOURCE, names, name, tile, room(tile, group_size), x, [w_map, s_map], scales, [words], bias, out)
    return out
