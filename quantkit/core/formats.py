"""Number formats as tables: at eight bits or fewer, a format is the list of its codes' values. And
dtypes of dense weights, and views of a tensor's memory.

Rounding, scale search, GPTQ and verification call only `encode`, `decode` and `nearest`, so a new
format is one entry in `FORMATS`. Integer codes are offset binary (INT4: value + 8), FPx codes are
sign, exponent and mantissa (docs/layouts.md 6.1).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

SMALLEST_SCALE = 2.0**-20


@dataclass(frozen=True)
class Format:
    """A number format of at most eight bits.

    `values[code]` is the value of a code. The largest magnitude of a group is scaled to `absmax`.
    `ebits` and `mbits` are 0 for integers. FPx formats have no infinities and no NaNs
    (docs/layouts.md 6.1). `group_size` (None: one scale per row) and `layout` are the defaults of a
    recipe. Which layouts hold the format is for each layout to say. Scales are stored as
    `scale_dtype`, in multiples of `scale_unit`; if that is no float16, groups have one size only.
    """

    name: str
    bits: int
    values: tuple[float, ...] = field(
        hash=False
    )  # the name is enough, and every kernel launch hashes a format
    absmax: float
    ebits: int = 0
    mbits: int = 0
    group_size: int | None = None
    layout: str = "compressed-tensors"
    scale_dtype: torch.dtype = torch.float16
    scale_unit: float = 1.0

    @property
    def is_float(self) -> bool:
        return self.ebits > 0

    @property
    def is_microscaled(self) -> bool:
        """Return True if scales have eight bits, and groups one size, as in NVFP4 and MXFP4."""
        return self.scale_dtype != torch.float16

    def takes(self, group_size: int | None) -> bool:
        """Return True if weights may have groups of this size."""
        return not self.is_microscaled or group_size == self.group_size

    @property
    def scale_steps(self) -> int:
        """The number of scales from a power of two to the next."""
        return round(1 / torch.finfo(self.scale_dtype).eps)

    @cached_property
    def largest_weight(self) -> float:
        """The largest dequantized weight: codes times scales, both within float16."""
        return min(
            torch.finfo(torch.float16).max,
            torch.finfo(self.scale_dtype).max * self.scale_unit * self.largest,
        )

    @property
    def smallest_scale(self) -> float:
        """The smallest scale that solvers choose: no subnormal of eight bits, which engines read as
        zero.
        """
        if not self.is_microscaled:
            return SMALLEST_SCALE
        return max(SMALLEST_SCALE, torch.finfo(self.scale_dtype).smallest_normal * self.scale_unit)

    @property
    def split(self) -> str:
        """The bits of exponent and mantissa of a floating format, as `e3m2`."""
        return f"e{self.ebits}m{self.mbits}"

    @property
    def zero_code(self) -> int:
        """The code of positive zero, which pruned weights have."""
        return self.values.index(0.0)

    @cached_property
    def largest(self) -> float:
        """The largest magnitude of any code."""
        return max(abs(v) for v in self.values)

    @property
    def smallest_normal(self) -> float:
        """The smallest normal magnitude of a floating format."""
        return 2.0**self._lowest

    def encode(self, x: Tensor) -> Tensor:
        """Round to the codes of the nearest values, uint8 in the shape of `x`: ties to the even
        code, saturating.

        `x` is float32 or float64, finite or infinite. NaN has no code; the caller must refuse it.
        Floating formats keep the sign of zero.
        """
        if not self.is_float:
            return self.nearest(x).sub_(self.values[0]).to(torch.uint8)
        magnitude = x.abs()
        binade = self._binade(magnitude.clamp_(max=self.largest))
        steps = magnitude.div_(binade).mul_(2**self.mbits).round_()
        # A binade has 2**mbits steps; the lowest has twice as many, for the subnormals. Rounding up
        # carries over.
        steps.add_(torch.log2(binade).round_().sub_(self._lowest), alpha=2**self.mbits)
        return steps.add_(torch.signbit(x), alpha=2 ** (self.bits - 1)).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Compute the float32 value of each uint8 code, in the shape of `codes`."""
        if not self.is_float:
            return codes.float().add_(self.values[0])
        return _table(self, codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)

    def nearest(self, x: Tensor) -> Tensor:
        """Compute `decode(encode(x))` in the dtype of `x` without the table: the inner step of
        every search.
        """
        if not self.is_float:
            return x.round().clamp_(self.values[0], self.values[-1])
        x = x.clamp(-self.largest, self.largest)
        step = self._binade(x).mul_(2.0**-self.mbits)
        return x.div_(step).round_().mul_(step)

    def nearest_scale(self, scales: Tensor) -> Tensor:
        """Round nonzero scales to the digits of a scale of eight bits; range and sign are not
        checked.
        """
        step = _power_of_two(scales).div_(self.scale_steps)
        return scales.div(step).round_().mul_(step)

    @property
    def _lowest(self) -> int:
        """The exponent of the smallest normal value, which the subnormals share."""
        return 2 - (1 << (self.ebits - 1))

    def _binade(self, x: Tensor) -> Tensor:
        """Round each magnitude down to a power of two, but not below the smallest normal value."""
        return _power_of_two(x).clamp_(min=2.0**self._lowest)


