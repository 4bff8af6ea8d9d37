"""The frame of every Hopper kernel (kernels/hopper_matmul.cuh): its tiles, what they are expected to take, the launch.

A weight is cut into tiles of columns by tokens. As many blocks as the multiprocessors hold take whole tiles in rounds,
and even shares of the steps along k of the tiles that are left; or each tile is a cluster's, of two to eight blocks.
`estimate` says what each would take.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quantkit.errors import KernelError
from quantkit.kernels import loader
from quantkit.kernels.tensormap import tensor_map
from quantkit.kernels.workspace import workspace

#: As in the source: k in a stage, threads of a warpgroup, blocks of the largest cluster.
K_STEP, WARPGROUP, MANY = 128, 128, 8
#: Microseconds of a launch, TFLOP/s of all multiprocessors together, and how much shows of what runs beside something
#: longer.
LAUNCH, SUSTAINED, HIDDEN = 1.5, 700.0, 0.1

#: Of the room for blocks what clusters of three to eight can have, since each lies in one part of the device: of 264
#: blocks on an H200 the driver says 224 (clusters of seven) to 248 (of four).
CLUSTERED = 0.84

#: Number of a tensor that a launch has read -> the tensor, its version and address then.
_READ: dict[int, tuple[weakref.ref[Tensor], tuple[int, int]]] = {}


@dataclass(frozen=True)
class Tile:
    """An instance of a kernel but for types and schemes, and what it takes.

    `words` are the products that a warpgroup has side by side, 64 columns each; `warpgroups` take stages in turn or,
    `shared`, all of them. `cluster` is 0 for the dealt grid, else the blocks that share a tile; in a list of tiles MANY
    stands for as many as there is room for (`fitting`). `step` and `end` are microseconds of a step along k and of what
    follows the last one; `dealt` is what sharing tiles with other blocks takes.
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
    def summed_twice(self) -> bool:
        """Whether threads have registers for the sums of a group beside those of all groups."""
        return self.words * self.tokens <= 128

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor holds."""
        return 2 if self.warpgroups == 1 else 1

    @property
    def sizes(self) -> str:
        """The template arguments that are the tile's, as text, but for those of `sharing`."""
        return f"{self.tokens}, {self.words}, {self.warpgroups}, {self.stages}"

    @property
    def sharing(self) -> str:
        """The template arguments `shared` and `cluster`, as text: one instance does for all large clusters."""
        return f"{str(self.shared).lower()}, {MANY if self.cluster > 2 else self.cluster}"

    def bytes(self, room: int, sparse: bool) -> int:
        """Return the shared memory of a block whose stages have `room` bytes of weights: stages, sums, rows of y."""
        sums = self.words * self.tokens // 2
        handed = 0 if self.shared else (self.warpgroups - 1) * WARPGROUP * self.words * self.tokens * 2
        out = 4 * self.owners * (16 if self.words == 1 and self.tokens > 8 else 8) * self.words * 32
        unit = 2 * self.words if sparse else 4 if sums >= 32 else 2
        few = self.cluster > 0 and sums * self.owners <= 32
        places = max(MANY if self.cluster > 2 else 2, 2 * sums // unit)
        apart = 512 * self.owners * unit * places if few else 0
        return 1024 + self.stages * (self.tokens * 2 * K_STEP + room + 16) + handed + out + apart + 16


def blocks(tile: Tile, m: int, n: int, k: int, sms: int) -> int:
    """Return how many blocks are launched: clusters, or as many as there are tiles or room for.

    Fewer tiles than would fill the multiprocessors are dealt out unless a block's share would be as long as a tile.
    """
    whole = ceil(m, tile.tokens) * ceil(n, tile.columns)
    if tile.cluster:
        return whole * tile.cluster
    most = min(sms * tile.resident, whole * ceil(k, K_STEP))
    return most if whole >= most else min(whole, most, key=lambda grid: _in_rounds(tile, whole, k, grid))


def estimate(tile: Tile, m: int, n: int, k: int, sms: int, reading: float, sustained: float = SUSTAINED) -> float:
    """Return the microseconds expected of a product on `sms` multiprocessors; reading its weight takes `reading`."""
    whole = ceil(m, tile.tokens) * ceil(n, tile.columns)
    if tile.cluster:
        rounds = ceil(whole * tile.cluster, sms * tile.resident)
        compute = rounds * (ceil(ceil(k, K_STEP), tile.cluster) * tile.step + tile.end)
    else:
        compute = _in_rounds(tile, whole, k, blocks(tile, m, n, k, sms))
    products = 2 * whole * tile.tokens * tile.columns * k / sustained / 1e6
    bound = max(reading, products)
    return LAUNCH + max(compute, bound) + HIDDEN * min(compute, bound)


def holding(tiles: Sequence[Tile], m: int, several: int) -> list[Tile]:
    """Return the tiles of the fewest tokens that hold all m, and those of `several` or more of which m takes some."""
    least = min((tile.tokens for tile in tiles if tile.tokens >= m), default=max(tile.tokens for tile in tiles))
    return [tile for tile in tiles if tile.tokens == least or several <= tile.tokens < m]


def fitting(tiles: Iterable[Tile], m: int, n: int, k: int, sms: int) -> list[Tile]:
    """Return the tiles that a product `[m, k] x [k, n]` may be launched on, clusters in the size that they have for it.

    Each block of a cluster has a step along k, and of large clusters there are no more than are resident at once:
    others would wait for these to end, which about doubles the time.
    """
    fit, steps = [], ceil(k, K_STEP)
    for tile in tiles:
        if tile.cluster == MANY:
            room = CLUSTERED * sms * tile.resident / (ceil(m, tile.tokens) * ceil(n, tile.columns))
            tile = replace(tile, cluster=min(MANY, steps, int(room)))
            if tile.cluster < 3:
                continue
        if tile.cluster <= steps:
            fit.append(tile)
    return fit


def choose(
    tiles: Iterable[Tile],
    m: int,
    n: int,
    k: int,
    sms: int,
    reading: Callable[[Tile], float],
    sustained: float = SUSTAINED,
) -> Tile:
    """Return the `fitting` tile of least estimate for a product `[m, k] x [k, n]`.

    A tile reads its weight in `reading(tile)` microseconds.
    """
    return min(fitting(tiles, m, n, k, sms), key=lambda tile: estimate(tile, m, n, k, sms, reading(tile), sustained))


def launch(
    source: str,
    instances: Sequence[str],
    instance: str,
    tile: Tile,
    room: int,
    x: Tensor,
    maps: Sequence[bytes],
    scales: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    out: Tensor,
    sparse: bool = False,
) -> None:
    """Launch an instance, one of `instances` that are compiled together, on activations `[m, k]`.

    `maps` are those of its weight, `weights` the tensors behind them, `room` the bytes of a stage's weights. A weight
    that was read before may be fetched while the launch in front of this one still runs, since nothing that came before
    in the stream can still be writing it. `sparse`: of each four along k, two are stored.
    """
    (m, k), n = x.shape, out.shape[1]
    sms = multiprocessors(x.device)
    sums, counters = workspace(source, x.device, 2 * sms * 256 * 128, 4 * sms)
    x_map = tensor_map(x, (m, k), (tile.tokens, 64), 2, swizzled=True)
    together = instances if instance in instances else (instance,)  # a tile that is only tried
    function = loader.load(source, together, x.device).functions[instance]
    args = [x_map, *maps, scales, bias, out, sums, counters, m, n, k]
    read = [*weights, scales] if bias is None else [*weights, scales, bias]
    grid, threads, shared = _sizes(tile, m, n, k, sms, room, sparse)
    at = loader.launch(function, grid, threads, args, shared, cluster=tile.cluster, early=_read_before(read))
    if not at.graph:  # what is captured has not read anything yet
        _remember(read)


@functools.lru_cache(maxsize=4096)
def _sizes(
    tile: Tile, m: int, n: int, k: int, sms: int, room: int, sparse: bool
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the grid, the threads of a block, and its bytes of shared memory.

    KernelError for a cluster with a block that would have no step: it ends while its neighbours still write to it.
    """
    if tile.cluster > ceil(k, K_STEP):
        raise KernelError(
            f"a cluster of {tile.cluster} blocks has no {K_STEP} of k for each where k = {k}: use a tile of `fitting`"
        )
    return (blocks(tile, m, n, k, sms),), (WARPGROUP * (tile.warpgroups + 1),), tile.bytes(room, sparse)


def ceil(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _read_before(tensors: Sequence[Tensor]) -> bool:
    """Return whether a launch has read these very tensors, and torch has written to none of them since.

    A write in place is counted in the version; `.data = ` and `module.to` are not, but change the address. What is
    written through `.data` itself is not seen (docs/kernels.md).
    """
    for tensor in tensors:
        before = _READ.get(id(tensor))
        if before is None or before[0]() is not tensor or before[1] != _state(tensor):
            return False
    return True


def _remember(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        before, state = _READ.get(id(tensor)), _state(tensor)
        if state is not None and (before is None or before[0]() is not tensor or before[1] != state):
            _READ[id(tensor)] = weakref.ref(tensor, partial(_gone, id(tensor))), state


def _state(tensor: Tensor) -> tuple[int, int] | None:
    """Return what changes when torch writes to a tensor; None for tensors whose writes it does not count."""
    return None if tensor.is_inference() else (tensor._version, tensor.data_ptr())


def _gone(name: int, dead: object) -> None:
    if name in _READ and _READ[name][0] is dead:  # else it is another tensor's already
        del _READ[name]


def _in_rounds(tile: Tile, whole: int, k: int, grid: int) -> float:
    """The microseconds of as many whole tiles for every block, and then of even shares of the steps that are left."""
    steps = ceil(k, K_STEP)
    rounds, left = divmod(whole, grid)
    share = ceil(left * steps, grid) * tile.step + tile.end + tile.dealt if left else 0.0
    return rounds * (steps * tile.step + tile.end) + share
