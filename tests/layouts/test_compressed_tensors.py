"""compressed-tensors: the published words, zero points and padding."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import LayoutError
from quantkit.layouts import LAYOUTS
from quantkit.names import FORMATS
from tests.golden import both_ways, golden, scheme_of
from tests.layouts.samples import record


def test_pack_quantized_words_zero_points_and_padding() -> None:
    file = golden("ct_pack_quantized")
    for case, info in file.cases.items():
        scheme = scheme_of(info)
        zeros = None if scheme.symmetric else (file(case, "zeros") + 8).to(torch.uint8)
        q = QuantizedTensor(scheme, (file(case, "codes") + 8).to(torch.uint8), file(case, "weight_scale"), zeros)
        names = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
        both_ways("compressed-tensors", q, {n: t for n in names if (t := file(case, n)) is not None})


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("int")])
def test_every_width_is_packed_as_the_library_packs_it(name: str) -> None:
    """Weights along rows and zero points along columns, at sizes that fill no word, by the library's own functions."""
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    layout = LAYOUTS["compressed-tensors"]
    for n, k in product((1, 7, 32, 61), (1, 13, 32, 253)):
        q = record(Scheme.parse(f"{name}:channel:asym"), n, k, seed=n + k)
        bits, middle, zeros = q.scheme.format.bits, q.scheme.format.zero_code, q.zeros
        assert zeros is not None
        signed, points = ((x.short() - middle).to(torch.int8) for x in (q.codes, zeros))
        packed = layout.pack(q)
        assert torch.equal(packed["weight_packed"], library.pack_to_int32(signed, bits))
        assert torch.equal(packed["weight_zero_point"], library.pack_to_int32(points, bits, packed_dim=0))
        assert torch.equal(library.unpack_from_int32(packed["weight_packed"], bits, signed.shape), signed)


def test_words_of_releases_that_left_bits_unused_are_refused() -> None:
    """Ten codes of three bits in a word, as the library packed them before 0.20, are one word more."""
    layout, scheme = LAYOUTS["compressed-tensors"], Scheme.parse("int3:g128")
    packed = layout.pack(record(scheme, 4, 128))
    packed["weight_packed"] = torch.zeros(4, 13, dtype=torch.int32)
    with pytest.raises(LayoutError, match=r"'weight_packed' must .*\[4, 12\]"):
        layout.unpack(packed, scheme)


@pytest.mark.parametrize("label", ["int2:g64", "int3:channel:asym", "int5:g32:asym", "int6:channel", "int8:g128:asym"])
def test_humming_has_the_same_words_and_zero_points(label: str) -> None:
    """As humming's own conversion from `pack-quantized` leaves them (docs/layouts.md 9b)."""
    q = record(Scheme.parse(label), 64, 256)
    here, there = LAYOUTS["compressed-tensors"].pack(q), LAYOUTS["humming"].pack(q)
    same = {"weight": "weight_packed", "weight_scale": "weight_scale", "zero_point": "weight_zero_point"}
    assert all(torch.equal(tensor, here[same[name]]) for name, tensor in there.items())
    assert len(there) == 2 + (q.zeros is not None) and LAYOUTS["humming"].unpack(there, q.scheme).equal(q)
