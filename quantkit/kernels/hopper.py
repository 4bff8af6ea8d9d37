"""The frame of every Hopper kernel (kernels/hopper_matmul.cuh): its tiles, what they are expected to take, the launch.

A weight is cut into tiles of columns by tokens. Either their steps along k are dealt out evenly to as many blocks as
the multiprocessors hold, or each tile is one block's or a cluster's of two. `estimate` says what each would take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from quantkit.kernels import loader
from quantkit.kernels.tensormap import tensor_map
from quantkit.kernels.workspace import workspace

#: As in the source: k in a stage, threads of a warpgroup.
K_STEP, WARPGROUP = 128, 128
#: Microseconds of a launch, TFLOP/s of all multiprocessors together, and how much shows of what runs beside something
#: longer.
LAUNCH, SUSTAINED, HIDDEN = 1.5, 700.0, 0.1

#: Tensors that a launch has read -> their version and address then.
_READ = WeakIdKeyDictionary()


@dataclass(frozen=True)
class Tile:
    """An instance of a kernel but for types and schemes, and what it takes.

    `words` are the products that a warpgroup has side by side, 64 columns each; `warpgroups` take stages in turn or,
    `shared`, all of them; `cluster` is 0 for the dealt grid, 2 for pairs of blocks. `step` and `end` are microseconds
    of a step along k and of what follows the last one; `dealt` is what sharing tiles with other blocks takes.
    """

    tokens: int
    words: int
    warpgroups: int
    stages: int
    shared: bool
    cluster: int
    step: float = 0.0
    end: float = 0.0
    dealt: float = 0.0

    @property
    def columns(self) -> int:
        return 64 * self.words * (self.warpgroups if self.shared else 1)

    @property
    def owners(self) -> int:
        """Warpgroups that end up with sums."""
        return self.warpgroups if self.shared else 1

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor holds."""
        return 2 if self.warpgroups == 1 else 1

    @property
    def sizes(self) -> str:
        """The template arguments that are the tile's, as text, but for `shared` and `cluster`."""
        return f"{self.tokens}, {self.words}, {self.warpgroups}, {self.stages}"

    def bytes(self, room: int) -> int:
        """Return the shared memory of a block whose stages have `room` bytes of weights: stages, sums, rows of y."""
        handed = 0 if self.shared else (self.warpgroups - 1) * WARPGROUP * self.words * self.tokens * 2
        out = 4 * self.owners * (16 if self.words == 1 and self.tokens > 8 else 8) * self.words * 32
        return 1024 + self.stages * (self.tokens * 2 * K_STEP + room + 16) + handed + out


def blocks(tile: Tile, m: int, n: int, k: int, sms: int) -> int:
    """Return how many blocks are launched: those of whole tiles or clusters, or as many as fit to deal to.

    Dealing costs the sharing of sums; without it the last round of blocks leaves multiprocessors idle. Fewer tiles than
    would fill the multiprocessors are dealt unless a block's share would be as long as a tile.
    """
    whole = ceil(m, tile.tokens) * ceil(n, tile.columns)
    if tile.cluster:
        return whole * tile.cluster
    steps, room = whole * ceil(k, K_STEP), sms * tile.resident
    if whole < room:
        return whole if ceil(steps, room) == ceil(k, K_STEP) else min(room, steps)
    return room if _dealt(tile, steps, room) < _whole(tile, whole, k, room) else whole


def estimate(tile: Tile, m: int, n: int, k: int, sms: int, reading: float, sustained: float = SUSTAINED) -> float:
    """Return the microseconds expected of a product on `sms` multiprocessors; reading its weight takes `reading`."""
    whole, room = ceil(m, tile.tokens) * ceil(n, tile.columns), sms * tile.resident
    if tile.cluster or blocks(tile, m, n, k, sms) == whole:
        compute = _whole(tile, whole, k, room)
    else:
        compute = _dealt(tile, whole * ceil(k, K_STEP), room)
    products = 2 * whole * tile.tokens * tile.columns * k / sustained / 1e6
    bound = max(reading, products)
    return LAUNCH + max(compute, bound) + HIDDEN * min(compute, bound)


def holding(tiles: Sequence[Tile], m: int) -> list[Tile]:
    """Return the tiles of the fewest tokens that hold all m, above 128 also those of 128."""
    least = min((tile.tokens for tile in tiles if tile.tokens >= m), default=max(tile.tokens for tile in tiles))
    return [tile for tile in tiles if tile.tokens == least or 128 <= tile.tokens < m]


def choose(
    tiles: Iterable[Tile],
    m: int,
    n: int,
    k: int,
    sms: int,
    reading: Callable[[Tile], float],
    sustained: float = SUSTAINED,
) -> Tile:
    """Return the tile of least estimate for a product `[m, k] x [k, n]`, whose weight a tile reads in `reading` of it.

    Clusters only where k has a step for each.
    """
    fit = [tile for tile in tiles if tile.cluster <= ceil(k, K_STEP)]
    return min(fit, key=lambda tile: estimate(tile, m, n, k, sms, reading(tile), sustained))


def launch(
    source: str,
    instances: Sequence[str],
    instance: str,
    tile: Tile,
    room: int,
    x: Tensor,
    maps: Sequence[Any],
    scales: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """Launch an instance, one of `instances` that are compiled together, on activations `[m, k]`.

    `maps` are those of its weight, `weights` the tensors behind them, `room` the bytes of a stage's weights. A weight
    that was read before may be fetched while the launch in front of this one still runs, since nothing that came before
    in the stream can still be writing it.
    """
    (m, k), n = x.shape, out.shape[1]
    sms = multiprocessors(x.device)
    sums, counters = workspace(source, x.device, 2 * sms * 256 * 128, 4 * sms)
    x_map = tensor_map(x, (m, k), (tile.tokens, 64), 2, swizzled=True)
    together = instances if instance in instances else (instance,)  # a tile that is only tried
    function = loader.load(source, together, x.device).functions[instance]
    args = [x_map, *maps, scales, bias, out, sums, counters, m, n, k]
    early = _read_before([*weights, scales] if bias is None else [*weights, scales, bias])
    grid = blocks(tile, m, n, k, sms)
    loader.launch(function, (grid,), (WARPGROUP * (tile.warpgroups + 1),), args, tile.bytes(room), early=early)


def ceil(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _read_before(tensors: Sequence[Tensor]) -> bool:
    """Return whether a launch has read these very tensors, and torch has written to none of them since.

    A write in place is counted in the version; `.data = ` and `module.to` are not, but change the address.
    """
    found = [None if tensor.is_inference() else (tensor._version, tensor.data_ptr()) for tensor in tensors]
    known = all(now is not None and _READ.get(t) == now for t, now in zip(tensors, found, strict=True))
    for tensor, now in zip(tensors, found, strict=True):
        _READ[tensor] = now
    return known


def _whole(tile: Tile, whole: int, k: int, room: int) -> float:
    """The microseconds of rounds of blocks, each with its share of a tile."""
    parts = max(1, tile.cluster)
    return ceil(whole * parts, room) * (ceil(ceil(k, K_STEP), parts) * tile.step + tile.end)


def _dealt(tile: Tile, steps: int, room: int) -> float:
    return ceil(steps, min(room, steps)) * tile.step + tile.end + tile.dealt
