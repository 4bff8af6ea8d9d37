"""Words, scales and zero points of the published packers, in both directions."""

from __future__ import annotations

import hashlib
from itertools import product

import pytest
import torch
from torch import Tensor

from quantkit.core.formats import INT4
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import LayoutError
from quantkit.layouts import LAYOUTS, marlin
from quantkit.names import FORMATS
from tests.golden import FULL, HERE, Golden, both_ways, full, golden, here, same, scheme_of
from tests.layouts.samples import record

FILES = sorted(path.name.removesuffix(".safetensors.gz") for path in HERE.glob("*.gz"))


@pytest.mark.parametrize("name", FILES)
def test_the_vectors_here_are_those_of_the_full_set(name: str) -> None:
    sums = dict(reversed(line.split()) for line in (HERE / "SHA256SUMS").read_text().splitlines())
    data = (HERE / f"{name}.safetensors.gz").read_bytes()
    assert hashlib.sha256(data).hexdigest() == sums[f"{name}.safetensors.gz"] and len(sums) == len(FILES)
    if FULL.is_dir():
        part, whole = here(name), full(name)
        assert part.cases == {case: whole.cases[case] for case in part.cases}
        same(part.tensors, {key: whole.tensors[key] for key in part.tensors})


def stored(file: Golden, case: str, *names: str) -> dict[str, Tensor]:
    return {name: file(case, name) for name in names}


def of_case(file: Golden, case: str, scheme: Scheme, zeros: str = "zeros") -> QuantizedTensor:
    names = ("codes", "scales", *(() if scheme.symmetric else (zeros,)))
    return QuantizedTensor(scheme, *(file(case, name).t().contiguous() for name in names))


def test_gptq_v1_and_v2() -> None:
    file = golden("gptq")
    for case, info in file.cases.items():
        q = of_case(file, case, scheme_of(info))
        for layout, version in (("gptq", "v1"), ("gptq-v2", "v2")):
            expected = stored(file, case, "qweight", "scales", "g_idx") | {"qzeros": file(case, f"qzeros_{version}")}
            if info["desc_act"]:
                natural = LAYOUTS[layout].pack(q)["g_idx"]
                assert not torch.equal(natural, expected["g_idx"])
                with pytest.raises(LayoutError, match="act-order"):
                    LAYOUTS[layout].unpack(expected, q.scheme)
                expected["g_idx"] = natural
            both_ways(layout, q, expected)
            del expected["g_idx"]
            assert LAYOUTS[layout].unpack(expected, q.scheme).equal(q)
        if not q.scheme.symmetric:  # a zero point of 0 is stored in v2 and refused in v1
            q = of_case(file, case, q.scheme, "zeros_with_0")
            packed = LAYOUTS["gptq-v2"].pack(q)
            assert torch.equal(packed["qzeros"], file(case, "qzeros_v2_with_0"))
            assert LAYOUTS["gptq-v2"].unpack(packed, q.scheme).equal(q)
            with pytest.raises(LayoutError, match="--layout gptq-v2"):
                LAYOUTS["gptq"].pack(q)
    assert {info["sym"] for info in file.cases.values()} == {True, False}


@pytest.mark.parametrize(("layout", "scales"), [("awq", "scales"), ("quick", "qscales")])
def test_awq_and_quick(layout: str, scales: str) -> None:
    file, groups = golden(layout), set()
    for case, info in file.cases.items():
        q = of_case(file, case, scheme_of({**info, "sym": False}))
        both_ways(layout, q, stored(file, case, "qweight", "qzeros") | {"scales": file(case, scales)})
        groups.add(q.scheme.group_size)
    assert layout == "quick" or groups == {None, 32, 128}


def test_marlin_with_both_orders_of_scales() -> None:
    file, seen = golden("marlin"), set()
    for case, (group, name) in product(file.cases, ((128, "g128"), (None, "pc"))):
        if (scales := file(case, f"scales_{name}")) is not None:
            seen.add(name)
            q = QuantizedTensor(Scheme(INT4, group), file(case, "codes").t().contiguous(), scales.t().contiguous())
            both_ways("marlin", q, {"B": file(case, "B"), "s": file(case, f"s_{name}")})
    assert seen == {"g128", "pc"}


def test_what_vllm_repacks_for_marlin() -> None:
    file = golden("marlin_vllm")
    for case, info in file.cases.items():
        q = of_case(file, case, scheme_of(info))
        assert torch.equal(LAYOUTS["gptq"].pack(q)["qweight"], file(case, "gptq_qweight"))
        words = file(case, "marlin_qweight")
        assert torch.equal(marlin.CODES.pack(q.codes, 4).view(words.shape), words)
        if info["group_size"] in (128, -1):
            assert torch.equal(LAYOUTS["marlin"].pack(q)["s"], file(case, "marlin_scales"))
        q = of_case(file, case, scheme_of({**info, "sym": False}))
        awq = {name: file(case, f"awq_{name}") for name in ("qweight", "qzeros")}
        both_ways("awq", q, {**awq, "scales": file(case, "scales")})


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
def test_humming_has_the_words_and_zero_points_of_pack_quantized(label: str) -> None:
    """As humming's own conversion from `pack-quantized` leaves them (docs/layouts.md 9b)."""
    q = record(Scheme.parse(label), 64, 256)
    here, there = LAYOUTS["compressed-tensors"].pack(q), LAYOUTS["humming"].pack(q)
    names = {"weight": "weight_packed", "weight_scale": "weight_scale", "zero_point": "weight_zero_point"}
    assert all(torch.equal(tensor, here[names[name]]) for name, tensor in there.items())
    assert len(there) == 2 + (q.zeros is not None) and LAYOUTS["humming"].unpack(there, q.scheme).equal(q)
