"""The kernels of a layout behind one function, `matmul`, which takes the fastest kernel for the
device, or the reference; and for each layout the packed weights that its kernels take, with bits as
in docs/layouts.md.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from quantkit.core.formats import FORMATS, FP6, INT4, Format, dtype_name
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import KernelError
from quantkit.kernels import driver, loader
from quantkit.kernels.contract import ACTIVATIONS, TYPES, Weight, check
from quantkit.kernels.hopper import HopperKernel, RoutedHopper, tensor_map
from quantkit.kernels.portable import PortableKernel
from quantkit.kernels.tiles import (
    BANDWIDTH,
    HOPPER_TILES,
    K_STEP,
    PORTABLE_TILES,
    HopperTile,
    HopperTiles,
    PortableTiles,
    rare_tiles,
)


@dataclass(frozen=True)
class NaiveKernel:
    """The kernel `name` in kernels/naive.cu, one thread for each output: the reference for every
    faster kernel.

    `variant` are its template arguments after the dtypes.
    """

    name: str
    variant: str = ""
    source: ClassVar[str] = "naive"
    #: Threads of a block; each computes one output, its neighbour the next.
    threads: ClassVar[int] = 64

    def instance(self, x: torch.dtype, out: torch.dtype) -> str:
        """Build the C++ name of the instance for activations and outputs of two dtypes."""
        return f"{self.name}<{', '.join(filter(None, (TYPES[x], TYPES[out], self.variant)))}>"

    @cached_property
    def instances(self) -> tuple[str, ...]:
        """All instances: outputs have the dtype of the activations, or float32."""
        return tuple(self.instance(x, out) for x in ACTIVATIONS for out in (x, torch.float32))

    def launch(
        self,
        weight: Weight,
        x: Tensor,
        packed: Sequence[Tensor],
        bias: Tensor | None,
        out: Tensor,
        tile: None = None,
    ) -> None:
        """Write the product into `out`, for operands that are checked."""
        function = loader.load(self.source, self.instances, x.device)[
            self.instance(x.dtype, out.dtype)
        ]
        driver.launch(
            function,
            (x.shape[0], weight.n // self.threads),
            (self.threads,),
            [*packed, x, bias, out, weight.n, weight.k, *weight.group_argument],
        )


class Kernels(NamedTuple):
    """The kernels for a weight; `hopper` is None for shapes or groups that only the portable kernel
    takes.

    `routed` and `routed_hopper` multiply with the weights of several experts (see `grouped`).
    """

    naive: NaiveKernel
    portable: PortableKernel
    hopper: HopperKernel | None
    routed: PortableKernel
    routed_hopper: RoutedHopper | None = None


def kernels_of(
    name: str,
    portable: PortableTiles,
    hopper: Mapping[Any, HopperKernel | None],
    routed: Mapping[Any, RoutedHopper] | None = None,
    variant: str = "",
) -> dict[Any, Kernels]:
    """Give the kernels of a layout the keys of its Hopper kernels; `variant` are template arguments
    of other kernels.
    """
    naive, source = NaiveKernel(f"{name}_naive", variant), f"{name}_portable"
    plain = PortableKernel(source, portable, variant)
    experts = PortableKernel(source, portable.of_experts(), variant, f"{name}_routed")
    return {
        key: Kernels(naive, plain, kernel, experts, (routed or {}).get(key))
        for key, kernel in hopper.items()
    }


class Launcher(ABC):
    """The kernels of one layout: each subclass says which packed weights they take.

    `bits_read` counts the bits that are read for a weight, with scales in groups of 128; `load`
    prefers the layout with the fewest. `aliases` maps other names of packed tensors to the names in
    `weight`. `table` has the kernels by `key`.
    """

    bits_read: ClassVar[float]
    aliases: ClassVar[Mapping[str, str]] = {}
    table: Mapping[Any, Kernels]

    @abstractmethod
    def weight(self, scheme: Scheme, n: int, k: int) -> Weight:
        """Describe the packed weight; KernelError for a scheme that the kernels do not take."""

    @abstractmethod
    def key(self, scheme: Scheme, n: int, k: int) -> Any:
        """Say which kernels of the table multiply with a weight."""

    def kernels(self, scheme: Scheme, n: int, k: int) -> Kernels:
        """Find the kernels for a weight."""
        return self.table[self.key(scheme, n, k)]

    def matmul(
        self,
        x: Tensor,
        tensors: Mapping[str, Tensor],
        scheme: Scheme,
        n: int,
        k: int,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        *,
        naive: bool = False,
        portable: bool = False,
        tile: Any = None,
    ) -> Tensor:
        """Multiply activations `[m, k]` with a packed weight `[n, k]`; returns `[m, n]` of the
        dtype of `x`.

        The Hopper kernel is used where it can be, unless `portable`; `tile` overrides the choice of
        its tile. The `naive` kernel may write float32 to `out` too. Sums are float32, in an order
        that depends only on the shapes and the device. `workspace` explains the limits on streams
        and CUDA graphs. KernelError for operands that cannot be multiplied.
        """
        weight, named = self.weight(scheme, n, k), self.named(tensors)
        out = check(weight, x, named, bias, out)
        if out.dtype != x.dtype and not naive:
            wanted, asked = dtype_name(x.dtype), dtype_name(out.dtype)
            raise KernelError(
                f"the fast {weight.layout} kernels write {wanted} as their activations are, not "
                f"{asked}"
            )
        kernel = (
            self.kernels(scheme, n, k).naive
            if naive
            else self.fastest(scheme, n, k, x.device, portable)
        )
        kernel.launch(weight, x, [named[suffix] for suffix in weight.tensors], bias, out, tile)
        return out

    def fastest(
        self, scheme: Scheme, n: int, k: int, device: torch.device, portable: bool = False
    ) -> HopperKernel | PortableKernel:
        """Choose the kernel for a weight `[n, k]` on a CUDA device: Hopper's where it can be,
        unless `portable`.
        """
        kernels = self.kernels(scheme, n, k)
        return (
            kernels.portable
            if portable or not loader.is_hopper(device)
            else kernels.hopper or kernels.portable
        )

    def named(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Rename packed tensors to the names that `weight` has."""
        return {self.aliases.get(name, name): tensor for name, tensor in tensors.items()}


