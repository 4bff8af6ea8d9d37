"""Launches Sparse-MARLIN's kernel for Hopper, kernels/marlin24_hopper.cu, on the tile that a model finds best.

The model's figures were fitted to a sweep of nine layer shapes and eight token counts on an H200
(benchmarks/h200/marlin24_tiles.csv).
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
from quantkit.kernels.hopper import K_STEP, MANY, Tile
from quantkit.kernels.tensormap import tensor_map
from quantkit.kernels.weights import marlin24_weight

SOURCE = "marlin24_hopper"
GROUPS = (128, None)
#: Weights of a tile are never beyond the matrix, since the zeros that would be there are no metadata.
COLUMNS = 128
#: Columns of a tile -> GB/s that weights are read with.
BANDWIDTH = {256: 4200.0, 128: 4100.0}
#: TFLOP/s of all multiprocessors together, where two of four weights are multiplied.
SUSTAINED = 1000.0
#: Tiles of so many tokens are also tried where it takes some of them to hold all.
SEVERAL = 64
#: Fewest tokens first. Of equals the first is taken.
TILES = (
    Tile(8, 2, 1, 8, False, 0, 0.389, 0.0, 2.4),
    Tile(8, 4, 1, 4, False, MANY, 0.463, 4.1),
    Tile(8, 4, 2, 8, False, 0, 0.193, 7.1),
    Tile(16, 2, 1, 6, False, 0, 0.342, 0.7, 3.4),
    Tile(16, 2, 1, 6, False, MANY, 0.475, 1.3),
    Tile(16, 4, 1, 4, False, 0, 0.549, 2.7, 5.0),
    Tile(32, 2, 1, 6, False, 0, 0.452, 0.4, 3.9),
    Tile(32, 4, 2, 6, False, 0, 0.389, 4.8, 1.2),
    Tile(64, 2, 1, 4, False, 0, 0.482, 2.0, 3.7),
    Tile(64, 2, 2, 5, True, 0, 0.332, 8.5, 0.2),
    Tile(64, 2, 2, 6, False, 2, 0.47, 0.1),
    Tile(128, 2, 2, 4, True, 0, 0.4, 6.1, 7.5),
    Tile(128, 2, 2, 4, True, 2, 0.42, 10.0),
)


def tiles(dtype: torch.dtype, group_size: int | None) -> tuple[Tile, ...]:
    """Return the tiles that exist for activations of a dtype and a group size."""
    # Where warpgroups share a stage, float16 scales go into the weights; bfloat16 has no room for both.
    return tuple(
        tile for tile in TILES if dtype == torch.float16 or group_size is None or not tile.shared or tile.summed_twice
    )


def instance(tile: Tile, dtype: torch.dtype, group_size: int | None) -> str:
    """Return the name expression of a tile's kernel."""
    return f"{SOURCE}<{TYPES[dtype]}, {tile.sizes}, {group_size or 0}, {tile.sharing}>"


@functools.cache
def instances(dtype: torch.dtype, group_size: int | None) -> tuple[str, ...]:
    """Return the name expressions of all tiles for activations of a dtype and a group size."""
    return tuple(instance(tile, dtype, group_size) for tile in tiles(dtype, group_size))


INSTANCES = tuple(name for dtype in ACTIVATIONS for group_size in GROUPS for name in instances(dtype, group_size))


def takes(n: int, k: int) -> bool:
    """Return whether a weight `[n, k]` is whole tiles of this kernel."""
    return n % COLUMNS == 0 and k % K_STEP == 0


@functools.lru_cache(maxsize=4096)
def choose_tile(m: int, n: int, k: int, sms: int, dtype: torch.dtype, group_size: int | None) -> Tile:
    """Return the tile that a product `[m, k] x [k, n]` is expected to be fastest on; see `hopper.choose`."""
    some = [tile for tile in hopper.holding(tiles(dtype, group_size), m, SEVERAL) if n % tile.columns == 0]
    return hopper.choose(some, m, n, k, sms, lambda tile: reading(tile, n, k), SUSTAINED)


def reading(tile: Tile, n: int, k: int) -> float:
    """Return the microseconds in which a weight is read by a tile's boxes."""
    return n * k * (0.375 + 2 / 128) / BANDWIDTH[tile.columns] / 1e3


def room(tile: Tile, group_size: int | None) -> int:
    """Return the bytes of a stage's codes, metadata and scales."""
    return tile.columns * (K_STEP // 4 + K_STEP // 8 + (2 if group_size else 0))


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
    """Multiply activations `[m, k]` with the tensors of LAYOUTS 5.1; n % 128 == 0, k % 128 == 0; see `marlin24_weight`.

    The product `[m, n]` has the dtype of `x`; `tile` overrides the choice. Sums are float32, in an order that depends
    on the shapes and the device alone. See `workspace` about streams and CUDA graphs. KernelError for what cannot be
    multiplied.
    """
    weight, tensors = marlin24_weight(scheme, n, k, tensors)
    out = check(weight, x, tensors, bias, out)
    same_dtype(weight.layout, x, out)
    if not takes(n, k):
        raise KernelError(f"the marlin24 kernel for Hopper needs n and k to be multiples of 128, and they are {n}, {k}")
    g = scheme.groups(k)
    group_size = scheme.group_size if g > 1 else None  # one group is one scale per row, not permuted (LAYOUTS 5.2)
    tile = tile or choose_tile(x.shape[0], n, k, hopper.multiprocessors(x.device), x.dtype, group_size)
    words, metadata, scales = (tensors[name] for name in weight.tensors)
    rows = K_STEP // 32
    w_map = tensor_map(words, (k // 32, n), (rows, tile.columns), 8)
    m_map = tensor_map(metadata, (k // 32, n // 2), (rows, tile.columns // 2), 8)
    s_map = tensor_map(scales, (g, n), (1, tile.columns), 2) if group_size else w_map
    names, name = instances(x.dtype, group_size), instance(tile, x.dtype, group_size)
    hopper.launch(
        SOURCE,
        names,
        name,
        tile,
        room(tile, group_size),
        x,
        [w_map, m_map, s_map],
        scales,
        [words, metadata],
        bias,
        out,
        sparse=True,
    )
    return out
