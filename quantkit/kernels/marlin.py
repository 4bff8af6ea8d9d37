"""Kernels of dense MARLIN (docs/layouts.md, section 3): the weights that they take, and their
tiles.
"""

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

#: Checkpoints have groups of 128 or one scale per row. vLLM repacks to 64 and 32 (docs/layouts.md,
#: 3.6).
GROUPS = (128, 64, 32, None)
#: Times are fitted to a sweep on an H100.
PORTABLE_TILES = (
    PortableTile(
        fragments=1, wn=2, wm=1, wk=4, stages=3, blocks=2, unit_us=1.437, end_us=6.54, part_us=0
    ),
    PortableTile(
        fragments=2, wn=2, wm=1, wk=4, stages=3, blocks=2, unit_us=1.577, end_us=7.38, part_us=0
    ),
    PortableTile(
        fragments=2, wn=2, wm=2, wk=2, stages=3, blocks=2, unit_us=1.473, end_us=7.21, part_us=0.09
    ),
    PortableTile(
        fragments=4, wn=4, wm=1, wk=2, stages=3, blocks=1, unit_us=1.071, end_us=9.79, part_us=0.05
    ),
    PortableTile(
        fragments=4, wn=2, wm=2, wk=2, stages=3, blocks=1, unit_us=1.055, end_us=8.05, part_us=0
    ),
    PortableTile(
        fragments=4, wn=4, wm=2, wk=1, stages=4, blocks=1, unit_us=0.957, end_us=12.47, part_us=0.37
    ),
    PortableTile(
        fragments=8, wn=4, wm=1, wk=2, stages=2, blocks=1, unit_us=1.44, end_us=10.78, part_us=0.51
    ),
    PortableTile(
        fragments=8, wn=4, wm=2, wk=1, stages=3, blocks=1, unit_us=1.433, end_us=18.43, part_us=0.71
    ),
)
#: Fitted to the sweep benchmarks/gpu/marlin_tiles.csv.
HOPPER_TILES = (
    HopperTile(tokens=8, words=2, warpgroups=1, stages=6, step_us=0.507, end_us=1.6, split_us=1.5),
    HopperTile(
        tokens=8, words=2, warpgroups=1, stages=6, cluster=MAX_CLUSTER, step_us=0.377, end_us=2.9
    ),
    HopperTile(tokens=8, words=4, warpgroups=1, stages=4, step_us=0.605, end_us=0.9, split_us=5.3),
    HopperTile(
        tokens=8, words=4, warpgroups=1, stages=4, cluster=MAX_CLUSTER, step_us=0.688, end_us=3.2
    ),
    HopperTile(tokens=8, words=4, warpgroups=2, stages=8, step_us=0.289, end_us=0.1, split_us=8.0),
    HopperTile(tokens=16, words=2, warpgroups=1, stages=6, step_us=0.327, end_us=2.0, split_us=4.5),
    HopperTile(
        tokens=16, words=2, warpgroups=1, stages=6, cluster=MAX_CLUSTER, step_us=0.656, end_us=0.8
    ),
    HopperTile(tokens=16, words=4, warpgroups=1, stages=4, step_us=0.755, end_us=0.1, split_us=7.8),
    HopperTile(tokens=32, words=1, warpgroups=1, stages=6, cluster=2, step_us=0.438, end_us=0.3),
    HopperTile(tokens=32, words=2, warpgroups=2, stages=8, step_us=0.355, end_us=3.2, split_us=0.3),
    HopperTile(tokens=32, words=4, warpgroups=2, stages=6, step_us=0.497, end_us=3.0, split_us=4.4),
    HopperTile(
        tokens=64,
        words=1,
        warpgroups=2,
        stages=6,
        shared=True,
        step_us=0.434,
        end_us=1.2,
        split_us=3.6,
    ),
    HopperTile(
        tokens=64,
        words=1,
        warpgroups=2,
        stages=6,
        shared=True,
        cluster=2,
        step_us=0.541,
        end_us=0.0,
    ),
    HopperTile(tokens=64, words=2, warpgroups=1, stages=4, step_us=0.695, end_us=1.6, split_us=6.0),
    HopperTile(tokens=128, words=1, warpgroups=1, stages=3, step_us=0.811, end_us=2.1),
    HopperTile(
        tokens=128,
        words=1,
        warpgroups=2,
        stages=5,
        shared=True,
        step_us=0.528,
        end_us=4.7,
        split_us=0.3,
    ),
    HopperTile(
        tokens=128,
        words=1,
        warpgroups=2,
        stages=5,
        shared=True,
        cluster=2,
        step_us=0.544,
        end_us=0.2,
    ),
    HopperTile(
        tokens=128,
        words=2,
        warpgroups=2,
        stages=4,
        shared=True,
        step_us=0.949,
        end_us=1.2,
        split_us=7.1,
    ),
    HopperTile(
        tokens=256,
        words=1,
        warpgroups=2,
        stages=3,
        shared=True,
        step_us=0.736,
        end_us=0.3,
        split_us=10.0,
    ),
    HopperTile(
        tokens=256,
        words=1,
        warpgroups=2,
        stages=3,
        shared=True,
        cluster=2,
        step_us=0.738,
        end_us=7.7,
    ),
)


