"""2:4 weights: the published encoding and orders, both variants of Sparse-MARLIN, and damaged metadata."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.core.formats import INT4
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import LayoutError
from quantkit.layouts import LAYOUTS, marlin
from quantkit.layouts.arrangement import Arrangement
from tests.golden import both_ways, golden
from tests.layouts.samples import record

GROUPS, ROWS = Scheme.parse("int4:g128:24"), Scheme.parse("int4:channel:24")
VARIANTS = ("marlin24", "marlin24-ct")
META = {"marlin24": "B_meta", "marlin24-ct": "meta"}
VALID = (0x4, 0x8, 0x9, 0xC, 0xD, 0xE)
TABLE = {
    (): 0xE, (0,): 0x8, (1,): 0x9, (2,): 0xE, (3,): 0xE,
    (0, 1): 0x4, (0, 2): 0x8, (0, 3): 0xC, (1, 2): 0x9, (1, 3): 0xD, (2, 3): 0xE,
}  # fmt: skip


@pytest.mark.parametrize("layout", VARIANTS)
def test_published_sparse_marlin_cases_in_both_directions(layout: str) -> None:
    file = golden("sparse_marlin")
    seen = []
    for case in file.cases:
        codes = file(case, "codes").t().contiguous()
        for scales, s, group in (("scales_g128", "s_g128", 128), ("scales_pc", "s_pc", None), ("scales", "s", 0)):
            if file(case, scales) is None:
                continue
            group = 128 if group == 0 and file.cases[case]["group_size"] == 128 else group or None
            scheme = Scheme(INT4, group, sparsity="2:4")
            q = QuantizedTensor(scheme, codes, file(case, scales).t().contiguous())
            tensors = (file(case, name) for name in ("B_24", "B_meta", s))
            both_ways(layout, q, dict(zip(LAYOUTS[layout].TENSORS, tensors, strict=True)))
            seen.append((case, scales))
    assert {case for case, _ in seen} == set(file.cases)
    assert any("kept_zero" in case for case, _ in seen) and any("zero_rows" in case for case, _ in seen)


def test_the_encoding_of_pytorch_chooses_the_same_places() -> None:
    """PyTorch stores metadata in the order of CUTLASS (docs/layouts.md 4.3); the encoding of a quad is the same."""
    orders = {
        torch.int16: Arrangement("M r4:2 r3:2 r2:2 r1:2 r0:2", "C d:2 q:4", "C M r2 r1 r0 r4 d r3 q"),
        torch.int32: Arrangement("M r3:2 r2:2 r1:2 r0:2", "C d:2 q:8", "C M r2 r1 r0 d r3 q"),
    }
    file = golden("meta_24_cutlass")
    for case, info in file.cases.items():
        dense, meta = (file(case, name) for name in ("dense", "meta"))
        assert meta.dtype == getattr(torch, info["meta"])
        kept, metadata = marlin.compress((dense != 0).to(torch.uint8), 0)
        assert torch.equal(orders[meta.dtype].pack(metadata, 4).view(meta.dtype).view(meta.shape), meta), case
        assert torch.equal(kept.bool(), file(case, "values") != 0), case


def every_quad(zero: int) -> tuple[Tensor, Tensor]:
    """All quads of four-bit codes `[65536, 4]`, and which of them have at most two codes other than `zero`."""
    number = torch.arange(1 << 16)
    quads = torch.stack([number >> 4 * i & 15 for i in range(4)], 1).to(torch.uint8)
    return quads, (quads != zero).sum(1) <= 2


@pytest.mark.parametrize("zero", [0, 8])
def test_every_quad_follows_the_table_and_comes_back(zero: int) -> None:
    every, legal = every_quad(zero)
    quads = every[legal]
    kept, metadata = marlin.compress(quads, zero)
    pairs = kept.tolist()
    for quad, pair, code in zip(quads.tolist(), pairs, metadata.view(-1).tolist(), strict=True):
        assert code == TABLE[tuple(i for i in range(4) if quad[i] != zero)]
        assert pair == [quad[code & 3], quad[code >> 2]]
    back = torch.empty_like(quads)
    marlin.expand(kept, metadata, zero, out=back)
    assert torch.equal(back, quads)


@pytest.mark.parametrize("zero", [0, 8])
def test_three_or_four_nonzero_codes_are_refused_with_the_first_place(zero: int) -> None:
    every, legal = every_quad(zero)
    first = int((~legal).int().argmax())
    match = f"{int((~legal).sum())} of {len(every)} quads .* row {first}, columns 0 to 3: this is no 2:4 weight"
    with pytest.raises(LayoutError, match=match):
        marlin.compress(every, zero)
    with pytest.raises(LayoutError, match="multiple of 4"):
        marlin.compress(torch.full((2, 6), zero, dtype=torch.uint8), zero)


@pytest.mark.parametrize("layout", VARIANTS)
@pytest.mark.parametrize("code", [code for code in range(16) if code not in VALID])
def test_metadata_that_does_not_describe_two_of_four_is_refused(layout: str, code: int) -> None:
    q = record(GROUPS, 128, 256)
    packed = LAYOUTS[layout].pack(q)
    words = packed[META[layout]].view(-1)
    word = int(words[77]) & 0xFFFF
    word = word & ~(15 << 8) | code << 8  # the third quad of row 13, column block 0
    words[77] = word - (word >> 15 << 16)
    with pytest.raises(LayoutError) as refusal:
        LAYOUTS[layout].unpack(packed, q.scheme)
    message = str(refusal.value)
    assert "does not describe two of four" in message and f"first {code:X} at row" in message and "\n" not in message
    row, column = 64 * 0 + 8 * (77 % 64 // 8) + 4 * (77 & 1) + 2 * (77 // 64) + (77 >> 2 & 1), 16 * (77 >> 1 & 1) + 8
    assert f"row {row}, columns {column} to {column + 3}" in message
