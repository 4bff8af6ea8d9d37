"""The laws of every layout: packing loses nothing, repeats itself byte for byte, and refuses what `check` refuses.

Bytes are compared with the slow packers of `oracle.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantkit.core.scheme import Scheme
from quantkit.errors import LayoutError
from quantkit.layouts import LAYOUTS, arrangement
from quantkit.layouts.arrangement import Arrangement
from tests.layouts import oracle
from tests.layouts.laws import UNITS, obeys, rows, same_bytes
from tests.layouts.samples import CASES, HELD, record


@pytest.mark.parametrize(("layout", "label"), [(layout, label) for layout, held in HELD.items() for label in held[0]])
def test_blocks_of_rows_in_any_order_and_of_any_size_give_the_same_bytes(
    layout: str, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block may be smaller, and no block changes memory outside of its rows."""
    module, scheme, unit = LAYOUTS[layout], Scheme.parse(label), UNITS[layout][0]
    k = 253 if layout == "compressed-tensors" and label.startswith("int") and ":channel" in label else 256
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


@pytest.mark.parametrize("label", ["fp6:channel", "fp5:channel"])
@pytest.mark.parametrize(("n", "k", "rows_at_once"), [(7, 96, 3), (9, 32, 1), (5, 160, 5)])
def test_humming_rows_of_an_odd_number_of_words(
    label: str, n: int, k: int, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrangement, "BLOCK", rows_at_once * k)
    q = record(Scheme.parse(label), n, k, lowest_zero=1)
    packed = LAYOUTS["humming"].pack(q)
    assert rows(packed["weight"]) == oracle.streams(q.codes.tolist(), q.scheme.format.bits)
    assert LAYOUTS["humming"].unpack(packed, q.scheme).equal(q)


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
    assert {name: rows(t) for name, t in packed.items()} == expected
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
    ("compressed-tensors", "fp5:g32", 4, 32, "one scale per row", "--group-size channel"),
    ("gptq", "int4:channel", 40, 128),
    ("gptq-v2", "int4:channel", 64, 136),
    ("gptq", "fp6", 64, 128, "int4, not fp6", "--layout"),
    ("humming", "fp6", 4, 48, "multiple of 32", "48", "--layout compressed-tensors"),
    ("humming", "int4:g48", 4, 96),
    ("humming", "int4:channel:asym", 4, 64),
    ("humming", "fp6-e2m3", 4, 64),
    ("humming", "fp5-e2m2", 4, 32, "fp6, fp5 and integers, not fp5-e2m2", "--layout compressed-tensors"),
    ("tcfpx", "int4", 64, 64),
    ("tcfpx", "fp6", 96, 64, "n to be a multiple of 64", "96", "--layout compressed-tensors"),
    ("tcfpx", "fp5-e2m2", 64, 96),
    ("tcfpx", "fp6-e2m3:g64", 64, 64),
    ("awq", "int4:channel", 12, 64, "n to be a multiple of 8", "12", "--layout compressed-tensors"),
    ("awq", "int4:g48:asym", 8, 64),
    ("awq", "fp6", 64, 128),
    ("quick", "int4:channel:asym", 128, 128, "one scale per row", "--group-size 128"),
    ("quick", "int4:g16", 128, 128, "multiple of 32", "16", "--layout awq"),
    ("quick", "int4:g48", 128, 96),
    ("quick", "int4:g128:asym", 64, 128),
    ("quick", "int4:g32", 192, 128),
    ("quick", "fp6", 128, 128),
    ("marlin", "int4", 32, 128),
    ("marlin", "int4", 96, 128, "n to be a multiple of 64", "96", "--skip"),
    ("marlin", "int4", 64, 100, "k to be a multiple of 128", "100"),
    ("marlin", "int4", 64, 192),
    ("marlin", "int4:g64", 64, 128, "groups of 128", "--group-size 128 or channel"),
    ("marlin", "int4:g256", 64, 256),
    ("marlin", "int4:g128:asym", 64, 128, "symmetric", "--layout gptq-v2"),
    ("marlin", "fp6", 64, 128),
    *[
        (name, label, n, k, *words)
        for name in ("marlin24", "marlin24-ct")
        for label, n, k, *words in (
            ("int4:g128", 128, 128, "two of four", "--prune 2:4", "--layout marlin"),
            ("int4:channel", 128, 128),
            ("int4:g64:24", 128, 128, "groups of 128", "--group-size 128 or channel"),
            ("int4:g256:24", 128, 256),
            ("int4:channel:24", 64, 128),
            ("int4:channel:24", 192, 128, "n to be a multiple of 128", "192", "--skip"),
            ("int4:channel:24", 128, 192),
            ("int4:g128:asym", 128, 128),
            ("fp6", 128, 128),
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


@pytest.mark.parametrize(("layout", "label", "n", "k"), [case for case in CASES if case[2] * case[3] <= 64 * 128])
def test_every_changed_nibble_is_refused_or_changes_the_record(layout: str, label: str, n: int, k: int) -> None:
    q = record(Scheme.parse(label), n, k, lowest_zero=1)
    packed = LAYOUTS[layout].pack(q)
    random = torch.Generator().manual_seed(n + k)
    for name, tensor in packed.items():
        stored = tensor.view(torch.uint8).view(-1)  # shares memory with what is unpacked
        picked = torch.randperm(2 * stored.numel(), generator=random)[:40].tolist()
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
