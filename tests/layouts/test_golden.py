"""Packed bytes equal those of the published packers, in both directions, on every golden case."""

from __future__ import annotations

import hashlib

import pytest
import torch

from quantkit.core.formats import INT4
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import LayoutError
from quantkit.layouts import LAYOUTS, marlin
from tests.golden import FULL, HERE, both_ways, full, golden, here, same, scheme_of

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


def test_gptq_v1_and_v2_words_and_zero_points() -> None:
    file = golden("gptq")
    for case, info in file.cases.items():
        scheme = scheme_of(info)
        codes, zeros = file(case, "codes").t().contiguous(), file(case, "zeros").t().contiguous()
        q = QuantizedTensor(scheme, codes, file(case, "scales").t().contiguous(), None if scheme.symmetric else zeros)
        for layout, version in (("gptq", "v1"), ("gptq-v2", "v2")):
            expected = {
                "qweight": file(case, "qweight"),
                "qzeros": file(case, f"qzeros_{version}"),
                "scales": file(case, "scales"),
                "g_idx": file(case, "g_idx"),
            }
            if info["desc_act"]:
                natural = LAYOUTS[layout].pack(q)["g_idx"]
                assert not torch.equal(natural, expected["g_idx"])
                with pytest.raises(LayoutError, match="act-order"):
                    LAYOUTS[layout].unpack(expected, scheme)
                expected["g_idx"] = natural
            both_ways(layout, q, expected)
            del expected["g_idx"]
            assert LAYOUTS[layout].unpack(expected, scheme).equal(q)


def test_gptq_zero_point_0_is_stored_in_v2_and_refused_in_v1() -> None:
    file = golden("gptq")
    seen = 0
    for case, info in file.cases.items():
        if info["sym"]:
            continue
        seen += 1
        codes, zeros = file(case, "codes").t().contiguous(), file(case, "zeros_with_0").t().contiguous()
        q = QuantizedTensor(scheme_of(info), codes, file(case, "scales").t().contiguous(), zeros)
        packed = LAYOUTS["gptq-v2"].pack(q)
        assert torch.equal(packed["qzeros"], file(case, "qzeros_v2_with_0"))
        assert LAYOUTS["gptq-v2"].unpack(packed, q.scheme).equal(q)
        with pytest.raises(LayoutError, match="--layout gptq-v2"):
            LAYOUTS["gptq"].pack(q)
    assert seen


def test_marlin_words_and_both_scale_orders() -> None:
    file = golden("marlin")
    seen = []
    for case in file.cases:
        codes = file(case, "codes").t().contiguous()
        for group, name in ((128, "g128"), (None, "pc")):
            scales = file(case, f"scales_{name}")
            if scales is not None:
                seen.append(name)
                q = QuantizedTensor(Scheme(INT4, group), codes, scales.t().contiguous())
                both_ways("marlin", q, {"B": file(case, "B"), "s": file(case, f"s_{name}")})
    assert set(seen) == {"g128", "pc"}


def test_words_in_the_file_and_as_vllm_repacks_them() -> None:
    file = golden("marlin_vllm")
    for case, info in file.cases.items():
        q = QuantizedTensor(
            scheme_of(info), file(case, "codes").t().contiguous(), file(case, "scales").t().contiguous()
        )
        assert torch.equal(LAYOUTS["gptq"].pack(q)["qweight"], file(case, "gptq_qweight"))
        words = file(case, "marlin_qweight")
        assert torch.equal(marlin.CODES.pack(q.codes, 4).view(words.shape), words)
        if info["group_size"] in (128, -1):
            assert torch.equal(LAYOUTS["marlin"].pack(q)["s"], file(case, "marlin_scales"))


def test_pack_quantized_words_zero_points_and_padding() -> None:
    file = golden("ct_pack_quantized")
    for case, info in file.cases.items():
        scheme = scheme_of(info)
        zeros = None if scheme.symmetric else (file(case, "zeros") + 8).to(torch.uint8)
        q = QuantizedTensor(scheme, (file(case, "codes") + 8).to(torch.uint8), file(case, "weight_scale"), zeros)
        names = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
        both_ways("compressed-tensors", q, {n: t for n in names if (t := file(case, n)) is not None})
