"""Number formats against the published cast tables and a search through all values: every code, every tie."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from quantkit.core.formats import FORMATS, FP5, FP6, INT4, Format, integer
from tests.golden import golden

FP6_E2M3, FP5_E2M2 = FORMATS["fp6-e2m3"], FORMATS["fp5-e2m2"]
GOLDEN = {"e3m2": FP6, "e3m1": FP5, "e2m3": FP6_E2M3, "e2m2": FP5_E2M2}
ALL = [*FORMATS.values(), integer("int7", 7)]
ids = {"ids": lambda f: f.name if isinstance(f, Format) else None}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({torch.float32: torch.int32, torch.float64: torch.int64}[x.dtype])


def searched(fmt: Format, x: float) -> int:
    """Find the code of `x` by the rules of docs/layouts.md 6.2 among all values; INT4 rounds the same way."""
    codes = range(2**fmt.bits)
    if fmt.is_float:  # the sign is always kept
        codes = [c for c in codes if (math.copysign(1, fmt.values[c]) < 0) == (math.copysign(1, x) < 0)]
    x = min(max(x, min(fmt.values)), max(fmt.values))
    nearest = min(abs(fmt.values[c] - x) for c in codes)
    ties = [c for c in codes if abs(fmt.values[c] - x) == nearest]
    return ties[0] if len(ties) == 1 else next(c for c in ties if c % 2 == 0)


def hard_values(fmt: Format) -> list[float]:
    """List every value, every midpoint, their neighbours, and the ends of the floating range."""
    ordered = sorted(set(fmt.values))
    middles = [(a + b) / 2 for a, b in pairwise(ordered)]
    points = [*ordered, *middles, max(ordered) + 0.5, 1.1 * max(ordered), 1e30, math.inf, 1e-30, 1e-45, 0.0, 5e-324]
    near = [y for x in points for y in (x, math.nextafter(x, math.inf), math.nextafter(x, -math.inf))]
    single = [float(torch.nextafter(torch.tensor(x), torch.tensor(s * math.inf))) for x in points for s in (1, -1)]
    return [sign * x for x in near + single for sign in (1.0, -1.0)]


def halves() -> torch.Tensor:
    """List every float16 pattern, in order."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)


def cast_table(name: str) -> torch.Tensor:
    return golden("fpx_cast_tables").tensors[name]


@pytest.mark.parametrize("name", GOLDEN)
def test_every_fp16_pattern_has_the_code_of_the_published_cast(name: str) -> None:
    expected, x = cast_table(f"{name}.codes_rne"), halves()
    numbers = ~x.isnan()
    assert bool((expected[~numbers] == 255).all())
    for dtype in (torch.float32, torch.float64):
        codes = GOLDEN[name].encode(x[numbers].to(dtype))
        assert codes.dtype == torch.uint8 and torch.equal(codes, expected[numbers])


@pytest.mark.parametrize("name", GOLDEN)
def test_every_code_has_the_published_value(name: str) -> None:
    values = cast_table(f"{name}.values")
    decoded = GOLDEN[name].decode(torch.arange(len(values), dtype=torch.uint8))
    assert torch.equal(bits(decoded), bits(values))  # the negative zero too


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fmt", ALL, **ids)
def test_encode_rounds_to_nearest_with_ties_to_the_even_code(fmt: Format, dtype: torch.dtype) -> None:
    x = torch.tensor(hard_values(fmt), dtype=torch.float64).to(dtype)
    before = x.clone()
    expected = torch.tensor([searched(fmt, value) for value in x.tolist()], dtype=torch.uint8)
    assert torch.equal(fmt.encode(x), expected)
    assert torch.equal(fmt.nearest(x), fmt.decode(expected).to(dtype))
    assert torch.equal(x, before)


@pytest.mark.parametrize("fmt", ALL, **ids)
def test_encode_takes_any_shape_and_stride(fmt: Format) -> None:
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)) * fmt.largest
    assert torch.equal(fmt.encode(x.t()), fmt.encode(x).t())
    assert torch.equal(fmt.encode(x[:, ::3]), fmt.encode(x)[:, ::3])
    assert torch.equal(fmt.decode(fmt.encode(x).t()), fmt.decode(fmt.encode(x)).t())
    assert fmt.encode(x[:0]).shape == (0, 10) and fmt.decode(fmt.encode(x[:0])).shape == (0, 10)
    assert fmt.encode(x[0, 0]).shape == ()


def test_values_are_those_of_the_documentation() -> None:
    for fmt, width, largest in ((FP6, 6, 28.0), (FP5, 5, 24.0), (FP6_E2M3, 6, 7.5), (FP5_E2M2, 5, 7.0)):
        assert (fmt.bits, fmt.largest, fmt.absmax, fmt.zero_code) == (width, largest, largest, 0)
    assert INT4.values == tuple(float(v) for v in range(-8, 8))
    assert (INT4.zero_code, INT4.absmax, INT4.largest, INT4.is_float) == (8, 7.5, 8.0, False)
