"""Kernels of TC-FPx (docs/layouts.md, section 7): the weights that they take, and their tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from quantkit.core.formats import FORMATS, FP5, FP6, Format
from quantkit.core.scheme import Scheme
from quantkit.errors import KernelError
from quantkit.kernels.contract import Weight
from quantkit.kernels.hopper import HopperKernel
from quantkit.kernels.hopper_routed import RoutedHopper
from quantkit.kernels.hopper_tiles import (
    BANDWIDTH,
    K_STEP,
    MAX_CLUSTER,
    HopperTile,
    HopperTiles,
    rare_tiles,
)
from quantkit.kernels.launcher import Kernels, Launcher
from quantkit.kernels.naive import NaiveKernel
from quantkit.kernels.portable import PortableInstances, PortableKernel
from quantkit.kernels.portable_tiles import PortableTile, PortableTiles
from quantkit.kernels.tensormap import tensor_map

#: Floating format of five or six bits -> its exponent and mantissa bits as template arguments.
VARIANTS = {
    fmt: f"{fmt.ebits}, {fmt.mbits}"
    for fmt in FORMATS.values()
    if fmt.is_float and fmt.bits in (5, 6)
}
#: Times are fitted to a sweep on an H100.
PORTABLE_TILES = (
    PortableTile(
        fragments=1, wn=2, wm=1, wk=4, stages=3, blocks=2, unit_us=2.09, end_us=5.15, part_us=0
    ),
    PortableTile(
        fragments=2, wn=2, wm=1, wk=4, stages=3, blocks=2, unit_us=2.204, end_us=5.76, part_us=0
    ),
    PortableTile(
        fragments=2, wn=2, wm=2, wk=2, stages=3, blocks=2, unit_us=1.283, end_us=6.77, part_us=0.14
    ),
    PortableTile(
        fragments=4, wn=2, wm=2, wk=2, stages=3, blocks=2, unit_us=1.853, end_us=6.65, part_us=0.49
    ),
    PortableTile(
        fragments=8, wn=4, wm=1, wk=2, stages=2, blocks=1, unit_us=1.47, end_us=9.66, part_us=0.6
    ),
    PortableTile(
        fragments=8, wn=2, wm=2, wk=2, stages=2, blocks=1, unit_us=1.398, end_us=10.09, part_us=0.24
    ),
    PortableTile(
        fragments=8, wn=4, wm=2, wk=1, stages=3, blocks=1, unit_us=1.321, end_us=16.02, part_us=1.02
    ),
)
#: Fitted to the sweep benchmarks/gpu/tcfpx_tiles.csv.
HOPPER_TILES = {
    FP6: (
        HopperTile(
            tokens=8, words=2, warpgroups=1, stages=6, cluster=MAX_CLUSTER, step_us=0.59, end_us=1.1
        ),
        HopperTile(
            tokens=8, words=2, warpgroups=1, stages=7, step_us=0.633, end_us=0.6, split_us=3.2
        ),
        HopperTile(tokens=8, words=2, warpgroups=2, stages=8, cluster=2, step_us=0.306, end_us=0.3),
        HopperTile(
            tokens=8,
            words=4,
            warpgroups=1,
            stages=3,
            cluster=MAX_CLUSTER,
            step_us=1.207,
            end_us=0.5,
        ),
        HopperTile(
            tokens=8, words=4, warpgroups=2, stages=8, step_us=0.616, end_us=0.8, split_us=5.4
        ),
        HopperTile(
            tokens=16,
            words=2,
            warpgroups=1,
            stages=5,
            cluster=MAX_CLUSTER,
            step_us=0.536,
            end_us=2.6,
        ),
        HopperTile(
            tokens=16, words=2, warpgroups=1, stages=6, step_us=0.32, end_us=9.7, split_us=0.5
        ),
        HopperTile(
            tokens=16, words=2, warpgroups=2, stages=8, cluster=2, step_us=0.312, end_us=1.0
        ),
        HopperTile(
            tokens=16, words=4, warpgroups=2, stages=6, step_us=0.36, end_us=1.2, split_us=7.8
        ),
        HopperTile(
            tokens=32, words=1, warpgroups=1, stages=6, cluster=2, step_us=0.323, end_us=0.2
        ),
        HopperTile(
            tokens=32, words=2, warpgroups=2, stages=8, step_us=0.387, end_us=2.3, split_us=1.0
        ),
        HopperTile(
            tokens=32, words=2, warpgroups=2, stages=8, cluster=2, step_us=0.449, end_us=0.1
        ),
        HopperTile(
            tokens=32, words=4, warpgroups=2, stages=4, step_us=0.36, end_us=9.5, split_us=2.8
        ),
        HopperTile(
            tokens=64,
            words=1,
            warpgroups=2,
            stages=6,
            shared=True,
            cluster=2,
            step_us=0.471,
            end_us=1.1,
        ),
        HopperTile(
            tokens=64, words=2, warpgroups=1, stages=3, step_us=0.845, end_us=4.6, split_us=0.7
        ),
        HopperTile(
            tokens=64,
            words=2,
            warpgroups=2,
            stages=5,
            shared=True,
            step_us=0.722,
            end_us=0.7,
            split_us=9.2,
        ),
        HopperTile(
            tokens=128,
            words=1,
            warpgroups=2,
            stages=5,
            shared=True,
            step_us=0.558,
            end_us=5.9,
            split_us=1.3,
        ),
        HopperTile(
            tokens=128,
            words=1,
            warpgroups=2,
            stages=5,
            shared=True,
            cluster=2,
            step_us=0.6,
            end_us=3.3,
        ),
        HopperTile(
            tokens=128,
            words=2,
            warpgroups=2,
            stages=3,
            shared=True,
            step_us=0.622,
            end_us=10.0,
            split_us=9.7,
        ),
        HopperTile(
            tokens=256,
            words=1,
            warpgroups=2,
            stages=2,
            shared=True,
            cluster=2,
            step_us=0.861,
            end_us=8.8,
        ),
    ),
    FP5: (
        HopperTile(
            tokens=8, words=2, warpgroups=1, stages=6, cluster=MAX_CLUSTER, step_us=0.47, end_us=2.3
        ),
        HopperTile(
            tokens=8, words=2, warpgroups=1, stages=7, step_us=0.628, end_us=0.9, split_us=1.6
        ),
        HopperTile(tokens=8, words=2, warpgroups=2, stages=8, cluster=2, step_us=0.373, end_us=0.1),
        HopperTile(
            tokens=8,
            words=4,
            warpgroups=1,
            stages=3,
            cluster=MAX_CLUSTER,
            step_us=0.803,
            end_us=2.9,
        ),
        HopperTile(
            tokens=8, words=4, warpgroups=2, stages=8, step_us=0.522, end_us=0.2, split_us=4.5
        ),
        HopperTile(
            tokens=16,
            words=2,
            warpgroups=1,
            stages=5,
            cluster=MAX_CLUSTER,
            step_us=0.547,
            end_us=2.6,
        ),
        HopperTile(
            tokens=16, words=2, warpgroups=1, stages=6, step_us=0.393, end_us=0.0, split_us=7.8
        ),
        HopperTile(
            tokens=16, words=2, warpgroups=2, stages=8, cluster=2, step_us=0.388, end_us=0.7
        ),
        HopperTile(
            tokens=16, words=4, warpgroups=2, stages=6, step_us=0.447, end_us=0.6, split_us=7.2
        ),
        HopperTile(
            tokens=32, words=1, warpgroups=1, stages=6, cluster=2, step_us=0.381, end_us=0.3
        ),
        HopperTile(
            tokens=32, words=2, warpgroups=2, stages=8, step_us=0.374, end_us=3.2, split_us=0.6
        ),
        HopperTile(
            tokens=32, words=4, warpgroups=2, stages=4, step_us=0.391, end_us=0.5, split_us=10.0
        ),
        HopperTile(
            tokens=64,
            words=1,
            warpgroups=2,
            stages=6,
            shared=True,
            cluster=2,
            step_us=0.503,
            end_us=0.3,
        ),
        HopperTile(
            tokens=64, words=2, warpgroups=1, stages=3, step_us=0.834, end_us=3.0, split_us=2.1
        ),
        HopperTile(
            tokens=64,
            words=2,
            warpgroups=2,
            stages=5,
            shared=True,
            step_us=0.808,
            end_us=0.1,
            split_us=5.7,
        ),
        HopperTile(
            tokens=128,
            words=1,
            warpgroups=2,
            stages=5,
            shared=True,
            step_us=0.587,
            end_us=4.7,
            split_us=0.6,
        ),
        HopperTile(
            tokens=128,
            words=1,
            warpgroups=2,
            stages=5,
            shared=True,
            cluster=2,
            step_us=0.641,
            end_us=0.4,
        ),
        HopperTile(
            tokens=128,
            words=2,
            warpgroups=2,
            stages=3,
            shared=True,
            step_us=0.934,
            end_us=0.3,
            split_us=9.9,
        ),
        HopperTile(
            tokens=256,
            words=1,
            warpgroups=2,
            stages=2,
            shared=True,
            cluster=2,
            step_us=0.877,
            end_us=6.8,
        ),
    ),
}


def _weight(scheme: Scheme, n: int, k: int) -> Weight:
    if scheme.format not in VARIANTS or scheme.group_size is not None:
        raise KernelError(
            f"the tcfpx kernel takes fp6 and fp5 with one scale per row, not {scheme.label}"
        )
    words = (n, k * scheme.format.bits // 32)
    tensors = {"weight": (torch.int32, words), "scales": (torch.float16, (n,))}
    return Weight("tcfpx", tensors, n, k, n_unit=64, k_unit=64)


def _tensor_maps(
    fmt: Format, tile: HopperTile, words: Sequence[int], scales: int, n: int, k: int, experts: int
) -> list[bytes]:
    # In each plane 64 rows are contiguous along k, in 8-byte words. A box has at most 256 of these
    # in a row.
    (codes,), high_bits, blocks = words, fmt.bits - 4, tile.columns // 64
    low_plane = codes + n * k // 8 * high_bits
    rows = n // 64 + (experts - 1) * _stride(fmt, n, k)
    high_rows = n // 64 + (experts - 1) * _stride(fmt, n, k) * 4 // high_bits
    return [
        tensor_map(low_plane, (rows, k // 64, 256), (blocks, K_STEP // 64, 256), 8),
        tensor_map(codes, (high_rows, k * high_bits), (blocks, K_STEP * high_bits), 8),
    ]


def _stride(fmt: Format, n: int, k: int) -> int:
    # Distance of two experts' low planes, in blocks of 64 rows. The high planes are between them.
    return n * fmt.bits // 256


def _hopper(fmt: Format) -> HopperKernel:
    choice = HopperTiles(
        tiles=HOPPER_TILES.get(fmt, rare_tiles(HOPPER_TILES[FP5])),
        stage_bytes_per_weight=fmt.bits / 8,
        read_bytes_per_weight=fmt.bits / 8,
        several_tokens=128,
        bandwidth=BANDWIDTH | {256: 4150.0},
    )
    return HopperKernel("tcfpx_hopper", VARIANTS[fmt], choice, partial(_tensor_maps, fmt))


def _tiles(fmt: Format) -> PortableTiles:
    # Rare formats have half as many, the largest among them, as all share a workspace.
    tiles = PORTABLE_TILES if fmt in HOPPER_TILES else PORTABLE_TILES[:3:2] + PORTABLE_TILES[-2:]
    return PortableTiles(tiles, bytes_per_weight=fmt.bits / 8, grouped=False)


NAIVE = {fmt: NaiveKernel("tcfpx_naive", variant) for fmt, variant in VARIANTS.items()}
PORTABLE = {
    fmt: PortableKernel("tcfpx_portable", _tiles(fmt), variant) for fmt, variant in VARIANTS.items()
}
ROUTED = {
    fmt: PortableInstances("tcfpx_portable", _tiles(fmt).of_experts(), variant, "tcfpx_routed")
    for fmt, variant in VARIANTS.items()
}
HOPPER = {fmt: _hopper(fmt) for fmt in VARIANTS}
ROUTED_HOPPER = {
    fmt: RoutedHopper.of(HOPPER[fmt], partial(_stride, fmt), 256 // math.gcd(256, fmt.bits))
    for fmt in HOPPER_TILES
}


def _kernels(scheme: Scheme, n: int, k: int) -> Kernels:
    fmt = scheme.format
    return Kernels(NAIVE[fmt], PORTABLE[fmt], HOPPER[fmt], ROUTED[fmt], ROUTED_HOPPER.get(fmt))


LAUNCHER = Launcher(
    _weight,
    _kernels,
    every=(
        *NAIVE.values(),
        *PORTABLE.values(),
        *ROUTED.values(),
        *HOPPER.values(),
        *ROUTED_HOPPER.values(),
    ),
    bits_read=FP6.bits,
)
