"""Number formats against the published cast tables and against a search through all values: every code, every tie."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from quantkit.formats import FORMATS, FP5, FP6, INT4, Format, floating, integer

GOLDEN = {"e3m2": FP6, "e3m1": FP5, "e2m3": floating("e2m3", 2, 3), "e2m2": floating("e2m2", 2, 2)}
ALL = [*FORMATS.values(), GOLDEN["e2m3"], GOLDEN["e2m2"], integer("int3", 3), integer("int8", 8)]
ids = {"ids": lambda f: f.name if isinstance(f, Format) else None}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({torch.float32: torch.int32, torch.float64: torch.int64}[x.dtype])


def searched(fmt: Format, x: float) -> int:
    """The code that the rules of LAYOUTS 6.2 ask for, by looking at every value; INT4 rounds the same way."""
    codes = range(2**fmt.bits)
    if fmt.is_float:  # the sign is always kept
        codes = [c for c in codes if (math.copysign(1, fmt.values[c]) < 0) == (math.copysign(1, x) < 0)]
    x = min(max(x, min(fmt.values)), max(fmt.values))
    nearest = min(abs(fmt.values[c] - x) for c in codes)
    ties = [c for c in codes if abs(fmt.values[c] - x) == nearest]
    return ties[0] if len(ties) == 1 else next(c for c in ties if c % 2 == 0)


def hard_values(fmt: Format) -> list[float]:
    """Every value, every midpoint, their neighbours, and the ends of the floating range."""
    ordered = sorted(set(fmt.values))
    middles = [(a + b) / 2 for a, b in pairwise(ordered)]
    points = [*ordered, *middles, max(ordered) + 0.5, 1.1 * max(ordered), 1e30, math.inf, 1e-30, 1e-45, 0.0, 5e-324]
    near = [y for x in points for y in (x, math.nextafter(x, math.inf), math.nextafter(x, -math.inf))]
    single = [float(torch.nextafter(torch.tensor(x), torch.tensor(s * math.inf))) for x in points for s in (1, -1)]
    return [sign * x for x in near + single for sign in (1.0, -1.0)]


@pytest.mark.parametrize("name", GOLDEN)
def test_all_fp16_patterns_get_the_codes_of_the_published_cast(name: str, shared: Path) -> None:
    with safe_open(shared / "golden" / "fpx_cast_tables.safetensors", "pt") as file:
        expected, values = file.get_tensor(f"{name}.codes_rne"), file.get_tensor(f"{name}.values")
    fmt = GOLDEN[name]
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    numbers = ~x.isnan()
    assert bool((expected[~numbers] == 255).all())
    for dtype in (torch.float32, torch.float64):
        codes = fmt.encode(x[numbers].to(dtype))
        assert codes.dtype == torch.uint8 and torch.equal(codes, expected[numbers])
    decoded = fmt.decode(torch.arange(len(values), dtype=torch.uint8))
    assert torch.equal(bits(decoded), bits(values))  # the negative zero too


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fmt", ALL, **ids)
def test_encode_is_the_nearest_value_with_ties_to_the_even_code(fmt: Format, dtype: torch.dtype) -> None:
    x = torch.tensor(hard_values(fmt), dtype=torch.float64).to(dtype)
    before = x.clone()
    expected = torch.tensor([searched(fmt, value) for value in x.tolist()], dtype=torch.uint8)
    assert torch.equal(fmt.encode(x), expected)
    assert torch.equal(fmt.nearest(x), fmt.decode(expected).to(dtype))
    assert torch.equal(x, before)


@pytest.mark.parametrize("fmt", ALL, **ids)
def test_every_code_is_a_fixed_point(fmt: Format) -> None:
    codes = torch.arange(2**fmt.bits).to(torch.uint8).view(2, -1)
    assert torch.equal(fmt.encode(fmt.decode(codes)), codes)
    assert torch.equal(bits(fmt.nearest(fmt.decode(codes))).abs(), bits(fmt.decode(codes)).abs())


@pytest.mark.parametrize("fmt", ALL, **ids)
def test_encode_takes_any_shape_and_stride(fmt: Format) -> None:
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)) * fmt.largest
    assert torch.equal(fmt.encode(x.t()), fmt.encode(x).t())
    assert torch.equal(fmt.encode(x[:, ::3]), fmt.encode(x)[:, ::3])
    assert torch.equal(fmt.decode(fmt.encode(x).t()), fmt.decode(fmt.encode(x)).t())
    assert fmt.encode(x[:0]).shape == (0, 10) and fmt.decode(fmt.encode(x[:0])).shape == (0, 10)
    assert fmt.encode(x[0, 0]).shape == ()


def test_the_tables_of_the_specification() -> None:
    for fmt, width, largest, normal, subnormal in (
        (FP6, 6, 28.0, 0.25, 0.0625), (FP5, 5, 24.0, 0.25, 0.125),
        (GOLDEN["e2m3"], 6, 7.5, 1.0, 0.125), (GOLDEN["e2m2"], 5, 7.0, 1.0, 0.25),
    ):  # fmt: skip
        positive = sorted(v for v in fmt.values if v > 0)
        assert (fmt.bits, fmt.largest, fmt.absmax, positive[0]) == (width, largest, largest, subnormal)
        assert normal in positive and len(set(fmt.values)) == 2**width - 1
        assert fmt.zero_code == 0 and math.copysign(1, fmt.values[1 << (width - 1)]) == -1
    assert INT4.values == tuple(float(v) for v in range(-8, 8))
    assert (INT4.zero_code, INT4.absmax, INT4.largest, INT4.is_float) == (8, 7.5, 8.0, False)
