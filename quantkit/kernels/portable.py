"""Launch of the kernels for sm_80 and newer: one source per layout in the frame kernels/portable.cuh.

A product is cut into tiles of outputs, and each tile along k into units. Every block takes the same number of
consecutive units, so all multiprocessors finish together, whatever the shape. Blocks that share a tile write float32
partial sums to a workspace, and the last of them adds these in order of k. Runs on one device return the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import KernelError
from quantkit.kernels import loader
from quantkit.kernels.contract import ACTIVATIONS, TYPES, Weight, check, check_same_dtype
from quantkit.kernels.workspace import workspace

THREADS = 256
#: Most tokens of one launch, because the kernels count units in 32 bits.
MAX_TOKENS = 1 << 14
#: Fragments of a warp whose sums are in shared memory at the same time.
FRAGMENTS_AT_ONCE = 4
#: Bytes of shared memory that CUDA reserves in each block.
RESERVED = 1024
#: The kernels find the group of an index along k by a multiplication, which is exact below this value of group * k.
GROUP_LIMIT = 1 << 34


@dataclass(frozen=True)
class PortableTile:
    """The template arguments of an instance: eight warps, `wn` by `wm` by `wk` of them along n, m and k.

    A warp multiplies 64 rows of the weight by `fragments` of 8 tokens each, and 64 of k in each stage. `stages` are in
    shared memory at a time, and a multiprocessor has the registers for `blocks` blocks. `cost` is measured, in
    microseconds, with as many tokens as the tile holds.
    """

    fragments: int
    wn: int
    wm: int
    wk: int
    stages: int
    blocks: int
    cost: float

    @property
    def n(self) -> int:
        """Rows of the weight in a tile."""
        return 64 * self.wn

    @property
    def m(self) -> int:
        """Tokens of a tile."""
        return 8 * self.fragments * self.wm

    @property
    def k(self) -> int:
        """Weights along k in a unit."""
        return 64 * self.wk

    @property
    def arguments(self) -> str:
        """The template arguments as text."""
        return f"{self.fragments}, {self.wn}, {self.wm}, {self.wk}, {self.stages}, {self.blocks}"

    def units(self, m: int, n: int, k: int) -> int:
        """Count the units of a product."""
        return -(-m // self.m) * -(-n // self.n) * -(-k // self.k)


@dataclass(frozen=True, eq=False)
class PortableKernel:
    """The kernels of kernels/`source`.cu for one format, which is the template argument `variant`.

    A stage takes `bytes_per_weight` of shared memory for each weight, scales included: `BYTES` in the source.
    """

    source: str
    tiles: tuple[PortableTile, ...]
    bytes_per_weight: float
    variant: str = ""

    def instance(self, dtype: torch.dtype, tile: PortableTile) -> str:
        """Build the C++ name of the instance for activations of a dtype."""
        return f"{self.source}<{', '.join(filter(None, (TYPES[dtype], self.variant, tile.arguments)))}>"

    @functools.cached_property
    def instances(self) -> tuple[str, ...]:
        return tuple(self.instance(dtype, tile) for dtype in ACTIVATIONS for tile in self.tiles)

    def shared_bytes(self, tile: PortableTile) -> int:
        """Compute the shared memory of a block: the stages, reused later for padded sums of some tokens."""
        stage = int(tile.n * tile.k * self.bytes_per_weight) + 2 * tile.m * tile.k
        tokens = tile.m * min(tile.fragments, FRAGMENTS_AT_ONCE) // tile.fragments
        return max(tile.stages * stage, 4 * tile.wk * tokens * (tile.n + 4))

    def choose_tile(self, m: int) -> PortableTile:
        """Choose the tile that costs least for m tokens.

        n, k and the device do not matter, because units divide well among any number of multiprocessors.
        """
        return min(self.tiles, key=lambda tile: -(-m // tile.m) * tile.cost)

    def workspace_size(self, sms: int) -> tuple[int, int]:
        """Count the float32 sums and int32 counters of a launch: per block parts of two tiles, and one counter."""
        sums = max(2 * sms * tile.blocks * tile.m * tile.n for tile in self.tiles)
        return sums, sms * max(tile.blocks for tile in self.tiles)

    def multiply(
        self,
        weight: Weight,
        x: Tensor,
        tensors: Mapping[str, Tensor],
        bias: Tensor | None,
        out: Tensor | None,
        tile: PortableTile | None = None,
    ) -> Tensor:
        """Check the operands and launch; returns `[m, n]` in the dtype of `x`, the bias added in float32.

        `tile` overrides the choice. KernelError for operands that cannot be multiplied. `workspace` explains the limits
        on streams and CUDA graphs.
        """
        group, k = weight.group, weight.k
        if group is not None and group < k and group * k >= GROUP_LIMIT:
            raise KernelError(
                f"the {weight.layout} kernel takes groups of fewer than {GROUP_LIMIT // k} for k = {k}, not {group}"
            )
        out = check(weight, x, tensors, bias, out)
        check_same_dtype(weight.layout, x, out)
        packed = [tensors[suffix] for suffix in weight.tensors]
        for start in range(0, x.shape[0], MAX_TOKENS):
            rows = slice(start, start + MAX_TOKENS)
            self._launch(x[rows], packed, bias, out[rows], tile, weight.group_argument)
        return out

    def _launch(
        self,
        x: Tensor,
        packed: Sequence[Tensor],
        bias: Tensor | None,
        out: Tensor,
        tile: PortableTile | None,
        group: Sequence[int],
    ) -> None:
        (m, k), n = x.shape, out.shape[1]
        sms, shared_memory = _multiprocessors(x.device)
        tile = tile or self.choose_tile(m)
        shared = self.shared_bytes(tile)
        resident = sms * min(tile.blocks, shared_memory // (shared + RESERVED))
        units, blocks = split(tile, m, n, k, resident)
        sums, arrived = workspace(self.source, x.device, *self.workspace_size(sms))
        function = loader.load(self.source, self.instances, x.device).functions[self.instance(x.dtype, tile)]
        arguments = [*packed, x, bias, out, sums, arrived, m, n, k, units, *group]
        loader.launch(function, (blocks,), (THREADS,), arguments, shared)


def split(tile: PortableTile, m: int, n: int, k: int, resident: int) -> tuple[int, int]:
    """Compute the units of each block, and the number of blocks, at most `resident`."""
    units = tile.units(m, n, k)
    per_block = -(-units // resident)
    return per_block, -(-units // per_block)


@functools.cache
def _multiprocessors(device: torch.device) -> tuple[int, int]:
    """Ask for the number of multiprocessors, and the bytes of shared memory of each."""
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.shared_memory_per_multiprocessor
