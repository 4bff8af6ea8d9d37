"""2:4 weights: the published encoding and orders, the Sparse-MARLIN tensors in both spellings, and damaged metadata."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit.core.formats import INT4
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, LayoutError
from quantkit.layouts import LAYOUTS, marlin24, read_config, sparse24
from quantkit.layouts.schemes import Schemes
from tests.layouts import oracle
from tests.layouts.samples import expanded, record
from tests.layouts.test_golden import both_ways, golden

GROUPS, ROWS = Scheme.parse("int4:g128:24"), Scheme.parse("int4:channel:24")
SPELLINGS = ("marlin24", "marlin24-ct")
META = {"marlin24": "B_meta", "marlin24-ct": "meta"}
VALID = (0x4, 0x8, 0x9, 0xC, 0xD, 0xE)
TABLE = {
    (): 0xE, (0,): 0x8, (1,): 0x9, (2,): 0xE, (3,): 0xE,
    (0, 1): 0x4, (0, 2): 0x8, (0, 3): 0xC, (1, 2): 0x9, (1, 3): 0xD, (2, 3): 0xE,
}  # fmt: skip


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def tensors_of(layout: str, b_24: Tensor, b_meta: Tensor, s: Tensor) -> dict[str, Tensor]:
    return dict(zip(LAYOUTS[layout].TENSORS, (b_24, b_meta, s), strict=True))


# ----------------------------------------------------------------------------------------------------- golden files


@pytest.mark.parametrize("layout", SPELLINGS)
def test_every_published_sparse_marlin_case_in_both_directions(layout: str, shared: Path) -> None:
    file = golden(shared, "sparse_marlin")
    seen = []
    for case in file.cases:
        codes = file(case, "codes").t().contiguous()
        for scales, s, group in (("scales_g128", "s_g128", 128), ("scales_pc", "s_pc", None), ("scales", "s", 0)):
            if file(case, scales) is None:
                continue
            group = 128 if group == 0 and file.cases[case]["group_size"] == 128 else group or None
            scheme = Scheme(INT4, group, sparsity="2:4")
            q = QuantizedTensor(scheme, codes, file(case, scales).t().contiguous())
            both_ways(layout, q, tensors_of(layout, file(case, "B_24"), file(case, "B_meta"), file(case, s)))
            seen.append((case, scales))
    assert {case for case, _ in seen} == set(file.cases) and len(seen) == 16
    assert any("kept_zero" in case for case, _ in seen) and any("zero_rows" in case for case, _ in seen)


def test_the_standard_encoding_and_metadata_order_of_pytorch_in_both_directions(shared: Path) -> None:
    file = golden(shared, "meta_24_cutlass")
    for case, info in file.cases.items():
        dense, values, meta = (file(case, name) for name in ("dense", "values", "meta"))
        dtype = getattr(torch, info["meta"])
        assert meta.dtype == dtype
        codes = sparse24.encode(dense)
        kept = sparse24.compress(dense, codes)
        assert torch.equal(bits(kept), bits(values)), case
        words = sparse24.pack_codes(codes, sparse24.CUTLASS[dtype], dtype).view(meta.shape)
        assert torch.equal(words, meta) and words.dtype == meta.dtype, case
        found = sparse24.unpack_codes(meta, sparse24.CUTLASS[dtype], tuple(dense.shape))
        assert torch.equal(found, codes)
        back = sparse24.expand(values, found)
        assert torch.equal(back, dense)
        survivors = back != 0
        assert torch.equal(bits(back[survivors]), bits(dense[survivors]))


def test_the_worked_example_of_the_documentation() -> None:
    k, n = torch.meshgrid(torch.arange(128), torch.arange(256), indexing="ij")
    codes = (k + 3 * (k // 8) + 5 * n + 7 * (n // 8)) % 16
    codes[(k % 4) % 2 != n % 2] = 8
    q = QuantizedTensor(ROWS, codes.to(torch.uint8).t().contiguous(), torch.ones(256, 1, dtype=torch.float16))
    packed = marlin24.pack(q)
    words = [[f"{word & 0xFFFFFFFF:08x}" for word in row] for row in packed["B_24"].tolist()]
    meta = [[f"{word & 0xFFFF:04x}" for word in row] for row in packed["B_meta"].tolist()]
    assert words[0][:4] == ["c682a460", "2ce80ac6", "602c4e0a", "c682a460"]
    assert words[0][16] == "b571935f" and words[1][0] == "824e602c"
    assert meta[0][:8] == ["8888", "88e8", "8888", "8888", "ddd9", "dddd", "dddd", "dddd"]
    assert meta[0][64:68] == ["8888", "8888", "8888", "88e8"]


# ----------------------------------------------------------------------------------------------------- the encoding


def test_every_pattern_of_a_quad_follows_the_table_and_three_or_four_are_refused() -> None:
    for pattern in range(16):
        places = tuple(i for i in range(4) if pattern >> i & 1)
        values = torch.zeros(3, 8)
        values[1, [4 + i for i in places]] = -1.5
        if len(places) > 2:
            with pytest.raises(LayoutError, match=r"1 of 6 quads .* row 1, columns 4 to 7.* prune"):
                sparse24.encode(values)
        else:
            assert sparse24.encode(values).tolist() == [[0xE, 0xE], [0xE, TABLE[places]], [0xE, 0xE]]


@st.composite
def sparse(draw: st.DrawFn) -> Tensor:
    """A 2:4 matrix of one of the dtypes that are compressed, with zeros of both signs and patterns of every kind."""
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.int8, torch.uint8]))
    n, quads_in_row = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    words = torch.randint(-(2**15), 2**15, (n, 4 * quads_in_row), generator=random, dtype=torch.int16)
    values = words.view(dtype) if dtype.is_floating_point else words.to(dtype)
    order = torch.rand(n, quads_in_row, 4, generator=random).argsort(-1).view(n, -1)
    keep = torch.randint(0, 3, (n, quads_in_row), generator=random).repeat_interleave(4, 1)
    values = values.masked_fill(order >= keep, 0)
    if dtype.is_floating_point:
        values[(values == 0) & (torch.rand(values.shape, generator=random) < 0.3)] = -0.0
    if draw(st.booleans()):
        values = values.t().contiguous().t()
    return values


@settings(max_examples=150)
@given(sparse())
def test_random_sparse_values_follow_the_table_and_come_back_to_the_bit(values: Tensor) -> None:
    codes = sparse24.encode(values)
    kept = sparse24.compress(values, codes)
    back = sparse24.expand(kept, codes)
    sparse24.check(codes)
    rows, found, chosen = values.tolist(), codes.tolist(), torch.empty_like(kept)
    for n, row in enumerate(rows):
        for t in range(len(row) // 4):
            places = tuple(i for i in range(4) if row[4 * t + i] != 0)
            assert found[n][t] == TABLE[places]
            first, second = found[n][t] & 3, found[n][t] >> 2
            chosen[n, 2 * t : 2 * t + 2] = values[n, [4 * t + first, 4 * t + second]]
    assert torch.equal(bits(kept), bits(chosen))  # a kept -0.0 and the payload of a NaN too
    alive = values != 0
    assert torch.equal(bits(back[alive]), bits(values[alive])) and not bool((back[~alive] != 0).any())
    assert torch.equal(sparse24.encode(back), codes)


@pytest.mark.parametrize("zero", [0, 8])
def test_the_table_of_four_bit_quads_has_what_is_computed_and_nothing_for_three_or_four(zero: int) -> None:
    number = torch.arange(1 << 16)
    every = torch.stack([number >> 4 * i & 15 for i in range(4)], 1).to(torch.uint8)
    legal = (every != zero).sum(1) <= 2
    codes = sparse24.encode(every[legal], zero)
    kept, found = sparse24.compress4(every[legal], zero)
    assert torch.equal(found, codes) and torch.equal(kept, sparse24.compress(every[legal], codes))
    assert torch.equal(expanded(kept, codes, zero), every[legal])
    with pytest.raises(
        LayoutError,
        match=f"{int((~legal).sum())} of {len(every)} quads .* row {int((~legal).int().argmax())}, columns 0 to 3",
    ):
        sparse24.compress4(every, zero)
    pairs = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)
    for code in VALID:  # also where a kept value is zero, so that the code is not the one of the values
        codes = torch.full((256, 1), code, dtype=torch.uint8)
        assert torch.equal(expanded(pairs, codes, zero), sparse24.expand(pairs, codes, zero))


def test_four_bit_quads_that_are_no_memory_of_their_own() -> None:
    q = record(GROUPS, 128, 256).codes
    inside = torch.full((130, 261), 3, dtype=torch.uint8)
    inside[1:129, 5:] = q
    for values in (inside[1:129, 5:], q.t().contiguous().t()):
        for found, expected in zip(sparse24.compress4(values, 8), sparse24.compress4(q, 8), strict=True):
            assert torch.equal(found, expected)


@settings(max_examples=60)
@given(st.sampled_from([*sparse24.CUTLASS, None]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32))
def test_metadata_words_hold_the_codes_where_the_formulas_say(
    standard: torch.dtype | None, rows: int, columns: int, seed: int
) -> None:
    dtype = standard or torch.int16
    per_word = {torch.int16: 4, torch.int32: 8}[dtype]
    m_all = rows * (64 if standard is None else 8 * per_word if per_word == 4 else 16)
    c_all = 2 * columns
    random = torch.Generator().manual_seed(seed)
    codes = torch.tensor(VALID, dtype=torch.uint8)[torch.randint(0, 6, (m_all, c_all * per_word), generator=random)]
    expected = [0] * (m_all * c_all)
    for r in range(m_all):
        b = [r >> i & 1 for i in range(6)]
        for c in range(c_all):
            if standard is None:
                column = 128 * (r // 64) + 64 * b[1] + 8 * ((r >> 3) & 7) + 4 * b[0] + 2 * (c & 1) + b[2]
                flat = (c // 2) * 2 * m_all + column
            elif dtype == torch.int16:
                place = 32 * (r // 32) + 16 * b[2] + 8 * b[1] + 4 * b[0] + 2 * b[4] + (c & 1)
                flat = (c // 2) * 2 * m_all + 2 * place + b[3]
            else:
                place = 16 * (r // 16) + 8 * b[2] + 4 * b[1] + 2 * b[0] + (c & 1)
                flat = (c // 2) * 2 * m_all + 2 * place + b[3]
            quad = codes[r, c * per_word : (c + 1) * per_word].tolist()
            expected[flat] = sum(code << 4 * i for i, code in enumerate(quad))
    order = sparse24.SPARSE_MARLIN if standard is None else sparse24.CUTLASS[dtype]
    words = sparse24.pack_codes(codes, order, dtype)
    assert words.dtype == dtype and [w & (1 << 4 * per_word) - 1 for w in words.tolist()] == expected
    assert torch.equal(sparse24.unpack_codes(words, order, (m_all, 4 * c_all * per_word)), codes)


@pytest.mark.parametrize(
    ("dtype", "m", "k"), [(torch.int16, 16, 32), (torch.int16, 32, 16), (torch.int32, 8, 64), (torch.int32, 16, 32)]
)
def test_sizes_that_the_standard_order_cannot_move_are_refused(dtype: torch.dtype, m: int, k: int) -> None:
    with pytest.raises(LayoutError, match="multiple of"):
        sparse24.pack_codes(torch.full((m, k // 4), 0xE, dtype=torch.uint8), sparse24.CUTLASS[dtype], dtype)
    with pytest.raises(LayoutError, match="multiple of 4"):
        sparse24.encode(torch.zeros(m, k + 2))


# -------------------------------------------------------------------------------------------------- damage and reading


@pytest.mark.parametrize("layout", SPELLINGS)
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


@pytest.mark.parametrize("place", range(8))
def test_a_wrong_code_is_seen_in_every_place_of_a_word(place: int) -> None:
    shape = (64, 32)
    for code in range(16):
        words = torch.full((64,), -0x77777778, dtype=torch.int32)  # eight times the code 8
        words[63] = words[63] & ~(15 << 4 * place) | code << 4 * place
        if code in VALID:
            sparse24.unpack_codes(words, sparse24.SPARSE_MARLIN, shape)
        else:
            with pytest.raises(LayoutError, match=f"1 codes are none .* first {code:X} at row"):
                sparse24.unpack_codes(words, sparse24.SPARSE_MARLIN, shape)


@pytest.mark.parametrize("layout", SPELLINGS)
def test_metadata_made_from_a_pruning_mask_gives_the_same_values(layout: str) -> None:
    """A kept code that is zero leaves several pairs of places; readers go by the one that is stored."""
    q = record(ROWS, 128, 128, seed=3)
    values = q.codes ^ 8
    ours = sparse24.encode(values)
    mask = torch.zeros_like(values)
    mask.view(-1, 4).scatter_(1, (values.view(-1, 4) != 0).int().argsort(-1, descending=True)[:, :2], 1)
    theirs = sparse24.encode(mask)
    assert not torch.equal(ours, theirs)
    kept = sparse24.compress(values, theirs) ^ 8
    b_24 = marlin24.KEPT.pack(kept, 4).view(4, 256)
    meta = sparse24.pack_codes(theirs, sparse24.SPARSE_MARLIN, torch.int16).view(4, 256)
    foreign = tensors_of(layout, b_24, meta, q.scales.t().contiguous())
    back = LAYOUTS[layout].unpack(foreign, q.scheme)
    assert back.equal(q)
    again = LAYOUTS[layout].pack(back)
    assert not torch.equal(again[META[layout]], meta)  # which `verify` reports
    assert LAYOUTS[layout].unpack(again, q.scheme).equal(q)


@pytest.mark.parametrize("layout", SPELLINGS)
def test_every_changed_nibble_is_refused_changes_the_record_or_packs_to_other_bytes(layout: str) -> None:
    q = record(GROUPS, 128, 128)
    packed = LAYOUTS[layout].pack(q)
    random = torch.Generator().manual_seed(5)
    refused = 0
    for tensor in packed.values():
        stored = bits(tensor).view(-1)  # shares memory with what is unpacked
        for place in torch.randperm(2 * stored.numel(), generator=random)[:60].tolist():
            change = int(torch.randint(1, 16, (), generator=random)) << 4 * (place % 2)
            stored[place // 2] ^= change
            try:
                back = LAYOUTS[layout].unpack(packed, q.scheme)
            except LayoutError:
                refused += 1
            else:
                again = LAYOUTS[layout].pack(back)
                same = all(torch.equal(bits(again[name]), bits(t)) for name, t in packed.items())
                assert not back.equal(q) or not same
            stored[place // 2] ^= change
    assert refused > 10


def test_codes_of_a_record_that_were_changed_to_three_of_four_are_not_packed() -> None:
    q = record(GROUPS, 128, 128)
    q.codes[5, 8:11] = 3
    with pytest.raises(LayoutError, match="row 5, columns 8 to 11"):
        marlin24.pack(q)


def test_one_group_is_stored_as_it_is_whatever_the_configured_size() -> None:
    q = record(GROUPS, 128, 128)
    assert torch.equal(marlin24.pack(q)["s"], q.scales.t())
    two = record(GROUPS, 128, 256)
    for layout in SPELLINGS:  # k = 256 too, where the library's own writer left them as they were
        s = list(LAYOUTS[layout].pack(two).values())[2]
        assert s[1, :8].tolist() == two.scales[[0, 4, 1, 5, 2, 6, 3, 7], 1].tolist()


def test_the_two_spellings_hold_the_same_bytes() -> None:
    q = record(GROUPS, 256, 256)
    ours, theirs = (list(LAYOUTS[layout].pack(q).values()) for layout in SPELLINGS)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(ours, theirs, strict=True))
    rows = oracle.sparse_marlin(q.codes.tolist())
    assert (ours[0].long() & 0xFFFFFFFF).tolist() == rows[0] and (ours[1].long() & 0xFFFF).tolist() == rows[1]


# ------------------------------------------------------------------------------------------------------------ configs


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


def said(config: dict[str, Any]) -> tuple[str, Schemes]:
    layout, schemes = read_config(config, "config.json")
    return layout.NAME, schemes


def refused(config: dict[str, Any], *words: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        read_config(config, "config.json")
    assert "\n" not in str(refusal.value) and all(word in str(refusal.value) for word in words), str(refusal.value)


def test_configs_of_sparse_marlin_under_every_name_that_readers_give_it() -> None:
    dense_head = Schemes(GROUPS, ignore=("lm_head",))
    assert marlin24.write_config(dense_head) == {**GPTQ, "checkpoint_format": "marlin_24", "lm_head": False}
    for config in (
        {**GPTQ, "checkpoint_format": "marlin_24"},
        {**GPTQ, "format": "marlin_24"},
        {"quant_method": "gptq_marlin_24", "bits": 4, "group_size": 128},
    ):
        assert said(config) == ("marlin24", dense_head)
    assert said({**GPTQ, "group_size": -1, "format": "marlin_24", "lm_head": True}) == ("marlin24", Schemes(ROWS))
    for change in ({"bits": 8}, {"group_size": 64}, {"sym": False}):
        refused({**GPTQ, "checkpoint_format": "marlin_24", **change}, "Sparse-MARLIN")
    refused({**GPTQ, "checkpoint_format": "marlin_24", "format": "gptq"}, "contradicts")
    assert said({**GPTQ, "checkpoint_format": "marlin"})[0] == "marlin"
    assert said(GPTQ)[0] == "gptq"


def foreign_ct(**weights: Any) -> dict[str, Any]:
    """As the library wrote it: the format stands at the top only."""
    config = copy.deepcopy(LAYOUTS["marlin24-ct"].write_config(Schemes(GROUPS, ignore=("lm_head",))))
    assert config["config_groups"]["group_0"].pop("format") == config["format"] == "marlin-24"
    config["config_groups"]["group_0"]["weights"].update(weights)
    return config


def test_configs_of_the_compressed_tensors_spelling_are_read_as_the_library_wrote_them() -> None:
    head = ("lm_head",)
    assert said(foreign_ct()) == ("marlin24-ct", Schemes(GROUPS, ignore=head))
    assert said(foreign_ct(strategy="channel", group_size=None)) == ("marlin24-ct", Schemes(ROWS, ignore=head))
    sparsity = {"format": "dense", "sparsity_structure": "2:4", "targets": ["Linear"]}
    assert said({**foreign_ct(), "sparsity_config": sparsity})[0] == "marlin24-ct"
    refused({**foreign_ct(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask")
    refused(foreign_ct(group_size=64), "groups of 128")
    refused(foreign_ct(symmetric=False), "symmetric only")
    refused(foreign_ct(num_bits=8), "int8", "marlin-24")
    refused({**foreign_ct(), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme")
    assert said({**foreign_ct(), "format": "pack-quantized"})[0] == "compressed-tensors"
    mixed = Schemes(GROUPS, ((r".*\.q_proj", ROWS),), head)
    assert said(LAYOUTS["marlin24-ct"].write_config(mixed))[1].of("model.layers.0.self_attn.q_proj") == ROWS


@pytest.mark.parametrize("layout", SPELLINGS)
def test_schemes_that_are_not_2_of_4_get_no_config(layout: str) -> None:
    for label in ("int4:g128", "int4:channel", "int4:g64:24", "int4:g128:asym", "fp6"):
        with pytest.raises(LayoutError):
            LAYOUTS[layout].write_config(Schemes(GROUPS, ((r"x", Scheme.parse(label)),)))