def _weight(scheme: Scheme, n: int, k: int) -> Weight:
    if scheme.format != INT4 or not scheme.symmetric or scheme.group_size not in GROUPS:
        raise KernelError(
            "the marlin kernel takes symmetric int4 in groups of 128, 64, 32 or none, not "
            f"{scheme.label}"
        )
    g = scheme.groups(k)
    tensors = {"B": (torch.int32, (k // 16, 2 * n)), "s": (torch.float16, (g, n))}
    return Weight("marlin", tensors, n, k, n_unit=64, k_unit=16, group=scheme.group_size or k)


def _tensor_maps(
    group: int | None,
    tile: HopperTile,
    words: Sequence[int],
    scales: int,
    n: int,
    k: int,
    experts: int,
) -> list[bytes]:
    k *= experts
    codes = tensor_map(words[0], (k // 16, n), (K_STEP // 16, tile.columns), 8)
    if group is None:
        return [codes, codes]  # the kernel reads one scale per row without a map
    return [codes, tensor_map(scales, (k // group, n), (K_STEP // group, tile.columns), 2)]


def _hopper(group: int | None) -> HopperKernel:
    choice = HopperTiles(
        tiles=HOPPER_TILES if group in (128, None) else rare_tiles(HOPPER_TILES),
        stage_bytes_per_weight=0.5 + (2 / group if group else 0),
        stage_alignment=128,
        read_bytes_per_weight=0.5 + 2 / 128,
        several_tokens=128,
        scaled_by_group=group is not None,
    )
    return HopperKernel("marlin_hopper", str(group or 0), choice, partial(_tensor_maps, group))


NAIVE = NaiveKernel("marlin_naive")
#: A stage has codes, and scales of groups of at least 32.
PORTABLE = PortableKernel(
    "marlin_portable", PortableTiles(PORTABLE_TILES, bytes_per_weight=0.5 + 2 / 32)
)
ROUTED = PortableInstances(
    "marlin_portable", PORTABLE.choice.of_experts(), function="marlin_routed"
)
HOPPER = {group: _hopper(group) for group in GROUPS}
ROUTED_HOPPER = {group: RoutedHopper.of(HOPPER[group]) for group in (128, None)}


def _kernels(scheme: Scheme, n: int, k: int) -> Kernels:
    # A single group is stored as one scale per row (docs/layouts.md, 3.3).
    group = scheme.group_size if scheme.groups(k) > 1 else None
    return Kernels(NAIVE, PORTABLE, HOPPER[group], ROUTED, ROUTED_HOPPER.get(group))


LAUNCHER = Launcher(
    _weight,
    _kernels,
    every=(NAIVE, PORTABLE, ROUTED, *HOPPER.values(), *ROUTED_HOPPER.values()),
    bits_read=4 + 16 / 128,
)
