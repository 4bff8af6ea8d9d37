"""GPTQ v1 and v2: the published words and zero points, in both directions."""

from __future__ import annotations

import pytest
import torch

from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.errors import LayoutError
from quantkit.layouts import LAYOUTS
from tests.golden import both_ways, golden, scheme_of


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
