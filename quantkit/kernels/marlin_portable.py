"""Launches the dense MARLIN kernel for sm_80 and newer, kernels/marlin_portable.cu.

A product is cut into tiles of outputs, and each tile along k into units; every block takes the same number of
consecutive units, so all multiprocessors finish together whatever the shape. Blocks that share a tile leave float32
parts in a workspace, added in order of k by the last of them: results are the same bits in every run on a device.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from quantkit.kernels import loader
from quantkit.kernels.contract import ACTIVATIONS, TYPES, check
from quantkit.kernels.marlin_weight import marlin_weight, same_dtype
from quantkit.kernels.workspace import workspace
from quantkit.tensor import Scheme

THREADS = 256
#: Tokens of one launch: the kernel counts units in 32 bits.
TOKENS = 1 << 14
#: Bytes of shared memory that the system takes of each block.
RESERVED = 1024


@dataclass(frozen=True)
class Tile:
    """The numbers of an instance, in the order of the source: eight warps, wn by wm by wk of them along n, m and k.

    A warp has 64 rows of the weight, 8 * `eights` tokens, and 64 of k in each stage. `stages` are in shared memory at a
    time; a multiprocessor has the registers for `blocks` blocks.
    """

    eights: int
    wn: int
    wm: int
    wk: int
    stages: int
    blocks: int

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

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the stages (codes, activations, scales), later the sums of all warps, padded."""
        stage = self.n * self.k // 2 + 2 * self.m * self.k + self.k // 32 * self.n * 2
        return max(self.stages * stage, 4 * self.wk * self.m * (self.n + 4))

    def units(self, m: int, n: int, k: int) -> int:
        """Return in how many units a product is cut."""
        return -(-m // self.m) * -(-n // self.n) * -(-k // self.k)


#: By the tokens that they hold. Few tokens are spread along k, so that there is work for all multiprocessors.
TILES = (
    Tile(eights=1, wn=2, wm=1, wk=4, stages=3, blocks=2),
    Tile(eights=2, wn=4, wm=1, wk=2, stages=3, blocks=2),
    Tile(eights=4, wn=4, wm=1, wk=2, stages=3, blocks=1),
    Tile(eights=4, wn=4, wm=2, wk=1, stages=4, blocks=1),
)


def _instance(dtype: torch.dtype, tile: Tile) -> str:
    return f"marlin_portable<{', '.join(map(str, (TYPES[dtype], *astuple(tile))))}>"


INSTANCES = tuple(_instance(dtype, tile) for dtype in ACTIVATIONS for tile in TILES)


def choose_tile(m: int, n: int, k: int, sms: int) -> Tile:
    """Return the tile for a product of `[m, k]` and `[n, k]` on `sms` multiprocessors: the least that holds all of m.

    n, k and sms do not matter so far: units divide well among any number of multiprocessors.
    """
    return next((tile for tile in TILES if m <= tile.m), TILES[-1])


def split(tile: Tile, m: int, n: int, k: int, resident: int) -> tuple[int, int]:
    """Return how many units each block takes, and the number of blocks, at most `resident`."""
    units = tile.units(m, n, k)
    per = -(-units // resident)
    return per, -(-units // per)


def workspace_size(sms: int) -> tuple[int, int]:
    """Return how many float32 sums and int32 counters a launch may use: two parts of a tile and one counter a block."""
    return max(2 * sms * tile.blocks * tile.m * tile.n for tile in TILES), sms * max(tile.blocks for tile in TILES)


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
    """Multiply activations `[m, k]` with `B` and `s` (LAYOUTS 3.1, 3.6); n % 64 == 0, k % 16 == 0.

    The product `[m, n]` is in the dtype of `x`, the bias is added in float32; `tile` of TILES overrides the choice.
    KernelError for what cannot be multiplied. See `workspace` about streams and CUDA graphs.
    """
    weight = marlin_weight(scheme, n, k)
    out = check(weight, x, tensors, bias, out)
    same_dtype(x, out)
    group = k // scheme.groups(k)
    for start in range(0, x.shape[0], TOKENS):
        _launch(x[start : start + TOKENS], tensors, group, bias, out[start : start + TOKENS], tile)
    return out


def _launch(
    x: Tensor, tensors: Mapping[str, Tensor], group: int, bias: Tensor | None, out: Tensor, tile: Tile | None
) -> None:
    (m, k), n = x.shape, out.shape[1]
    sms, shared = _multiprocessors(x.device)
    tile = tile or choose_tile(m, n, k, sms)
    resident = sms * min(tile.blocks, shared // (tile.shared + RESERVED))
    per, blocks = split(tile, m, n, k, resident)
    sums, arrived = workspace("marlin_portable", x.device, *workspace_size(sms))
    kernel = loader.load("marlin_portable", INSTANCES, x.device).functions[_instance(x.dtype, tile)]
    args = [tensors["B"], tensors["s"], x, bias, out, sums, arrived, m, n, k, group, per]
    loader.launch(kernel, (blocks,), (THREADS,), args, tile.shared)


@functools.cache
def _multiprocessors(device: torch.device) -> tuple[int, int]:
    """Return the number of multiprocessors, and the bytes of shared memory of each."""
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.shared_memory_per_multiprocessor
