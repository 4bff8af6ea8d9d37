"""compressed-tensors: the published words, zero points and padding."""

from __future__ import annotations

import torch

from quantkit.core.quantized_tensor import QuantizedTensor
from tests.golden import both_ways, golden, scheme_of


def test_pack_quantized_words_zero_points_and_padding() -> None:
    file = golden("ct_pack_quantized")
    for case, info in file.cases.items():
        scheme = scheme_of(info)
        zeros = None if scheme.symmetric else (file(case, "zeros") + 8).to(torch.uint8)
        q = QuantizedTensor(scheme, (file(case, "codes") + 8).to(torch.uint8), file(case, "weight_scale"), zeros)
        names = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
        both_ways("compressed-tensors", q, {n: t for n in names if (t := file(case, n)) is not None})
