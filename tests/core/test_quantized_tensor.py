"""Schemes and the record: contradictions are refused, values are rounded once, the digest sees every bit."""

from __future__ import annotations

import hashlib

import pytest
import torch

from quantkit.core.formats import FORMATS, FP6, INT4
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import LayoutError, QuantkitError, RecipeError, about

LABELS = ["int4:g128", "int4:channel", "int4:g32:asym", "int4:channel:asym", "int4:g128:24", "fp6:channel", "fp5:g64"]


def codes(n: int = 4, k: int = 8, top: int = 16) -> torch.Tensor:
    return torch.randint(0, top, (n, k), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def scales(n: int = 4, g: int = 1) -> torch.Tensor:
    return torch.rand(n, g, generator=torch.Generator().manual_seed(1)).half()


def test_a_record_that_contradicts_its_scheme_is_refused() -> None:
    asym = Scheme(INT4, 4, symmetric=False)
    zeros = codes(4, 2)
    QuantizedTensor(asym, codes(), scales(4, 2), zeros)
    for arguments, rule in (
        ((Scheme(INT4), codes().int(), scales()), "codes must be uint8"),
        ((Scheme(INT4), codes()[0], scales()), "codes must be uint8"),
        ((Scheme(INT4), codes(top=16) + 8, scales()), "codes reach"),
        ((Scheme(FP6), torch.full((4, 8), 64, dtype=torch.uint8), scales()), "codes reach 64, fp6 has 0 to 63"),
        ((Scheme(INT4), codes(), scales().float()), "scales must be float16"),
        ((Scheme(INT4), codes(), scales(4, 2)), r"scales must be float16 \[4, 1\]"),
        ((Scheme(INT4), codes(), scales(4, 1)[:, 0]), "scales must be float16"),
        ((Scheme(INT4, 3), codes(), scales(4, 2)), "does not divide"),
        ((Scheme(INT4), codes(), scales(), codes(4, 1)), "zeros belong"),
        ((asym, codes(), scales(4, 2)), "zeros belong"),
        ((asym, codes(), scales(4, 2), zeros.int()), "zeros must be uint8"),
        ((asym, codes(), scales(4, 2), zeros[:, :1]), "zeros must be uint8"),
        ((asym, codes(), scales(4, 2), zeros + 16), "zeros reach"),
    ):
        with pytest.raises(LayoutError, match=rule):
            QuantizedTensor(*arguments)


def test_a_2_4_record_has_at_most_two_nonzero_codes_in_each_quad() -> None:
    sparse = Scheme(INT4, sparsity="2:4")
    mask = torch.tensor([True, False, False, True]).repeat(4, 2)
    pruned = codes().masked_fill(~mask, INT4.zero_code)
    assert bool((QuantizedTensor(sparse, pruned, scales()).dequantize()[~mask] == 0).all())
    QuantizedTensor(sparse, torch.full_like(pruned, 8), scales())  # fewer than two are legal
    three = pruned.clone()
    three[2, 4:7] = torch.tensor([1, 2, 3])
    with pytest.raises(LayoutError, match=r"1 of 8 quads .* first row 2, columns 4 to 7"):
        QuantizedTensor(sparse, three, scales())
    with pytest.raises(LayoutError, match="multiple of 4, and it is 6"):
        QuantizedTensor(sparse, pruned[:, :6], scales())
    for fmt, symmetric in ((INT4, False), (FORMATS["fp6"], True)):
        with pytest.raises(RecipeError, match="symmetric integers only"):
            Scheme(fmt, symmetric=symmetric, sparsity="2:4")


@pytest.mark.parametrize("label", ["int4:g4", "int4:channel", "int4:g2:asym", "fp6:channel", "fp5:g8"])
def test_dequantize_is_scale_times_value_minus_zero_rounded_once(label: str) -> None:
    scheme = Scheme.parse(label)
    c, g = codes(5, 8, 2**scheme.format.bits), scheme.groups(8)
    s = scales(5, g)
    z = None if scheme.symmetric else codes(5, g)
    values = scheme.format.values
    zero = [[0.0] * g] * 5 if z is None else [[values[code] for code in row] for row in z.tolist()]
    expected = [[float(s[i, j * g // 8]) * (values[c[i, j]] - zero[i][j * g // 8]) for j in range(8)] for i in range(5)]
    q = QuantizedTensor(scheme, c, s, z)
    exact = torch.tensor(expected, dtype=torch.float64)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert q.dequantize(dtype).dtype == dtype
        assert torch.equal(q.dequantize(dtype), exact.to(dtype))


def test_products_overflow_in_half_but_not_in_single_precision() -> None:
    q = QuantizedTensor(Scheme(FP6), torch.full((1, 2), 31, dtype=torch.uint8), torch.full((1, 1), 60000.0).half())
    assert q.dequantize().tolist() == [[28 * 60000.0] * 2]
    assert torch.isinf(q.dequantize(torch.float16)).all()


def test_the_digest_depends_on_every_part_but_not_on_strides() -> None:
    asym = Scheme(INT4, 4, symmetric=False)
    q = QuantizedTensor(asym, codes(), scales(4, 2), codes(4, 2))
    strided = QuantizedTensor(asym, q.codes.t().contiguous().t(), q.scales.t().contiguous().t(), q.zeros.clone())
    assert q.equal(strided) and q.digest() == strided.digest()
    rows = torch.ones(1, 4).half().t().contiguous()  # [4, 1] with a stride of 1 and of 4
    single = QuantizedTensor(Scheme(INT4), codes(), rows)
    assert single.equal(QuantizedTensor(Scheme(INT4), codes(), torch.ones(4, 1).half()))
    for part in ("codes", "scales", "zeros"):
        changed = {name: getattr(q, name).clone() for name in ("codes", "scales", "zeros")}
        changed[part].view(torch.uint8)[2, 1] ^= 1
        assert not q.equal(QuantizedTensor(asym, **changed))
    other = QuantizedTensor(Scheme(INT4, 4), codes(), scales(4, 2))
    assert not other.equal(QuantizedTensor(Scheme(INT4, 4), codes().view(4, 8), -scales(4, 2)))
    assert not QuantizedTensor(Scheme(INT4), codes(1, 8), scales(1)).equal(
        QuantizedTensor(Scheme(INT4), codes(1, 8), -scales(1))
    )


def test_negative_zero_is_not_positive_zero() -> None:
    plus = QuantizedTensor(Scheme(FP6), torch.zeros(1, 2, dtype=torch.uint8), torch.ones(1, 1).half())
    minus = QuantizedTensor(Scheme(FP6), torch.full((1, 2), 32, dtype=torch.uint8), torch.ones(1, 1).half())
    assert not plus.equal(minus)
    assert torch.signbit(minus.dequantize()).all() and not torch.signbit(plus.dequantize()).any()


def test_a_record_matches_its_own_digest_only() -> None:
    q = QuantizedTensor(Scheme(INT4, 4), codes(), scales(4, 2))
    seen = hashlib.sha256(f"int4:g4 {list(q.shape)}".encode())
    seen.update(q.codes.numpy().tobytes() + q.scales.numpy().tobytes())
    older = seen.hexdigest()
    assert q.digest().startswith("xxh3_128:") and q.matches(q.digest()) and q.matches(older)
    for i in range(q.codes.numel()):
        flipped = q.codes.clone()
        flipped.view(-1)[i] ^= 1
        other = QuantizedTensor(q.scheme, flipped, q.scales)
        assert not other.matches(q.digest()) and not other.matches(older)
    bare = q.digest().removeprefix("xxh3_128:")
    for wrong in (None, 5, [], "", bare, f"sha256:{older}", f"xxh3_128:{older}", older.upper(), older + "\n", "0" * 64):
        assert not q.matches(wrong), wrong


@pytest.mark.parametrize("label", LABELS)
def test_labels_are_read_back(label: str) -> None:
    assert Scheme.parse(label).label == label
    assert Scheme.parse(Scheme.parse(label).label) == Scheme.parse(label)
    assert Scheme.parse(label.removesuffix(":channel")) == Scheme.parse(label)


@pytest.mark.parametrize(
    "label",
    [
        *("", "int7", "int4:", "int4:g", "int4:g0", "int4:g-1", "int4:g1.5", "int4:g²", "int4:g٣", "fp6:asym", "INT4"),
        *("int4:g" + "9" * 5000, "int4:g128:sym", " int4", "int4:g 64", ":", "int4:g128\n"),
    ],
)
def test_invalid_labels_are_refused(label: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        Scheme.parse(label)
    assert refusal.value.exit_code == 2


def test_errors_name_the_weight_they_are_about() -> None:
    with pytest.raises(LayoutError, match=r"^model\.x: group size 3 does not divide"), about("model.x"):
        Scheme(INT4, 3).groups(8)
    assert all(issubclass(kind, QuantkitError) for kind in (LayoutError, RecipeError)) and set(FORMATS)