def integer(name: str, bits: int) -> Format:
    """Make a signed integer format in offset binary, with MARLIN's convention `scale = 2 max|w| /
    (2^bits - 1)`.
    """
    half = 2 ** (bits - 1)
    return Format(
        name, bits, tuple(float(v) for v in range(-half, half)), absmax=half - 0.5, group_size=128
    )


def floating(name: str, ebits: int, mbits: int, layout: str = "compressed-tensors") -> Format:
    """Make an FPx format with subnormals, without infinities and NaNs (docs/layouts.md 6.1)."""
    bias = 2 ** (ebits - 1) - 1
    magnitudes = [
        f * 2.0 ** (1 - bias - mbits) if e == 0 else (1 + f / 2**mbits) * 2.0 ** (e - bias)
        for e in range(2**ebits)
        for f in range(2**mbits)
    ]
    values = tuple(magnitudes) + tuple(-m for m in magnitudes)
    return Format(name, 1 + ebits + mbits, values, magnitudes[-1], ebits, mbits, layout=layout)


INT4 = integer("int4", 4)
FP6 = floating("fp6", ebits=3, mbits=2, layout="humming")
FP5 = floating("fp5", ebits=3, mbits=1, layout="humming")

#: One tensor scale for all weights, so that linears that engines join share it: 2^-7 gives scales
#: from 2^-13 to 3.5.
NVFP4 = replace(
    floating("nvfp4", ebits=2, mbits=1),
    group_size=16,
    scale_dtype=torch.float8_e4m3fn,
    scale_unit=2.0**-7,
)
#: The scale is the smallest with which no weight passes 7 of its steps, which round to 6.
MXFP4 = replace(
    NVFP4,
    name="mxfp4",
    absmax=7 / 1.5,
    group_size=32,
    scale_dtype=torch.float8_e8m0fnu,
    scale_unit=1.0,
)

FORMATS = {
    f.name: f
    for f in (
        integer("int2", 2),
        integer("int3", 3),
        INT4,
        integer("int5", 5),
        integer("int6", 6),
        integer("int8", 8),
        FP6,
        FP5,
        floating("fp6-e2m3", ebits=2, mbits=3),
        floating("fp5-e2m2", ebits=2, mbits=2),
        NVFP4,
        MXFP4,
    )
}


def _power_of_two(x: Tensor) -> Tensor:
    """Round each magnitude down to a power of two; float32 or float64."""
    bits, exponent = (
        (torch.int32, 0xFF << 23) if x.dtype == torch.float32 else (torch.int64, 0x7FF << 52)
    )
    return (x.view(bits) & exponent).view(x.dtype)


@lru_cache(maxsize=64)
def _table(fmt: Format, device: torch.device) -> Tensor:
    return torch.tensor(fmt.values, dtype=torch.float32, device=device)


#: Dtypes of a dense weight that can be read and quantized.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as configs and messages do: `float16`."""
    return str(dtype).removeprefix("torch.")


def raw_bytes(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU if it is elsewhere, and view its elements as flat uint8 bytes."""
    tensor = tensor if tensor.is_cpu and not tensor.requires_grad else tensor.detach().cpu()
    return tensor.reshape(-1).view(torch.uint8)


def aligned(tensor: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Make a tensor contiguous and aligned, so that it can be viewed as `dtype`."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.storage_offset() * tensor.itemsize % dtype.itemsize else tensor
