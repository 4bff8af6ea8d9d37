"""Launches MARLIN's kernel for Hopper, kernels/marlin_hopper.cu, on the tile that a model of the device finds best.

A weight is cut into tiles of columns by tokens. Either their steps along k are dealt out evenly to as many blocks as
there are multiprocessors, or each tile is one block's or a cluster's of two. `estimate` says what each would take; its
figures were fitted to a sweep of nine layer shapes and eight token counts on an H200
(benchmarks/h200/marlin_tiles.csv).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.kernels import loader
from quantkit.kernels.contract import TYPES, check
from quantkit.kernels.marlin_weight import GROUPS, marlin_weight, same_dtype
from quantkit.kernels.tensormap import tensor_map
from quantkit.kernels.workspace import workspace
from quantkit.tensor import Scheme

SOURCE = "marlin_hopper"
#: As in the source: k in a stage, threads of a warpgroup.
K_STEP, WARPGROUP = 128, 128
#: Columns of a tile -> GB/s that weights are read with; and the microseconds of a launch.
BANDWIDTH = {256: 3800.0, 128: 3200.0, 64: 2600.0}
LAUNCH = 2.5


@dataclass(frozen=True)
class Tile:
    """An instance of the kernel but for types and groups, and what it takes.

    `words` of a lane's four are a warpgroup's, `warpgroups` take stages in turn or, `shared`, all of them; `cluster` is
    0 for the dealt grid, 2 for pairs of blocks. `step` and `end` are microseconds of a step along k and of what follows
    the last one; `dealt` is what sharing tiles with other blocks takes.
    """

    tokens: int
    words: int
    warpgroups: int
    stages: int
    shared: bool
    cluster: int
    step: float
    end: float
    dealt: float = 0.0

    @property
    def columns(self) -> int:
        return 64 * self.words * (self.warpgroups if self.shared else 1)

    def bytes(self, group_size: int | None) -> int:
        """Return the shared memory of a block: stages, sums handed over, barriers and flags."""
        scales = 0 if group_size is None else _ceil(K_STEP // group_size * self.columns * 2, 128) * 128
        stage = self.tokens * 2 * K_STEP + self.columns * K_STEP // 2 + scales
        handed = 0 if self.shared else (self.warpgroups - 1) * WARPGROUP * self.words * self.tokens * 2
        return 1024 + self.stages * (stage + 16) + handed + 4 * self.warpgroups


#: Fewest tokens first. Of equals the first is taken.
TILES = (
    Tile(8, 2, 4, 8, False, 2, 0.33, 2.0),
    Tile(8, 2, 4, 8, False, 0, 0.35, 0.5, 3.0),
    Tile(8, 4, 2, 8, False, 0, 0.57, 0.5, 5.5),
    Tile(8, 1, 4, 8, False, 2, 0.26, 2.0),
    Tile(8, 1, 4, 8, False, 0, 0.26, 1.0, 3.0),
    Tile(16, 2, 2, 8, False, 2, 0.35, 2.0),
    Tile(16, 2, 2, 8, False, 0, 0.35, 1.0, 4.5),
    Tile(16, 1, 4, 8, False, 2, 0.26, 2.0),
    Tile(16, 4, 2, 8, False, 0, 0.65, 1.0, 6.5),
    Tile(32, 2, 2, 8, False, 2, 0.43, 2.0),
    Tile(32, 2, 2, 8, False, 0, 0.42, 1.5, 4.5),
    Tile(32, 1, 4, 8, False, 2, 0.30, 2.0),
    Tile(32, 4, 2, 6, False, 0, 0.80, 2.0, 7.0),
    Tile(64, 2, 2, 6, False, 2, 0.57, 3.0),
    Tile(64, 2, 2, 6, False, 0, 0.59, 0.5, 6.0),
    Tile(64, 2, 2, 5, True, 0, 1.02, 0.5, 9.0),
    Tile(128, 1, 2, 5, True, 2, 0.92, 2.0),
    Tile(128, 1, 2, 5, True, 0, 0.90, 0.0, 6.5),
    Tile(128, 2, 2, 4, True, 0, 1.60, 2.0, 14.0),
    Tile(256, 1, 2, 3, True, 2, 1.50, 6.0),
    Tile(256, 1, 2, 3, True, 0, 1.60, 3.0, 11.0),
)
#: Enough for groups that MARLIN checkpoints do not have.
FEW = tuple(tile for tile in TILES if tile.words == 2 and tile.tokens < 128 and not tile.cluster and not tile.shared)


def tiles(dtype: torch.dtype, group_size: int | None) -> tuple[Tile, ...]:
    """Return the tiles that exist for activations of a dtype and a group size."""
    some = TILES if group_size in (128, None) else FEW
    # Where warpgroups share a stage, float16 scales go into the weights, and bfloat16 weights cannot take them.
    return tuple(t for t in some if dtype == torch.float16 or group_size is None or not t.shared)


def instance(tile: Tile, dtype: torch.dtype, group_size: int | None) -> str:
    """Return the name expression of a tile's kernel."""
    sizes = f"{tile.tokens}, {tile.words}, {tile.warpgroups}, {tile.stages}, {group_size or 0}"
    return f"{SOURCE}<{TYPES[dtype]}, {sizes}, {str(tile.shared).lower()}, {tile.cluster}>"


