"""Kernels of Sparse-MARLIN (docs/layouts.md, section 5): the weights that they take, and their
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
from quantkit.kernels.hopper_tiles import K_STEP, MAX_CLUSTER, HopperTile, HopperTiles
from quantkit.kernels.launcher import Kernels, Launcher
from quantkit.kernels.naive import NaiveKernel
from quantkit.kernels.portable import PortableInstances, PortableKernel
from quantkit.kernels.portable_tiles import PortableTile, PortableTiles
from quantkit.kernels.tensormap import tensor_map

GROUPS = (128, None)
#: Times are fitted to a sweep on an H100.
PORTABLE_TILES = (
    PortableTile(
        fragments=1, wn=2, wm=1, wk=4, stages=3, blocks=2, unit_us=1.106, end_us=6.98, part_us=0
    ),
    PortableTile(
        fragments=2, wn=2, wm=1, wk=4, stages=3, blocks=2, unit_us=1.445, end_us=6.99, part_us=0
    ),
    PortableTile(
        fragments=2, wn=2, wm=2, wk=2, stages=3, blocks=2, unit_us=1.286, end_us=7.23, part_us=0.09
    ),
    PortableTile(
        fragments=4, wn=2, wm=2, wk=2, stages=3, blocks=1, unit_us=1.007, end_us=9.06, part_us=0.77
    ),
    PortableTile(
        fragments=4, wn=4, wm=2, wk=1, stages=4, blocks=1, unit_us=0.845, end_us=15.44, part_us=0.78
    ),
    PortableTile(
        fragments=8, wn=4, wm=1, wk=2, stages=2, blocks=1, unit_us=1.122, end_us=10.67, part_us=0.33
    ),
)
#: Fitted to the sweep benchmarks/gpu/marlin24_tiles.csv.
HOPPER_TILES = (
    HopperTile(tokens=8, words=2, warpgroups=1, stages=8, step_us=0.389, end_us=0.0, split_us=2.4),
    HopperTile(
        tokens=8, words=4, warpgroups=1, stages=4, cluster=MAX_CLUSTER, step_us=0.463, end_us=4.1
    ),
    HopperTile(tokens=8, words=4, warpgroups=2, stages=8, step_us=0.193, end_us=7.1),
    HopperTile(tokens=16, words=2, warpgroups=1, stages=6, step_us=0.342, end_us=0.7, split_us=3.4),
    HopperTile(
        tokens=16, words=2, warpgroups=1, stages=6, cluster=MAX_CLUSTER, step_us=0.475, end_us=1.3
    ),
    HopperTile(tokens=16, words=4, warpgroups=1, stages=4, step_us=0.549, end_us=2.7, split_us=5.0),
    HopperTile(tokens=32, words=2, warpgroups=1, stages=6, step_us=0.452, end_us=0.4, split_us=3.9),
    HopperTile(tokens=32, words=4, warpgroups=2, stages=6, step_us=0.389, end_us=4.8, split_us=1.2),
    HopperTile(tokens=64, words=2, warpgroups=1, stages=4, step_us=0.482, end_us=2.0, split_us=3.7),
    HopperTile(
        tokens=64,
        words=2,
        warpgroups=2,
        stages=5,
        shared=True,
        step_us=0.332,
        end_us=8.5,
        split_us=0.2,
    ),
    HopperTile(tokens=64, words=2, warpgroups=2, stages=6, cluster=2, step_us=0.47, end_us=0.1),
    HopperTile(
        tokens=128,
        words=2,
        warpgroups=2,
        stages=4,
        shared=True,
        step_us=0.4,
        end_us=6.1,
        split_us=7.5,
    ),
    HopperTile(
        tokens=128,
        words=2,
        warpgroups=2,
        stages=4,
        shared=True,
        cluster=2,
        step_us=0.42,
        end_us=10.0,
    ),
)


def _weight(scheme: Scheme, n: int, k: int) -> Weight:
    if scheme.format != INT4 or scheme.sparsity is None or scheme.group_size not in GROUPS:
        raise KernelError(
            f"the marlin24 kernel takes 2:4 int4 in groups of 128 or none, not {scheme.label}"
        )
    g, words = scheme.groups(k), (k // 32, 2 * n)
    tensors = {
        "B_24": (torch.int32, words),
        "B_meta": (torch.int16, words),
        "s": (torch.float16, (g, n)),
    }
    return Weight("marlin24", tensors, n, k, n_unit=64, k_unit=32, group=scheme.group_size or k)


def _tensor_maps(
    group: int | None,
    tile: HopperTile,
    words: Sequence[int],
    scales: int,
    n: int,
    k: int,
    experts: int,
) -> list[bytes]:
    rows = K_STEP // 32
    codes = tensor_map(words[0], (k // 32, n), (rows, tile.columns), 8)
    metadata = tensor_map(words[1], (k // 32, n // 2), (rows, tile.columns // 2), 8)
    if group is None:
        return [codes, metadata, codes]  # the kernel reads one scale per row without a map
    return [codes, metadata, tensor_map(scales, (k // group, n), (1, tile.columns), 2)]


def _hopper(group: int | None) -> HopperKernel:
    choice = HopperTiles(
        tiles=HOPPER_TILES,
        stage_bytes_per_weight=0.375 + (2 / group if group else 0),
        read_bytes_per_weight=0.375 + 2 / 128,
        several_tokens=64,
        scaled_by_group=group is not None,
        sparse=True,
        sustained_tflops=1000.0,  # two of each four weights are multiplied
    )
    return HopperKernel("marlin24_hopper", str(group or 0), choice, partial(_tensor_maps, group))


NAIVE = NaiveKernel("marlin24_naive")
#: A stage has codes of half of the weights, metadata, and scales of groups of at least 32.
PORTABLE = PortableKernel(
    "marlin24_portable", PortableTiles(PORTABLE_TILES, bytes_per_weight=0.375 + 2 / 32)
)
ROUTED = PortableInstances(
    "marlin24_portable", PORTABLE.choice.of_experts(), function="marlin24_routed"
)
HOPPER = {group: _hopper(group) for group in GROUPS}


def _kernels(scheme: Scheme, n: int, k: int) -> Kernels:
    # The Hopper kernel takes whole tiles. A single group is stored as one scale per row
    # (docs/layouts.md, 5.2).
    whole = n % 128 == 0 and k % K_STEP == 0
    hopper = HOPPER[scheme.group_size if scheme.groups(k) > 1 else None] if whole else None
    return Kernels(NAIVE, PORTABLE, hopper, ROUTED)


LAUNCHER = Launcher(
    _weight,
    _kernels,
    every=(NAIVE, PORTABLE, ROUTED, *HOPPER.values()),
    bits_read=3 + 16 / 128,
    sparse=True,
    # Names of compressed-tensors -> names of vLLM (docs/layouts.md, 5.1).
    aliases={"weight_packed": "B_24", "meta": "B_meta", "scale_packed": "s"},
)
