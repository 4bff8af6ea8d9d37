"""Kernels of QUICK (docs/layouts.md, section 8): the weights that they take, and their tiles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from quantkit.core.formats import INT4
from quantkit.core.scheme import Scheme
from quantkit.errors import KernelError
from quantkit.kernels.contract import Weight
from quantkit.kernels.hopper import HopperKernel
from quantkit.kernels.hopper_routed import RoutedHopper
from quantkit.kernels.hopper_tiles import K_STEP, MAX_CLUSTER, HopperTile, HopperTiles, rare_tiles
from quantkit.kernels.launcher import Kernels, Launcher
from quantkit.kernels.naive import NaiveKernel
from quantkit.kernels.portable import PortableInstances, PortableKernel
from quantkit.kernels.portable_tiles import PortableTile, PortableTiles
from quantkit.kernels.tensormap import tensor_map

#: Group sizes of the Hopper kernel: a step along k holds whole groups.
HOPPER_GROUPS = (128, 64, 32)
#: Times are fitted to a sweep on an H100.
PORTABLE_TILES = (
    PortableTile(
        fragments=1, wn=2, wm=1, wk=4, stages=3, blocks=2, unit_us=2.903, end_us=6.63, part_us=0
    ),
    PortableTile(
        fragments=2, wn=2, wm=1, wk=4, stages=3, blocks=2, unit_us=3.092, end_us=7.17, part_us=0
    ),
    PortableTile(
        fragments=4, wn=4, wm=1, wk=2, stages=3, blocks=1, unit_us=1.402, end_us=11.52, part_us=0
    ),
    PortableTile(
        fragments=4, wn=2, wm=2, wk=2, stages=3, blocks=1, unit_us=1.325, end_us=5.7, part_us=0.59
    ),
    PortableTile(
        fragments=4, wn=4, wm=2, wk=1, stages=4, blocks=1, unit_us=1.174, end_us=9.98, part_us=0.71
    ),
    PortableTile(
        fragments=8, wn=4, wm=1, wk=2, stages=2, blocks=1, unit_us=1.935, end_us=9.42, part_us=0.53
    ),
    PortableTile(
        fragments=8, wn=2, wm=2, wk=2, stages=2, blocks=1, unit_us=1.669, end_us=7.21, part_us=1.09
    ),
    PortableTile(
        fragments=8, wn=4, wm=2, wk=1, stages=3, blocks=1, unit_us=1.657, end_us=13.59, part_us=1.16
    ),
)
#: Fitted to the sweep benchmarks/gpu/quick_tiles.csv.
HOPPER_TILES = (
    HopperTile(tokens=8, words=2, warpgroups=1, stages=6, step_us=0.476, end_us=0.1, split_us=3.9),
    HopperTile(
        tokens=8, words=2, warpgroups=1, stages=6, cluster=MAX_CLUSTER, step_us=0.358, end_us=3.8
    ),
    HopperTile(
        tokens=8, words=4, warpgroups=1, stages=4, cluster=MAX_CLUSTER, step_us=0.632, end_us=4.2
    ),
    HopperTile(tokens=16, words=2, warpgroups=1, stages=6, step_us=0.518, end_us=0.3, split_us=4.3),
    HopperTile(
        tokens=16, words=2, warpgroups=1, stages=6, cluster=MAX_CLUSTER, step_us=0.63, end_us=1.8
    ),
    HopperTile(tokens=16, words=4, warpgroups=1, stages=4, step_us=0.674, end_us=6.8, split_us=1.6),
    HopperTile(tokens=32, words=2, warpgroups=1, stages=5, step_us=0.573, end_us=0.3, split_us=5.6),
    HopperTile(tokens=32, words=2, warpgroups=2, stages=8, cluster=2, step_us=0.474, end_us=0.5),
    HopperTile(tokens=32, words=4, warpgroups=2, stages=6, step_us=0.495, end_us=0.5, split_us=7.2),
    HopperTile(
        tokens=64,
        words=1,
        warpgroups=2,
        stages=6,
        shared=True,
        cluster=2,
        step_us=0.575,
        end_us=0.2,
    ),
    HopperTile(tokens=64, words=2, warpgroups=1, stages=4, step_us=0.757, end_us=0.3, split_us=6.1),
    HopperTile(
        tokens=128,
        words=1,
        warpgroups=2,
        stages=5,
        shared=True,
        step_us=0.636,
        end_us=0.1,
        split_us=4.5,
    ),
    HopperTile(
        tokens=128,
        words=1,
        warpgroups=2,
        stages=5,
        shared=True,
        cluster=2,
        step_us=0.655,
        end_us=0.2,
    ),
    HopperTile(
        tokens=128,
        words=2,
        warpgroups=2,
        stages=4,
        shared=True,
        step_us=1.052,
        end_us=0.9,
        split_us=9.3,
    ),
    HopperTile(
        tokens=256,
        words=1,
        warpgroups=2,
        stages=3,
        shared=True,
        step_us=0.967,
        end_us=0.9,
        split_us=9.1,
    ),
    HopperTile(
        tokens=256,
        words=1,
        warpgroups=2,
        stages=3,
        shared=True,
        cluster=2,
        step_us=0.917,
        end_us=8.5,
    ),
)


def _weight(scheme: Scheme, n: int, k: int) -> Weight:
    if scheme.format != INT4 or scheme.group_size is None or scheme.group_size % 32:
        raise KernelError(
            f"the quick kernel takes int4 in groups of a multiple of 32, not {scheme.label}"
        )
    g = scheme.groups(k)
    tensors = {
        "qweight": (torch.int32, (k // 4, n // 2)),
        "qzeros": (torch.int32, (g, n // 4)),
        "scales": (torch.float16, (g, 2 * n)),
    }
    return Weight("quick", tensors, n, k, n_unit=128, k_unit=32, group=scheme.group_size or k)


def _tensor_maps(
    group: int, tile: HopperTile, words: Sequence[int], scales: int, n: int, k: int, experts: int
) -> list[bytes]:
    # A row in memory holds a quarter of the columns (docs/layouts.md, 8.2). Codes come in pieces of
    # 128 bytes.
    codes, zeros = words
    k *= experts
    rows, all_rows = 4 * (K_STEP // group), 4 * (k // group)
    return [
        tensor_map(
            codes, (k // 8, n // 32, 16), (K_STEP // 8, tile.columns // 32, 16), 8, swizzled=True
        ),
        tensor_map(zeros, (all_rows, n // 32), (rows, tile.columns // 32), 8),
        tensor_map(scales, (all_rows, n // 2), (rows, tile.columns // 2), 2),
    ]


def _hopper(group: int) -> HopperKernel:
    bytes_per_weight = 0.5 + 5 / group  # scales and zero points are stored twice
    choice = HopperTiles(
        tiles=HOPPER_TILES if group == 128 else rare_tiles(HOPPER_TILES),
        stage_bytes_per_weight=bytes_per_weight,
        stage_alignment=1024,  # the swizzle depends on the address
        read_bytes_per_weight=bytes_per_weight,
        several_tokens=64,
        scaled_by_group=True,
    )
    return HopperKernel("quick_hopper", str(group), choice, partial(_tensor_maps, group))


NAIVE = NaiveKernel("quick_naive")
#: A stage has codes, and scales and zero points if groups have at least 32 columns. Each is held
#: twice.
PORTABLE = PortableKernel(
    "quick_portable", PortableTiles(PORTABLE_TILES, bytes_per_weight=0.5 + 5 / 32)
)
ROUTED = PortableInstances("quick_portable", PORTABLE.choice.of_experts(), function="quick_routed")
HOPPER: dict[int | None, HopperKernel] = {group: _hopper(group) for group in HOPPER_GROUPS}
ROUTED_HOPPER = RoutedHopper.of(HOPPER[128])


def _kernels(scheme: Scheme, n: int, k: int) -> Kernels:
    routed = ROUTED_HOPPER if scheme.group_size == 128 else None
    return Kernels(NAIVE, PORTABLE, HOPPER.get(scheme.group_size), ROUTED, routed)


LAUNCHER = Launcher(
    _weight,
    _kernels,
    every=(NAIVE, PORTABLE, ROUTED, *HOPPER.values(), ROUTED_HOPPER),
    bits_read=4 + 2 * (16 + 4) / 128,
)