INSTANCES = tuple(
    instance(tile, dtype, group_size)
    for dtype in (torch.float16, torch.bfloat16)
    for group_size in GROUPS
    for tile in tiles(dtype, group_size)
)


def blocks(tile: Tile, m: int, n: int, k: int, sms: int) -> int:
    """Return how many blocks are launched: those of whole tiles or clusters, or one a multiprocessor to deal to.

    Dealing costs the sharing of sums; without it the last round of blocks leaves multiprocessors idle.
    """
    whole = _ceil(m, tile.tokens) * _ceil(n, tile.columns)
    if tile.cluster:
        return whole * tile.cluster
    steps = whole * _ceil(k, K_STEP)
    return whole if _whole(tile, whole, k, sms) <= _dealt(tile, steps, sms) else min(sms, steps)


def estimate(tile: Tile, m: int, n: int, k: int, sms: int) -> float:
    """Return the microseconds that a product is expected to take with a tile on `sms` multiprocessors."""
    whole = _ceil(m, tile.tokens) * _ceil(n, tile.columns)
    compute = _whole(tile, whole, k, sms)
    if not tile.cluster:
        compute = min(compute, _dealt(tile, whole * _ceil(k, K_STEP), sms))
    return LAUNCH + max(compute, n * k * (0.5 + 2 / 128) / BANDWIDTH[tile.columns] / 1e3)


@functools.lru_cache(maxsize=4096)
def choose_tile(m: int, n: int, k: int, sms: int, dtype: torch.dtype, group_size: int | None) -> Tile:
    """Return the tile of least estimate for a product `[m, k] x [k, n]`; clusters only where k has a step for each."""
    steps = _ceil(k, K_STEP)
    fit = [tile for tile in tiles(dtype, group_size) if tile.cluster <= steps]
    return min(fit, key=lambda tile: estimate(tile, m, n, k, sms))


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
    same_dtype(x, out)
    g = scheme.groups(k)
    # One group is one scale per column, permuted as such (LAYOUTS 3.3).
    group_size = scheme.group_size if g > 1 else None
    m, sms = x.shape[0], _multiprocessors(x.device)
    tile = tile or choose_tile(m, n, k, sms, x.dtype, group_size)
    grid = blocks(tile, m, n, k, sms)
    room = 2 * sms * max(t.tokens * t.columns for t in TILES), sms * max(t.warpgroups for t in TILES)
    sums, counters = workspace(SOURCE, x.device, *room)
    x_map = tensor_map(x, (m, k), (tile.tokens, 64), 2, swizzled=True)
    w_map = tensor_map(tensors["B"], (k // 16, n), (K_STEP // 16, tile.columns), 8)
    s_map = tensor_map(tensors["s"], (g, n), (K_STEP // group_size, tile.columns), 2) if group_size else w_map
    name = instance(tile, x.dtype, group_size)
    function = loader.load(SOURCE, (name,), x.device).functions[name]
    args = [x_map, w_map, s_map, tensors["s"], bias, out, sums, counters, m, n, k]
    loader.launch(function, (grid,), (WARPGROUP * (tile.warpgroups + 1),), args, tile.bytes(group_size))
    return out


def _whole(tile: Tile, whole: int, k: int, sms: int) -> float:
    """The microseconds of rounds of blocks, each with its share of a tile."""
    parts = max(1, tile.cluster)
    return _ceil(whole * parts, sms) * (_ceil(_ceil(k, K_STEP), parts) * tile.step + tile.end)


def _dealt(tile: Tile, steps: int, sms: int) -> float:
    return _ceil(steps, min(sms, steps)) * tile.step + tile.end + tile.dealt


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
