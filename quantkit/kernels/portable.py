"""Launches the kernels for sm_80 and newer, which share a frame (kernels/portable.cuh): one source for each layout.

A product is cut into tiles of outputs, and each tile along k into units; every block takes the same number of
consecutive units, so all multiprocessors finish together whatever the shape. Blocks that share a tile leave float32
parts in a workspace, added in order of k by the last of them: results are the same bits in every run on a device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from quantkit.kernels import loader
from quantkit.kernels.contract import ACTIVATIONS, TYPES, Weight, check, same_dtype
from quantkit.kernels.workspace import workspace

THREADS = 256
#: Tokens of one launch: the kernels count units in 32 bits.
TOKENS = 1 << 14
#: Eights of tokens of a warp whose sums are in shared memory at once.
SUMMED = 4
#: Bytes of shared memory that the system takes of each block.
RESERVED = 1024


@dataclass(frozen=True)
class Tile:
    """The numbers of an instance, in the order of the source: eight warps, wn by wm by wk of them along n, m and k.

    A warp has 64 rows of the weight, 8 * `eights` tokens, and 64 of k in each stage. `stages` are in shared memory at a
    time; a multiprocessor has the registers for `blocks` blocks. `cost` is no number of the source, but what it takes
    to multiply with as many tokens as it holds, beside the kernel's other tiles.
    """

    eights: int
    wn: int
    wm: int
    wk: int
    stages: int
    blocks: int
    cost: float

    # Of a tile: rows of the weight, tokens, and k of a unit.
    @property
    def n(self) -> int:
        return 64 * self.wn

    @property
    def m(self) -> int:
        return 8 * self.eights * self.wm

    @property
    def k(self) -> int:
        return 64 * self.wk

    def units(self, m: int, n: int, k: int) -> int:
        """Return in how many units a product is cut."""
        return -(-m // self.m) * -(-n // self.n) * -(-k // self.k)


@dataclass(frozen=True)
class Kernel:
    """The kernels of kernels/`source`.cu for one layout and format, which is the template argument `variant`.

    `stage(n, k)` are the bytes of shared memory for a stage of the weight, the source's `BYTES`. The costs of `tiles`
    are microseconds on an H200 for 28672 x 4096.
    """

    source: str
    tiles: tuple[Tile, ...]
    stage: Callable[[int, int], int]
    variant: str = ""

    def instance(self, dtype: torch.dtype, tile: Tile) -> str:
        """Return the name expression for activations of a dtype."""
        return f"{self.source}<{', '.join(filter(None, (TYPES[dtype], self.variant, *map(str, astuple(tile)[:-1]))))}>"

    @functools.cached_property
    def instances(self) -> tuple[str, ...]:
        return tuple(self.instance(dtype, tile) for dtype in ACTIVATIONS for tile in self.tiles)

    def shared(self, tile: Tile) -> int:
        """Return the bytes of shared memory: the stages, later the sums of some tokens of all warps, padded."""
        stage = self.stage(tile.n, tile.k) + 2 * tile.m * tile.k
        at_once = tile.m * min(tile.eights, SUMMED) // tile.eights
        return max(tile.stages * stage, 4 * tile.wk * at_once * (tile.n + 4))

    def choose_tile(self, m: int) -> Tile:
        """Return the tile for m tokens: the one of which as many as hold them cost least.

        n, k and the device do not matter: units divide well among any number of multiprocessors.
        """
        return min(self.tiles, key=lambda tile: -(-m // tile.m) * tile.cost)

    def workspace_size(self, sms: int) -> tuple[int, int]:
        """Return the float32 sums and int32 counters that a launch may use: of a block two parts of a tile, and one."""
        sums = max(2 * sms * tile.blocks * tile.m * tile.n for tile in self.tiles)
        return sums, sms * max(tile.blocks for tile in self.tiles)


def split(tile: Tile, m: int, n: int, k: int, resident: int) -> tuple[int, int]:
    """Return how many units each block takes, and the number of blocks, at most `resident`."""
    units = tile.units(m, n, k)
    per = -(-units // resident)
    return per, -(-units // per)


def multiply(
    kernel: Kernel,
    weight: Weight,
    x: Tensor,
    tensors: Mapping[str, Tensor],
    bias: Tensor | None,
    out: Tensor | None,
    tile: Tile | None,
    sizes: Sequence[int] = (),
) -> Tensor:
    """Check the operands and launch; returns `[m, n]` in the dtype of `x`, the bias added in float32.

    `tile` overrides the choice; `sizes` are what the kernel wants to know besides m, n and k. KernelError for what
    cannot be multiplied. See `workspace` about streams and CUDA graphs.
    """
    out = check(weight, x, tensors, bias, out)
    same_dtype(weight.layout, x, out)
    parts = [tensors[suffix] for suffix in weight.tensors]
    for start in range(0, x.shape[0], TOKENS):
        _launch(kernel, x[start : start + TOKENS], parts, bias, out[start : start + TOKENS], tile, sizes)
    return out


def _launch(
    kernel: Kernel,
    x: Tensor,
    parts: Sequence[Tensor],
    bias: Tensor | None,
    out: Tensor,
    tile: Tile | None,
    sizes: Sequence[int],
) -> None:
    (m, k), n = x.shape, out.shape[1]
    sms, shared = _multiprocessors(x.device)
    tile = tile or kernel.choose_tile(m)
    resident = sms * min(tile.blocks, shared // (kernel.shared(tile) + RESERVED))
    per, blocks = split(tile, m, n, k, resident)
    sums, arrived = workspace(kernel.source, x.device, *kernel.workspace_size(sms))
    function = loader.load(kernel.source, kernel.instances, x.device).functions[kernel.instance(x.dtype, tile)]
    args = [*parts, x, bias, out, sums, arrived, m, n, k, per, *sizes]
    loader.launch(function, (blocks,), (THREADS,), args, kernel.shared(tile))


@functools.cache
def _multiprocessors(device: torch.device) -> tuple[int, int]:
    """Return the number of multiprocessors, and the bytes of shared memory of each."""
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.shared_memory_per_multiprocessor
