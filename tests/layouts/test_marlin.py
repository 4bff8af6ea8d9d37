"""MARLIN: the published words and both orders of scales, in the file and as vLLM repacks them."""

from __future__ import annotations

import torch

from quantkit.core.formats import INT4
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.layouts import LAYOUTS, marlin
from tests.golden import both_ways, golden, scheme_of


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
