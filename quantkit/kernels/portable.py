"""Launch of the kernels for sm_80 and newer: one source per layout in the frame kernels/portable.cuh.

`portable_tiles` chooses the tile and splits the work. Blocks that share a tile write float32 partial sums to a
workspace, and the last of them adds these in order of k. Runs on one device return the same bits.
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
from quantkit.kernels.portable_tiles import RESERVED, THREADS, PortableTile, PortableTiles, split
from quantkit.kernels.workspace import workspace

#: Most tokens of one launch, because the kernels count units in 32 bits.
MAX_TOKENS = 1 << 14
#: The kernels find the group of an index along k by a multiplication, which is exact below this value of group * k.
GROUP_LIMIT = 1 << 34


@dataclass(frozen=True, eq=False)
class PortableKernel:
    """The kernels of kernels/`source`.cu for one format, which is the template argument `variant`."""

    source: str
    choice: PortableTiles
    variant: str = ""

    def instance(self, dtype: torch.dtype, tile: PortableTile) -> str:
        """Build the C++ name of the instance for activations of a dtype."""
        return f"{self.source}<{', '.join(filter(None, (TYPES[dtype], self.variant, tile.arguments)))}>"

    @functools.cached_property
    def instances(self) -> tuple[str, ...]:
        return tuple(self.instance(dtype, tile) for dtype in ACTIVATIONS for tile in self.choice.tiles)

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
        tile = tile or self.choice.choose(m)
        shared = self.choice.shared_bytes(tile)
        resident = sms * min(tile.blocks, shared_memory // (shared + RESERVED))
        units, blocks = split(tile, m, n, k, resident)
        sums, arrived = workspace(self.source, x.device, *self.choice.workspace_size(sms))
        function = loader.load(self.source, self.instances, x.device).functions[self.instance(x.dtype, tile)]
        arguments = [*packed, x, bias, out, sums, arrived, m, n, k, units, *group]
        loader.launch(function, (blocks,), (THREADS,), arguments, shared)


@functools.cache
def _multiprocessors(device: torch.device) -> tuple[int, int]:
    """Ask for the number of multiprocessors, and the bytes of shared memory of each."""
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.shared_memory_per_multiprocessor