#: Floating format of five or six bits -> its exponent and mantissa bits as template arguments.
VARIANTS = {
    fmt: f"{fmt.ebits}, {fmt.mbits}"
    for fmt in FORMATS.values()
    if fmt.is_float and fmt.bits in (5, 6)
}


class Marlin(Launcher):
    """Dense MARLIN (section 3): groups of 128 or one scale per row. vLLM repacks to 64 and 32
    (3.6).
    """

    GROUPS = (128, 64, 32, None)
    bits_read = 4 + 16 / 128

    def __init__(self) -> None:
        # A stage has codes, and scales of groups of at least 32.
        portable = PortableTiles(PORTABLE_TILES["marlin"], bytes_per_weight=0.5 + 2 / 32)
        tiles = HOPPER_TILES["marlin"]
        hopper = {
            group: HopperKernel(
                "marlin_hopper",
                str(group or 0),
                HopperTiles(
                    tiles=tiles if group in (128, None) else rare_tiles(tiles),
                    stage_bytes_per_weight=0.5 + (2 / group if group else 0),
                    stage_alignment=128,
                    read_bytes_per_weight=0.5 + 2 / 128,
                    several_tokens=128,
                    scaled_by_group=group is not None,
                ),
                partial(_marlin_maps, group),
            )
            for group in self.GROUPS
        }
        self.table = kernels_of(
            "marlin",
            portable,
            hopper,
            routed={group: RoutedHopper.of(hopper[group]) for group in (128, None)},
        )

    def weight(self, scheme: Scheme, n: int, k: int) -> Weight:
        if scheme.format != INT4 or not scheme.symmetric or scheme.group_size not in self.GROUPS:
            raise KernelError(
                "the marlin kernel takes symmetric int4 in groups of 128, 64, 32 or none, not "
                f"{scheme.label}"
            )
        tensors = {
            "B": (torch.int32, (k // 16, 2 * n)),
            "s": (torch.float16, (scheme.groups(k), n)),
        }
        return Weight("marlin", tensors, n, k, n_unit=64, k_unit=16, group=scheme.group_size or k)

    def key(self, scheme: Scheme, n: int, k: int) -> int | None:
        # A single group is stored as one scale per row (3.3).
        return scheme.group_size if scheme.groups(k) > 1 else None


def _marlin_maps(
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


class Marlin24(Launcher):
    """Sparse-MARLIN (section 5): 2:4 int4 in groups of 128 or with one scale per row."""

    GROUPS = (128, None)
    bits_read = 3 + 16 / 128
    #: Names of compressed-tensors -> names of vLLM (5.1).
    aliases: ClassVar = {"weight_packed": "B_24", "meta": "B_meta", "scale_packed": "s"}

    def __init__(self) -> None:
        # A stage has codes of half of the weights, metadata, and scales of groups of at least 32.
        portable = PortableTiles(PORTABLE_TILES["marlin24"], bytes_per_weight=0.375 + 2 / 32)
        hopper = {
            group: HopperKernel(
                "marlin24_hopper",
                str(group or 0),
                HopperTiles(
                    tiles=HOPPER_TILES["marlin24"],
                    stage_bytes_per_weight=0.375 + (2 / group if group else 0),
                    read_bytes_per_weight=0.375 + 2 / 128,
                    several_tokens=64,
                    scaled_by_group=group is not None,
                    sparse=True,
                    sustained_tflops=1000.0,  # two of each four weights are multiplied
                ),
                partial(_marlin24_maps, group),
            )
            for group in self.GROUPS
        }
        self.table = kernels_of("marlin24", portable, {**hopper, "odd": None})

    def weight(self, scheme: Scheme, n: int, k: int) -> Weight:
        if scheme.format != INT4 or scheme.sparsity is None or scheme.group_size not in self.GROUPS:
            raise KernelError(
                f"the marlin24 kernel takes 2:4 int4 in groups of 128 or none, not {scheme.label}"
            )
        words = (k // 32, 2 * n)
        tensors = {
            "B_24": (torch.int32, words),
            "B_meta": (torch.int16, words),
            "s": (torch.float16, (scheme.groups(k), n)),
        }
        return Weight("marlin24", tensors, n, k, n_unit=64, k_unit=32, group=scheme.group_size or k)

    def key(self, scheme: Scheme, n: int, k: int) -> int | str | None:
        if n % 128 or k % K_STEP:
            return "odd"  # the Hopper kernel takes whole tiles
        # A single group is stored as one scale per row (5.2).
        return scheme.group_size if scheme.groups(k) > 1 else None


def _marlin24_maps(
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


class Quick(Launcher):
    """QUICK (section 8): int4 with zero points, in groups of any multiple of 32."""

    #: Group sizes of the Hopper kernel: a step along k holds whole groups.
    HOPPER_GROUPS = (128, 64, 32)
    bits_read = 4 + 2 * (16 + 4) / 128

    def __init__(self) -> None:
        # A stage has codes, and scales and zero points if groups have at least 32 columns. Each is
        # held twice.
        portable = PortableTiles(PORTABLE_TILES["quick"], bytes_per_weight=0.5 + 5 / 32)
        tiles = HOPPER_TILES["quick"]
        hopper = {
            group: HopperKernel(
                "quick_hopper",
                str(group),
                HopperTiles(
                    tiles=tiles if group == 128 else rare_tiles(tiles),
                    stage_bytes_per_weight=0.5 + 5 / group,
                    stage_alignment=1024,  # the swizzle depends on the address
                    read_bytes_per_weight=0.5 + 5 / group,
                    several_tokens=64,
                    scaled_by_group=True,
                ),
                partial(_quick_maps, group),
            )
            for group in self.HOPPER_GROUPS
        }
        self.table = kernels_of(
            "quick", portable, {**hopper, None: None}, routed={128: RoutedHopper.of(hopper[128])}
        )

    def weight(self, scheme: Scheme, n: int, k: int) -> Weight:
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

    def key(self, scheme: Scheme, n: int, k: int) -> int | None:
        return scheme.group_size if scheme.group_size in self.HOPPER_GROUPS else None


def _quick_maps(
    group: int, tile: HopperTile, words: Sequence[int], scales: int, n: int, k: int, experts: int
) -> list[bytes]:
    # A row in memory holds a quarter of the columns (8.2). Codes come in pieces of 128 bytes.
    codes, zeros = words
    k *= experts
    rows, all_rows = 4 * (K_STEP // group), 4 * (k // group)
    columns = tile.columns
    return [
        tensor_map(codes, (k // 8, n // 32, 16), (K_STEP // 8, columns // 32, 16), 8, True),
        tensor_map(zeros, (all_rows, n // 32), (rows, columns // 32), 8),
        tensor_map(scales, (all_rows, n // 2), (rows, columns // 2), 2),
    ]


class Tcfpx(Launcher):
    """TC-FPx (section 7): floats of five or six bits with one scale per row."""

    bits_read = FP6.bits

    def __init__(self) -> None:
        self.table = {}
        for fmt, variant in VARIANTS.items():
            choice = HopperTiles(
                tiles=HOPPER_TILES.get(fmt.name, rare_tiles(HOPPER_TILES["fp5"])),
                stage_bytes_per_weight=fmt.bits / 8,
                read_bytes_per_weight=fmt.bits / 8,
                several_tokens=128,
                bandwidth=BANDWIDTH | {256: 4150.0},
            )
            hopper = HopperKernel("tcfpx_hopper", variant, choice, partial(_tcfpx_maps, fmt))
            unit, tiles = 256 // math.gcd(256, fmt.bits), PORTABLE_TILES["tcfpx"]
            routed = {fmt: RoutedHopper.of(hopper, partial(_stride, fmt), unit)}
            if fmt.name not in HOPPER_TILES:
                # Rare formats have half as many, the largest among them, as all share a workspace.
                tiles, routed = tiles[:3:2] + tiles[-2:], {}
            portable = PortableTiles(tiles, bytes_per_weight=fmt.bits / 8, grouped=False)
            self.table |= kernels_of("tcfpx", portable, {fmt: hopper}, routed, variant)

    def weight(self, scheme: Scheme, n: int, k: int) -> Weight:
        if scheme.format not in VARIANTS or scheme.group_size is not None:
            raise KernelError(
                f"the tcfpx kernel takes fp6 and fp5 with one scale per row, not {scheme.label}"
            )
        tensors = {
            "weight": (torch.int32, (n, k * scheme.format.bits // 32)),
            "scales": (torch.float16, (n,)),
        }
        return Weight("tcfpx", tensors, n, k, n_unit=64, k_unit=64)

    def key(self, scheme: Scheme, n: int, k: int) -> Format:
        return scheme.format


def _tcfpx_maps(
    fmt: Format, tile: HopperTile, words: Sequence[int], scales: int, n: int, k: int, experts: int
) -> list[bytes]:
    # In each plane 64 rows are contiguous along k, in 8-byte words. A box has at most 256 of these
    # in a row.
    (codes,), high_bits, blocks = words, fmt.bits - 4, tile.columns // 64
    low_plane = codes + n * k // 8 * high_bits
    further = (experts - 1) * _stride(fmt, n, k)
    rows, high_rows = n // 64 + further, n // 64 + further * 4 // high_bits
    return [
        tensor_map(low_plane, (rows, k // 64, 256), (blocks, K_STEP // 64, 256), 8),
        tensor_map(codes, (high_rows, k * high_bits), (blocks, K_STEP * high_bits), 8),
    ]


def _stride(fmt: Format, n: int, k: int) -> int:
    # Distance of two experts' low planes, in blocks of 64 rows. The high planes are between them.
    return n * fmt.bits // 256


#: Family of layouts -> its kernels.
FAMILIES: dict[str, Launcher] = {
    "marlin": Marlin(),
    "marlin24": Marlin24(),
    "tcfpx": Tcfpx(),
    "quick": Quick(),
}
