"""The laws of every layout: packing loses nothing, repeats itself byte for byte, and refuses what `check` refuses.

Bytes are compared with the slow packers of `oracle.py`. Malformed tensors give an error of one line that names tensor
and rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import LayoutError
from quantkit.layouts import LAYOUTS, arrangement
from quantkit.layouts.arrangement import Arrangement
from tests.layouts import oracle
from tests.layouts.laws import UNITS, obeys, rows, same_bytes
from tests.layouts.samples import CASES, HELD, record

EVERY = [(layout, label) for layout, (labels, _) in HELD.items() for label in labels]


@pytest.mark.parametrize(("layout", "label"), EVERY)
def test_blocks_of_rows_in_any_order_and_of_any_size_give_the_same_bytes(
    layout: str, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block may be smaller, and no block changes memory outside of its rows."""
    module, scheme, unit = LAYOUTS[layout], Scheme.parse(label), UNITS[layout][0]
    k = 96 if layout == "humming" else 256  # fifteen words a row of fp5
    k = 253 if layout == "compressed-tensors" and label.startswith("int") and ":channel" in label else k
    n = 384 + (unit if unit < 128 else 0)
    q = record(scheme, n, k, lowest_zero=1)
    expected = module.pack(q)
    packing, turns = module.packing(scheme, (n, k), q.scales, q.zeros), [(256, n), (0, 128), (128, 256)]
    for start, end in turns:
        packing.add(start, q.codes[start:end])
    assert same_bytes(packing.tensors, expected)
    unpacking = module.unpacking(expected, scheme)
    assert unpacking.scheme == scheme and unpacking.shape == (n, k) and unpacking.record().equal(q)
    for start, end in turns:
        around = torch.full((end - start + 2, k), 99, dtype=torch.uint8)
        unpacking.fill(start, around[1:-1])
        assert torch.equal(around[1:-1], q.codes[start:end]) and bool((around[[0, -1]] == 99).all())
    monkeypatch.setattr(arrangement, "BLOCK", k * (n // 5))
    assert same_bytes(module.pack(q), expected) and module.unpack(expected, scheme).equal(q)


@pytest.mark.parametrize(("layout", "label", "n", "k"), CASES)
def test_pack_and_unpack_are_inverses(layout: str, label: str, n: int, k: int) -> None:
    """Also of tensors that start at any word."""
    q = record(Scheme.parse(label), n, k, lowest_zero=1)
    obeys(layout, q)
    expected = oracle.packed(
        layout, q.codes.tolist(), rows(q.scales), None if q.zeros is None else q.zeros.tolist(),
        q.scheme.format.bits, q.scheme.format.ebits, q.scheme.format.mbits, q.scheme.group_size or k,
    )  # fmt: skip
    packed = LAYOUTS[layout].pack(q)
    assert expected is None or {name: rows(t) for name, t in packed.items()} == expected
    shifted = {name: torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape) for name, t in packed.items()}
    assert all(t.storage_offset() == 1 for t in shifted.values())
    assert LAYOUTS[layout].unpack(shifted, q.scheme).equal(q)


#: layout, scheme, n, k, and what the refusal says.
ILLEGAL = [
    *[(name, "int4:g128", 64, 100) for name in LAYOUTS],
    *[(name, "int4:channel", 0, 128) for name in LAYOUTS],
    *[(name, "int4:channel", 64, 0) for name in LAYOUTS],
    *[(name, "fp6:g128", 256, 256) for name in LAYOUTS],
    ("compressed-tensors", "int4:channel:24", 64, 126),
    ("compressed-tensors", "nvfp4", 4, 24, "group size 16 does not divide k = 24", "--skip the weight"),
    ("gptq", "mxfp4", 64, 128, "int4, not mxfp4", "--layout"),
    ("humming", "nvfp4", 4, 64, "not nvfp4", "--layout compressed-tensors"),
    ("compressed-tensors", "fp5:g32", 4, 32, "one scale per row", "--group-size channel"),
    ("gptq", "int4:channel", 40, 128),
    ("gptq-v2", "int4:channel", 64, 136),
    ("gptq", "fp6", 64, 128, "int4, not fp6", "--layout"),
    ("humming", "fp6", 4, 48, "multiple of 32", "48", "--layout compressed-tensors"),
    ("humming", "int4:g48", 4, 96),
    ("humming", "int4:channel:asym", 4, 64),
    ("humming", "fp5-e2m2", 4, 32, "fp6, fp5 and integers, not fp5-e2m2", "--layout compressed-tensors"),
    ("tcfpx", "int4", 64, 64),
    ("tcfpx", "fp6", 96, 64, "n to be a multiple of 64", "96", "--layout compressed-tensors"),
    ("tcfpx", "fp5-e2m2", 64, 96),
    ("awq", "int4:channel", 12, 64, "n to be a multiple of 8", "12", "--layout compressed-tensors"),
    ("awq", "int4:g48:asym", 8, 64),
    ("quick", "int4:channel:asym", 128, 128, "one scale per row", "--group-size 128"),
    ("quick", "int4:g16", 128, 128, "multiple of 32", "16", "--layout awq"),
    ("quick", "int4:g128:asym", 64, 128),
    ("marlin", "int4", 96, 128, "n to be a multiple of 64", "96", "--skip"),
    ("marlin", "int4", 64, 100, "k to be a multiple of 128", "100"),
    ("marlin", "int4:g64", 64, 128, "groups of 128", "--group-size 128 or channel"),
    ("marlin", "int4:g128:asym", 64, 128, "symmetric", "--layout gptq-v2"),
    *[
        (name, label, n, k, *words)
        for name in ("marlin24", "marlin24-ct")
        for label, n, k, *words in (
            ("int4:g128", 128, 128, "two of four", "--prune 2:4", "--layout marlin"),
            ("int4:g64:24", 128, 128, "groups of 128", "--group-size 128 or channel"),
            ("int4:channel:24", 192, 128, "n to be a multiple of 128", "192", "--skip"),
            ("int4:channel:24", 128, 192),
            ("int4:g128:asym", 128, 128),
        )
    ],
]


@pytest.mark.parametrize("case", ILLEGAL, ids=lambda case: "-".join(map(str, case[:4])))
def test_pack_refuses_what_check_refuses(case: tuple[Any, ...]) -> None:
    layout, label, n, k, *words = case
    scheme = Scheme.parse(label)
    with pytest.raises(LayoutError) as refusal:
        LAYOUTS[layout].check(scheme, n, k)
    said = str(refusal.value)
    assert "\n" not in said and all(word in said for word in words), said
    if k % 4 == 0 and k and k % (scheme.group_size or k) == 0 and n:
        with pytest.raises(LayoutError) as same:
            LAYOUTS[layout].pack(record(scheme, n, k))
        assert str(same.value) == said


@pytest.mark.parametrize(("layout", "label"), EVERY)
def test_every_changed_nibble_is_refused_or_changes_the_record(layout: str, label: str) -> None:
    n, k = HELD[layout][1][0]
    q = record(Scheme.parse(label), n, k, lowest_zero=1)
    packed = LAYOUTS[layout].pack(q)
    random = torch.Generator().manual_seed(n + k)
    for name, tensor in packed.items():
        stored = tensor.view(torch.uint8).view(-1)  # shares memory with what is unpacked
        picked = torch.randperm(2 * stored.numel(), generator=random)[:24].tolist()
        for place in picked:
            change = int(torch.randint(1, 16, (), generator=random)) << 4 * (place % 2)
            stored[place // 2] ^= change
            try:
                noticed = not LAYOUTS[layout].unpack(packed, q.scheme).equal(q)
            except LayoutError:
                noticed = True
            assert noticed, f"{name} nibble {place}"
            stored[place // 2] ^= change
    assert LAYOUTS[layout].unpack(packed, q.scheme).equal(q)


def test_arrangements_pack_codes_in_the_order_of_their_permutation() -> None:
    random = torch.Generator().manual_seed(1)
    for line, bits in (
        (("N a:2 b:2 c:2 i:8", "K d:2 j:8", "N K a b i j c d", "c d"), 8),
        (("N j:4 y:2 w:8", "K d:2 e:4 f:2", "K N w e j f y d", "y"), 4),
        (("N p:16", "K", "K N p"), 2),
        (("N a:2 b:2 c:2 i:8", "K d:2 q:4 p:2", "N K i q p c a b d", "a b c d"), 1),  # a byte of eight rows and columns
        (("N", "K i:16", "K N i", "i"), 2),  # neighbours that share a byte, in reverse
        (("N", "K i:2 j:2 l:2", "N K l j i", "j"), 4),  # in runs of four and of two
    ):
        order = Arrangement(*line)
        codes = torch.randint(0, 2**bits, (128, 64), generator=random, dtype=torch.uint8)
        words = order.pack(codes, bits)
        expected = [
            sum(int(code) << (bits * i) for i, code in enumerate(group))
            for group in order(codes).view(-1, 32 // bits).tolist()
        ]
        assert rows(words)[0] == expected
        assert torch.equal(order.unpack(words, bits, (128, 64)), codes)
        assert torch.equal(order.inverse(order(codes), (128, 64)), codes)
        for held in (codes.t().contiguous().t(), torch.cat((codes[:1, :1].view(-1), codes.view(-1)))[1:].view(128, 64)):
            assert torch.equal(order.pack(held, bits), words)  # transposed, and at an odd address
        with pytest.raises(LayoutError, match="do not fill"):
            order.unpack(words[1:], bits, (128, 64))


def test_an_arrangement_refuses_wrong_sizes() -> None:
    with pytest.raises(LayoutError, match="multiple of 8"):
        Arrangement("N", "K i:8", "K N i")(torch.zeros(4, 12, dtype=torch.uint8))
    with pytest.raises(LayoutError, match="do not fill"):
        Arrangement("N", "K i:8", "K N i").inverse(torch.zeros(7, dtype=torch.uint8), (4, 16))


Change = Callable[[Tensor], Tensor]

SCALES = dict.fromkeys(("gptq", "gptq-v2", "awq", "quick", "tcfpx"), "scales")
SCALES |= {"marlin": "s", "marlin24": "s", "marlin24-ct": "scale_packed"}
FIRST = {layout: next(case for case in CASES if case[0] == layout) for layout in LAYOUTS}


def sample(layout: str, label: str = "", n: int = 128, k: int = 256) -> tuple[QuantizedTensor, dict[str, Tensor]]:
    q = record(Scheme.parse(label or FIRST[layout][1]), n, k, lowest_zero=1)
    return q, LAYOUTS[layout].pack(q)


def refused(layout: str, tensors: dict[str, Tensor], scheme: Scheme, *words: str) -> None:
    with pytest.raises(LayoutError) as refusal:
        LAYOUTS[layout].unpack(tensors, scheme)
    message = str(refusal.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize("layout", LAYOUTS)
def test_missing_foreign_misshapen_and_mistyped_tensors_are_refused(layout: str) -> None:
    q, packed = sample(layout)
    for name, tensor in packed.items():
        if name != "g_idx":
            refused(layout, {k: t for k, t in packed.items() if k != name}, q.scheme, name)
        for change in (lambda t: t.unsqueeze(0), lambda t: t[:0], lambda t: t[1:], lambda t: t.to(torch.float64)):
            refused(layout, {**packed, name: change(tensor)}, q.scheme)
        wrong = torch.int16 if tensor.dtype != torch.int16 else torch.int32
        refused(layout, {**packed, name: tensor.to(wrong)}, q.scheme, name)
        refused(layout, {**packed, name: torch.zeros((), dtype=tensor.dtype)}, q.scheme, name)
    refused(layout, {**packed, "workspace": torch.zeros(16, dtype=torch.int32)}, q.scheme, "workspace")
    refused(layout, {}, q.scheme)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_another_group_size_or_format_are_refused(layout: str) -> None:
    q, packed = sample(layout)
    for label in ("int4:g64", "int4:channel", "int4:g128:asym", "int4:g48", "fp6", "fp5", "fp6:g128"):
        # Stored zero points of a symmetric weight are valid in an asymmetric scheme.
        unseen = layout in ("gptq", "gptq-v2", "awq", "quick") and label.endswith("asym")
        # Words of humming hold more codes if each is narrower, and nothing else says how many there are.
        unseen |= layout == "humming" and label == "int4:channel"
        if Scheme.parse(label) != q.scheme and not unseen:
            refused(layout, packed, Scheme.parse(label))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinite_scales_are_refused_in_both_directions(layout: str, value: float) -> None:
    q, packed = sample(layout)
    name = SCALES.get(layout, "weight_scale")
    packed[name].view(-1)[2:4] = value  # both copies where there are two
    refused(layout, packed, q.scheme, "scale of row", str(value))
    q.scales.view(-1)[3] = value
    with pytest.raises(LayoutError, match="scale of row"):
        LAYOUTS[layout].pack(q)


def test_scales_that_fp4_does_not_store_are_refused() -> None:
    """A byte of NaN is refused too, and a tensor scale that would change every weight."""
    q, packed = sample("compressed-tensors", "nvfp4")
    for value in (0.013, 3.75, 2.0**-18):
        q.scales[1, 2] = value
        with pytest.raises(LayoutError, match=r"row 1, group 2 .* no scale of nvfp4"):
            LAYOUTS["compressed-tensors"].pack(q)
    for divisor in (64.0, 0.0, float("nan")):
        wrong = {**packed, "weight_global_scale": torch.tensor([divisor])}
        refused("compressed-tensors", wrong, q.scheme, "'weight_global_scale'", "must be 128")
    packed["weight_scale"].view(torch.uint8)[0, 1] = 0x7F
    refused("compressed-tensors", packed, q.scheme, "scale of row 0, group 1 is nan")
    q, packed = sample("compressed-tensors", "mxfp4")
    for byte in (255, 200, 50):
        packed["weight_scale"][2, 3] = byte
        refused("compressed-tensors", packed, q.scheme, "row 2")
    for value in (0.0, -1.0, 1.5):
        q.scales[1, 2] = value
        with pytest.raises(LayoutError, match=r"row 1, group 2 .* no scale of mxfp4"):
            LAYOUTS["compressed-tensors"].pack(q)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_wider_scales_are_read_exactly_or_refused(layout: str, dtype: torch.dtype) -> None:
    name = SCALES.get(layout, "weight_scale")
    q, packed = sample(layout)
    q.scales.copy_(torch.linspace(-1, 1, q.scales.numel()).view(q.scales.shape).bfloat16())
    packed = LAYOUTS[layout].pack(q)
    wide = {**packed, name: packed[name].to(dtype)}
    assert LAYOUTS[layout].unpack(wide, q.scheme).equal(q)
    for value in (1e-10, 1e5, 2.0**-25):
        wide[name] = packed[name].to(dtype)
        wide[name].view(-1)[:2] = value
        refused(layout, wide, q.scheme, "no float16 value", "row 0")


@pytest.mark.parametrize("layout", ["gptq", "gptq-v2"])
def test_symmetric_gptq_zero_points_are_read_by_their_data(layout: str) -> None:
    q, packed = sample(layout)
    for word in (0x77777777, 0x88888888 - 2**32):
        other = {**packed, "qzeros": torch.full_like(packed["qzeros"], word)}
        assert LAYOUTS[layout].unpack(other, q.scheme).equal(q)
    for word in (0x77777778, 0x99999999 - 2**32, 0):
        other["qzeros"] = torch.full_like(packed["qzeros"], word)
        refused(layout, other, q.scheme, "neither all 7 (v1) nor all 8 (v2)")
    other["qzeros"][: 1 if len(other["qzeros"]) > 1 else 0] = 0x77777777
    refused(layout, other, q.scheme, "symmetric")


@pytest.mark.parametrize("layout", ["awq", "quick"])
def test_symmetric_zero_points_of_awq_are_8_and_others_are_refused(layout: str) -> None:
    q = record(Scheme.parse("int4:g64"), 128, 128)
    packed = LAYOUTS[layout].pack(q)
    assert bool((packed["qzeros"] == 0x88888888 - 2**32).all())
    asymmetric = LAYOUTS[layout].unpack(packed, Scheme.parse("int4:g64:asym"))
    assert torch.equal(asymmetric.dequantize(), q.dequantize()) and bool((asymmetric.zeros == 8).all())
    asymmetric.zeros[77, 1] = 7
    refused(layout, LAYOUTS[layout].pack(asymmetric), q.scheme, "row 77, group 1 is 7, not 8")


@pytest.mark.parametrize("label", ["int4:g64:asym", "int4:g64"])
def test_copies_of_quick_of_a_scale_or_zero_point_that_differ_are_refused(label: str) -> None:
    q = record(Scheme.parse(label), 256, 128)
    q.scales[5, 1] = 0.0
    packed = LAYOUTS["quick"].pack(q)
    for place in (0, 1, 700):
        scales = packed["scales"].clone()
        scales.view(-1).view(torch.int16)[place] ^= 1
        refused("quick", {**packed, "scales": scales}, q.scheme, "'scales' holds every entry twice")
    sign = packed["scales"].clone()
    sign.view(-1)[int((sign.view(torch.int16) == 0).flatten().nonzero()[0])] = -0.0  # equal as numbers
    refused("quick", {**packed, "scales": sign}, q.scheme, "'scales' holds every entry twice")
    for nibble in range(8):
        zeros = packed["qzeros"].clone()
        zeros[1, 33] ^= 1 << (4 * nibble) if nibble < 7 else -(1 << 31)
        refused("quick", {**packed, "qzeros": zeros}, q.scheme, "'qzeros' holds every entry twice")


def test_a_stored_gptq_v1_zero_point_of_15_is_refused() -> None:
    q, packed = sample("gptq", "int4:g64:asym")
    packed["qzeros"][1, 2] = -1
    refused("gptq", packed, q.scheme, "15 means 16")
    assert LAYOUTS["gptq-v2"].unpack(packed, q.scheme).zeros.max() == 15


@pytest.mark.parametrize("layout", ["gptq", "gptq-v2", "compressed-tensors"])
def test_act_order_is_read_only_if_static(layout: str) -> None:
    name = "weight_g_idx" if layout == "compressed-tensors" else "g_idx"
    for label in ("int4:g64", "int4:channel"):
        q, packed = sample(layout, label)
        natural = torch.arange(256, dtype=torch.int32) // (q.scheme.group_size or 256)
        assert LAYOUTS[layout].unpack({**packed, name: natural}, q.scheme).equal(q)
        for wrong in (natural.flip(0), natural + 1, -natural - 1, torch.arange(256, dtype=torch.int32)):
            if not torch.equal(wrong, natural):
                refused(layout, {**packed, name: wrong}, q.scheme, "g_idx", "act-order")
    without = {k: t for k, t in packed.items() if k != name}
    assert LAYOUTS[layout].unpack(without, q.scheme).equal(q)


def test_hostile_weight_shapes_of_compressed_tensors_are_refused() -> None:
    q, packed = sample("compressed-tensors", "int4:channel", 5, 100)
    for shape in ((5, 97), (5, 104)):  # the same number of words: the padding decides
        packed["weight_shape"] = torch.tensor(shape)
        if shape == (5, 97):
            refused("compressed-tensors", packed, q.scheme, "past its true shape")
    for shape in ((5, 96), (4, 100), (100, 5), (-5, 100), (5, 0), (0, 0), (2**62, 100), (5, 2**63 - 1), (-(2**63), 1)):
        packed["weight_shape"] = torch.tensor(shape)
        refused("compressed-tensors", packed, q.scheme)


def test_codes_and_zero_points_past_the_true_shape_must_be_0() -> None:
    q, packed = sample("compressed-tensors", "int4:channel:asym", 13, 100)
    for name in ("weight_packed", "weight_zero_point"):
        damaged = {**packed, name: packed[name].clone()}
        damaged[name][-1, -1] |= -0x80000000
        refused("compressed-tensors", damaged, q.scheme, name, "past its true shape")


@pytest.mark.parametrize(
    ("label", "value"),
    [
        *(("fp6", 0.1171875), ("fp6", 30.0), ("fp5", 28.0), ("fp5", 0.0625)),
        *(("fp6-e2m3", 8.0), ("fp6-e2m3", 0.0625), ("fp5-e2m2", 7.5), ("fp5-e2m2", 0.125)),
    ],
)
def test_fp8_values_off_the_grid_of_the_format_are_refused(label: str, value: float) -> None:
    q, packed = sample("compressed-tensors", label)
    packed["weight"][2, 5] = torch.tensor(value).to(torch.float8_e4m3fn)
    refused("compressed-tensors", packed, q.scheme, "at [2, 5]", f"no {label} value")
    packed["weight"].view(torch.uint8)[2, 5] = 0x7F
    refused("compressed-tensors", packed, q.scheme, "nan")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_views_are_packed_and_unpacked(layout: str) -> None:
    q, packed = sample(layout)
    odd = QuantizedTensor(q.scheme, q.codes.t().contiguous().t(), q.scales.t().contiguous().t())
    for name, tensor in LAYOUTS[layout].pack(odd).items():
        assert torch.equal(tensor.view(torch.uint8), packed[name].view(torch.uint8))
        assert tensor.is_contiguous()
    strided = {name: t.t().contiguous().t() if t.ndim == 2 else t for name, t in packed.items()}
    assert LAYOUTS[layout].unpack(strided, q.scheme).equal(q)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_record_never_shares_memory_with_a_file(layout: str) -> None:
    q, packed = sample(layout)
    back = LAYOUTS[layout].unpack(packed, q.scheme)
    before = back.digest()
    for tensor in packed.values():
        tensor.view(torch.uint8).zero_()
    assert back.digest() == before
    assert q.equal(back)
