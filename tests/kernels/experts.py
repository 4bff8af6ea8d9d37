"""Mixtures of experts for tests of the grouped kernels: packed weights, routes, and references."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.core.quantized_tensor import Scheme
from quantkit.kernels import proof
from quantkit.kernels.grouped import GroupedKernel
from quantkit.kernels.routing import Routing
from tests.kernels.operands import packed, weight

#: layout -> scheme -> widths of the experts `[n, k]`; not all fill a tile.
TAKEN = {
    "marlin": {
        "int4:g128": [(192, 384), (256, 1152)],
        "int4:channel": [(64, 208), (320, 448), (320, 384)],
        "int4:g64": [(256, 640)],
        "int4:g32": [(320, 448)],
    },
    "marlin24": {"int4:g128:24": [(192, 384)], "int4:channel:24": [(64, 640)]},
    "quick": {"int4:g128:asym": [(128, 384)], "int4:g32:asym": [(256, 96), (128, 32)]},
    "tcfpx": {
        "fp6:channel": [(192, 384), (256, 1152)],
        "fp5:channel": [(320, 448), (256, 384)],
        "fp6-e2m3:channel": [(64, 64)],
        "fp5-e2m2:channel": [(192, 192)],
    },
}
CASES = [
    (layout, label, *size) for layout, labels in TAKEN.items() for label, sizes in labels.items() for size in sizes
]
#: The first scheme and shape of each layout.
FIRST = [(layout, label, *sizes[0]) for layout, labels in TAKEN.items() for label, sizes in list(labels.items())[:1]]


@dataclass(frozen=True)
class Experts:
    """Weights `[n, k]` of some experts: stacked packed tensors, and float32 `[experts, n, k]`."""

    kernel: GroupedKernel
    tensors: tuple[Tensor, ...]
    dense: Tensor

    def product(self, x: Tensor, ids: Tensor, gather: bool, weights: Tensor | None) -> Tensor:
        """Multiply in float32: `[rows, n]`, zeros for rows without an expert."""
        rows, topk = ids.reshape(-1), ids.shape[1]
        y = torch.zeros(len(rows), self.dense.shape[1], device=x.device)
        for expert in range(len(self.dense)):
            own = (rows == expert).nonzero()[:, 0]
            if len(own):
                y[own] = proof.reference(x[own // topk if gather else own], self.dense[expert])
        return y if weights is None else y * weights.reshape(-1, 1)


@functools.lru_cache(maxsize=32)
def experts(
    layout: str, label: str, n: int, k: int, count: int, device: str = "cpu", portable: bool = False
) -> Experts:
    """Make some experts with different weights. Tests must not change them."""
    records = [weight(label, n, k, seed) for seed in range(count)]
    parts = [packed(layout, record) for record in records]
    where = torch.device("cuda", 0) if device == "cuda" and not portable else None
    kernel = GroupedKernel.of(layout, Scheme.parse(label), count, n, k, where)
    tensors = tuple(torch.stack([part[name] for part in parts]).to(device) for name in kernel.weight.tensors)
    return Experts(kernel, tensors, torch.stack([record.dequantize() for record in records]).to(device))


def shuffled(counts: dict[int, int], topk: int = 1) -> Tensor:
    """Make ids `[m, topk]` in which each key occurs that often, in a random order that is the same in every run."""
    ids = torch.cat([torch.full((count,), expert) for expert, count in counts.items()])
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(len(ids)))
    return ids[order].view(-1, topk)


def inputs(dense: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Make activations `[rows, k]` whose products are around 1."""
    return proof.activations(dense.view(-1, dense.shape[-1]), rows, dtype)


def expected_list(ids: Tensor, count: int, tile: int) -> tuple[list[int], list[int], list[int]]:
    """Sort rows by plain Python: the experts of tiles, the rows of tiles (-1 behind those of an expert), the rest."""
    found: list[int] = []
    numbers: list[int] = []
    flat = ids.reshape(-1).tolist()
    for expert in range(count):
        rows = [row for row, one in enumerate(flat) if one == expert]
        rows += [-1] * (-len(rows) % tile)
        numbers += rows
        found += [expert] * (len(rows) // tile)
    return found, numbers, [row for row, one in enumerate(flat) if not 0 <= one < count]


def listed(routing: Routing) -> tuple[list[int], list[int], list[int]]:
    """Read a list as `expected_list` makes it."""
    numbers = routing.list.tolist()
    tiles, absent = numbers[:2]
    rows = numbers[2 + routing.max_tiles :]
    end = tiles * routing.tile
    return numbers[2 : 2 + tiles], rows[:end], rows[end : end + absent]
