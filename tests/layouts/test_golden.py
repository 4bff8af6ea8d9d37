"""Packed bytes equal those of the published packers, in both directions, on every golden case."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from quantkit.core.formats import INT4
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import LayoutError
from quantkit.layouts import LAYOUTS, marlin


class Golden:
    """A golden file: its cases, and tensors by case and name."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, "pt") as file:
            self.cases = json.loads(file.metadata()["cases"])
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def __call__(self, case: str, name: str) -> Tensor | None:
        return self.tensors.get(f"{case}.{name}")


def golden(shared: Path, name: str) -> Golden:
    return Golden(shared / "golden" / f"{name}.safetensors")


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert found[name].is_contiguous()
        assert torch.equal(found[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def both_ways(layout: str, q: QuantizedTensor, expected: dict[str, Tensor]) -> None:
    same(LAYOUTS[layout].pack(q), expected)
    back = LAYOUTS[layout].unpack(expected, q.scheme)
    assert back.equal(q)
    same(LAYOUTS[layout].pack(back), expected)


def scheme_of(case: dict) -> Scheme:
    group = case["group_size"]
    return Scheme(INT4, None if group == -1 else group, symmetric=case.get("sym", case.get("symmetric", True)))


def test_gptq_v1_and_v2_words_and_zero_points(shared: Path) -> None:
    file = golden(shared, "gptq")
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


def test_gptq_zero_point_0_is_stored_in_v2_and_refused_in_v1(shared: Path) -> None:
    file = golden(shared, "gptq")
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


def test_marlin_words_and_both_scale_orders(shared: Path) -> None:
    file = golden(shared, "marlin")
    seen = []
    for case in file.cases:
        codes = file(case, "codes").t().contiguous()
        for group, name in ((128, "g128"), (None, "pc")):
            scales = file(case, f"scales_{name}")
            if scales is not None:
                seen.append(name)
                q = QuantizedTensor(Scheme(INT4, group), codes, scales.t().contiguous())
                both_ways("marlin", q, {"B": file(case, "B"), "s": file(case, f"s_{name}")})
    assert seen.count("g128") == 8 and seen.count("pc") == 3


def test_words_in_the_file_and_as_vllm_repacks_them(shared: Path) -> None:
    file = golden(shared, "marlin_vllm")
    for case, info in file.cases.items():
        q = QuantizedTensor(
            scheme_of(info), file(case, "codes").t().contiguous(), file(case, "scales").t().contiguous()
        )
        assert torch.equal(LAYOUTS["gptq"].pack(q)["qweight"], file(case, "gptq_qweight"))
        words = file(case, "marlin_qweight")
        assert torch.equal(marlin.CODES.pack(q.codes, 4).view(words.shape), words)
        if info["group_size"] in (128, -1):
            assert torch.equal(LAYOUTS["marlin"].pack(q)["s"], file(case, "marlin_scales"))


def test_pack_quantized_words_zero_points_and_padding(shared: Path) -> None:
    file = golden(shared, "ct_pack_quantized")
    for case, info in file.cases.items():
        scheme = scheme_of(info)
        zeros = None if scheme.symmetric else (file(case, "zeros") + 8).to(torch.uint8)
        q = QuantizedTensor(scheme, (file(case, "codes") + 8).to(torch.uint8), file(case, "weight_scale"), zeros)
        names = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
        both_ways("compressed-tensors", q, {n: t for n in names if (t := file(case, n)) is not None})
