"""The schemes, shapes and tiles on which Hopper kernels are tested."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quantkit.core.quantized_tensor import Scheme
from quantkit.kernels import LAUNCHERS
from quantkit.kernels.hopper import HopperKernel
from quantkit.kernels.tiles import K_STEP, MAX_CLUSTER, HopperTile, ceil


@dataclass(frozen=True)
class Case:
    """The schemes and shapes of a layout: the first two schemes are tested most.

    `odd` are shapes that do not fill their tiles, `units` is the shape for unit vectors.
    """

    layout: str
    labels: tuple[str, ...]
    odd: tuple[tuple[int, int], ...]
    units: tuple[int, int]

    def kernel(self, label: str) -> HopperKernel:
        found = LAUNCHERS[self.layout].kernels(Scheme.parse(label), 4096, 4096).hopper
        assert found is not None
        return found

    def tiles(self, label: str, n: int, k: int, dtype: torch.dtype) -> list[HopperTile]:
        """List the tiles that exist for a scheme and may be used for a weight `[n, k]`, clusters in three sizes."""
        kernel = self.kernel(label)
        return [
            replace(tile, cluster=size)
            for tile in kernel.choice.tiles_for(dtype)
            for size in ((3, 5, 8) if tile.cluster == MAX_CLUSTER else (tile.cluster,))
            if size <= ceil(k, K_STEP) and (not kernel.choice.sparse or n % tile.columns == 0)
        ]


CASES = {
    "marlin": Case(
        "marlin",
        ("int4:g128", "int4:channel", "int4:g64", "int4:g32"),
        ((64, 256), (320, 1152), (1024, 2048)),
        (320, 384),
    ),
    "marlin24": Case(
        "marlin24", ("int4:g128:24", "int4:channel:24"), ((128, 256), (768, 1152), (1024, 2048)), (768, 768)
    ),
    "quick": Case(
        "quick",
        ("int4:g128:asym", "int4:g128", "int4:g64:asym", "int4:g32:asym"),
        ((128, 256), (384, 1152), (1024, 2048)),
        (384, 768),
    ),
    "tcfpx": Case(
        "tcfpx",
        ("fp6:channel", "fp5:channel", "fp6-e2m3:channel", "fp5-e2m2:channel"),
        ((64, 192), (320, 64), (320, 1152)),
        (320, 320),
    ),
}
ALL = [(layout, label) for layout, case in CASES.items() for label in case.labels]
FIRST = [(layout, label) for layout, case in CASES.items() for label in case.labels[:2]]
RARE = [(layout, label) for layout, label in ALL if (layout, label) not in FIRST]
