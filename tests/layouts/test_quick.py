"""QUICK: published bytes, the words of MARLIN in another order, copies that differ, and the side file."""

from __future__ import annotations

import pytest
import torch

from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import LayoutError
from quantkit.layouts import LAYOUTS
from quantkit.layouts.schemes import Schemes
from tests.golden import both_ways, golden, scheme_of
from tests.layouts.laws import rows
from tests.layouts.samples import record

QUICK = LAYOUTS["quick"]


def test_words_scales_and_zero_points_equal_the_published_ones() -> None:
    file = golden("quick")
    for case, info in file.cases.items():
        scheme = scheme_of({**info, "sym": False})
        q = QuantizedTensor(scheme, *(file(case, name).t().contiguous() for name in ("codes", "scales", "zeros")))
        stored = {name: file(case, name) for name in ("qweight", "qzeros")}
        both_ways("quick", q, {**stored, "scales": file(case, "qscales")})


def test_worked_example_of_the_documentation() -> None:
    n, k = torch.arange(256).view(-1, 1), torch.arange(128).view(1, -1)
    codes = ((k + 3 * (k // 8) + 5 * n + 7 * (n // 8)) % 16).to(torch.uint8)
    zeros, scales = ((5 * n + 7 * (n // 8)) % 16).to(torch.uint8), (n + 1).half()
    packed = QUICK.pack(QuantizedTensor(Scheme.parse("int4:g128:asym"), codes, scales, zeros))
    words, zero_points = rows(packed["qweight"]), rows(packed["qzeros"])[0]
    assert [f"{word:08x}" for word in words[0][:9]] == [
        "b0c1afb0", "9eaf8d9e", "7c8d6b7c", "5a6b495a", "16270516", "f405e3f4", "d2e3c1d2", "b0c1afb0", "d2e3c1d2"
    ]  # fmt: skip
    assert (words[1][0], words[2][0], words[8][0]) == (0xB0C1AFB0, 0xF405E3F4, 0x7C8D6B7C)
    assert zero_points[:4] == [0xDEF0DEF0, 0x9ABC9ABC, 0x23452345, 0xEF01EF01]
    assert packed["scales"][0, [*range(8), 16, 64, 128, 256]].tolist() == [1, 1, 9, 9, 17, 17, 25, 25, 2, 129, 5, 65]


@pytest.mark.parametrize("label", ["int4:g64:asym", "int4:g64"])
def test_copies_of_a_scale_or_zero_point_that_differ_are_refused(label: str) -> None:
    q = record(Scheme.parse(label), 256, 128)
    q.scales[5, 1] = 0.0
    packed = QUICK.pack(q)
    for place in (0, 1, 700):
        scales = packed["scales"].clone()
        scales.view(-1).view(torch.int16)[place] ^= 1
        with pytest.raises(LayoutError, match="'scales' holds every entry twice"):
            QUICK.unpack({**packed, "scales": scales}, q.scheme)
    sign = packed["scales"].clone()
    sign.view(-1)[int((sign.view(torch.int16) == 0).flatten().nonzero()[0])] = -0.0  # equal as numbers
    with pytest.raises(LayoutError, match="'scales' holds every entry twice"):
        QUICK.unpack({**packed, "scales": sign}, q.scheme)
    for nibble in range(8):
        zeros = packed["qzeros"].clone()
        zeros[1, 33] ^= 1 << (4 * nibble) if nibble < 7 else -(1 << 31)
        with pytest.raises(LayoutError, match="'qzeros' holds every entry twice"):
            QUICK.unpack({**packed, "qzeros": zeros}, q.scheme)


def test_both_copies_changed_alike_give_another_record() -> None:
    q = record(Scheme.parse("int4:g64:asym"), 256, 128)
    packed = QUICK.pack(q)
    packed["qzeros"][0, 0] ^= 0x00010001
    changed = QUICK.unpack(packed, q.scheme)
    assert int((changed.zeros != q.zeros).sum()) == 1 and changed.zeros[0, 0] == q.zeros[0, 0] ^ 1


def test_the_side_file_has_exactly_the_keys_of_the_loader() -> None:
    config = QUICK.write_config(Schemes(Scheme.parse("int4:g64"), ignore=("lm_head", "model.layers.0.mlp.up_proj")))
    assert config["version"] == "quick" and config["quant_method"] == "awq"
    assert QUICK.SIDE_FILE is not None and QUICK.SIDE_FILE.name == "quant_config.json"
    assert QUICK.SIDE_FILE.contents({**config, "quantkit": {}}) == {
        "zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "QUICK",
        "modules_to_not_convert": ["model.layers.0.mlp.up_proj"],
    }  # fmt: skip
