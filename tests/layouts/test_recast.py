"""A recast weight decodes to the same bits or is refused, and comes back from any padding."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from quantkit.core.formats import FORMATS
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import LayoutError
from quantkit.layouts import LAYOUTS
from quantkit.layouts.recast import broken_rule, candidates, check_padding, nearest, padded_shape, recast, target
from tests.layouts.samples import record

LABELS = [
    *(f"int4:{size}{rest}" for size, rest in product(("g32", "g128", "g256", "channel"), ("", ":asym", ":24"))),
    *(f"{name}:channel" for name in FORMATS if name not in ("int4", "nvfp4", "mxfp4")),
    *("nvfp4:g16", "mxfp4:g32", "int2:g64:asym", "int3:g128:asym", "int5:g32", "int6:channel:asym"),
]


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


def recastable(label: str, n: int, k: int, seed: int = 0) -> QuantizedTensor:
    """Make a random record whose codes fit around the middle zero point, with two zeros in each quad."""
    q = record(Scheme.parse(label), n, k, seed)
    if q.zeros is not None:
        zeros = q.zeros.repeat_interleave(k // q.zeros.shape[1], 1).short()
        half = q.scheme.format.zero_code
        lowest, highest = (zeros - half).clamp(min=0), (zeros + half - 1).clamp(max=2 * half - 1)
        codes = torch.clamp(q.codes.short(), min=lowest, max=highest)
        codes.view(n, -1, 4)[..., 1:3] = zeros.view(n, -1, 4)[..., 1:3]
        return QuantizedTensor(q.scheme, codes.to(torch.uint8), q.scales, q.zeros)
    if not q.scheme.format.is_float:
        q.codes.view(n, -1, 4)[..., 1:3] = q.scheme.format.zero_code
    return q


@pytest.mark.parametrize("label", LABELS)
def test_every_candidate_decodes_to_the_same_bits_and_its_padding_is_zero_and_is_removed(label: str) -> None:
    q = recastable(label, 24, 512)
    found, expected = list(candidates(q.scheme)), bits(q.dequantize())
    assert found[0] == q.scheme and len(set(found)) == len(found)
    for scheme in found:
        now = recast(q, scheme, q.shape)
        assert now.scheme == scheme and torch.equal(bits(now.dequantize()), expected), scheme.label
        padded = recast(q, scheme, (31, 768))
        values = padded.dequantize()
        assert padded.shape == (31, 768) and torch.isfinite(values).all()
        assert torch.equal(bits(values[:24, :512]), expected)
        assert int(torch.count_nonzero(values)) == int(torch.count_nonzero(q.dequantize()))
        check_padding(padded, 24, 512)
        assert recast(padded, scheme, q.shape).equal(now)


def test_zero_points_that_cannot_move_are_counted_and_located() -> None:
    for seed in range(4):
        q = record(Scheme.parse("int4:g32:asym"), 16, 128, seed)
        assert q.zeros is not None
        bad = [
            (row, g)
            for row, g in product(range(16), range(4))
            if any(not 0 <= c - int(q.zeros[row, g]) + 8 <= 15 for c in q.codes[row, 32 * g : 32 * g + 32].tolist())
        ]
        with pytest.raises(LayoutError, match=rf"^{len(bad)} of 64 .*first row {bad[0][0]}, group {bad[0][1]}, "):
            recast(q, Scheme.parse("int4:g32"), q.shape)


def test_a_dense_weight_is_not_recast_to_2_4() -> None:
    q = recastable("int4:g128", 8, 128)
    q.codes[5, 12:15] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    with pytest.raises(LayoutError, match=r"1 of 256 quads .*row 5, columns 12 to 15"):
        recast(q, Scheme.parse("int4:g128:24"), q.shape)


@pytest.mark.parametrize("to", ["int4:g64", "int4:channel", "int4:g128:asym", "fp6:channel", "int4:g256"])
def test_a_recast_that_would_change_values_is_refused(to: str) -> None:
    q = record(Scheme.parse("int4:g128"), 8, 256)
    if to == "int4:g64":
        assert recast(q, Scheme.parse(to), q.shape).scales.shape == (8, 4)
        return
    with pytest.raises(LayoutError, match="values would change"):
        recast(q, Scheme.parse(to), q.shape)


def test_nonzero_padding_is_not_removed() -> None:
    q = recastable("int4:g128", 8, 256)
    q.scales.fill_(1)
    q.codes[:, 200:] = 8
    q.codes[3, 230] = 9
    with pytest.raises(LayoutError, match=r"1 weights past its true shape \[8, 200\].*row 3, column 230"):
        check_padding(q, 8, 200)
    with pytest.raises(LayoutError, match="past its true shape"):
        recast(q, q.scheme, (8, 128))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padded_shapes_are_the_smallest_that_fit(layout: str) -> None:
    module = LAYOUTS[layout]
    for label in LABELS:
        scheme = Scheme.parse(label)
        for n, k in ((1, 1), (100, 130), (128, 512), (129, 513)):
            shape = padded_shape(module, scheme, n, k)
            if shape is None:
                assert broken_rule(module, scheme, 4096, 4096) is not None, label
                continue
            assert shape[0] >= n and shape[1] >= k and broken_rule(module, scheme, *shape) is None
            assert all(broken_rule(module, scheme, a, shape[1]) is not None for a in range(n, shape[0]))
            assert all(broken_rule(module, scheme, shape[0], b) is not None for b in range(k, shape[1]))


@pytest.mark.parametrize(
    ("layout", "label", "shape", "expected"),
    [
        ("marlin", "int4:g128", (256, 256), "int4:g128"),
        ("marlin", "int4:g256", (256, 512), "int4:g128"),
        ("marlin", "int4:channel:asym", (256, 256), "int4:channel"),
        ("marlin", "int4:channel:24", (256, 256), "int4:channel:24"),
        ("marlin", "int4:g64", (256, 256), None),
        ("marlin", "int4:g128", (96, 256), None),
        ("marlin24", "int4:g256:asym", (256, 512), "int4:g128:24"),
        ("quick", "int4:channel:asym", (256, 256), "int4:g128:asym"),
        ("quick", "int4:channel", (256, 192), "int4:g64"),
        ("gptq", "int4:g128:asym", (256, 256), "int4:g128:asym"),
        ("humming", "fp5-e2m2:channel", (64, 64), "fp6:channel"),
        ("humming", "fp6-e2m3:channel", (64, 64), None),
        ("tcfpx", "int4:channel", (64, 64), None),
    ],
)
def test_the_scheme_with_the_fewest_changes_is_chosen(
    layout: str, label: str, shape: tuple[int, int], expected: str | None
) -> None:
    found = target(LAYOUTS[layout], Scheme.parse(label), *shape)
    assert found == (None if expected is None else (Scheme.parse(expected), shape))


@pytest.mark.parametrize(
    ("layout", "label", "expected"),
    [
        ("marlin", "int4:g64", "int4:g128"),
        ("marlin", "int4:g32:asym", "int4:g128"),
        ("marlin24", "int4:g32", "int4:g128:24"),
        ("marlin", "fp6:channel", "int4:g128"),
        ("humming", "fp6-e2m3:channel", "fp6:channel"),
        ("tcfpx", "int4:g128:asym", "fp6:channel"),
        ("humming", "int4:g128:asym", "int4:g128:asym"),
        ("quick", "fp5:channel", "int4:g128"),
        ("tcfpx", "int4:channel:24", "fp6:channel"),
    ],
)
def test_requantizing_keeps_format_and_group_size_if_possible(layout: str, label: str, expected: str) -> None:
    assert nearest(LAYOUTS[layout], Scheme.parse(label), 256, 256) == (Scheme.parse(expected), (256, 256))
    assert nearest(LAYOUTS[layout], Scheme.parse(label), 250, 256, pad=True) is not None


def test_a_group_size_that_no_shape_fits_is_refused_quickly() -> None:
    assert padded_shape(LAYOUTS["marlin"], Scheme.parse("int4:g999999999"), 64, 64) is None
    assert padded_shape(LAYOUTS["compressed-tensors"], Scheme.parse("int4:g999999999"), 64, 64) == (64, 999999999)
