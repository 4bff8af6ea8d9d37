"""Random packed weights, and the shares of them that ranks have; used in this process and inside vLLM."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.layouts import LAYOUTS

#: Layout, scheme, and the layout that a kernel then multiplies.
PACKED = [
    ("marlin", "int4:g128", "marlin"),
    ("marlin", "int4:channel", "marlin"),
    ("marlin24", "int4:g128:24", "marlin24"),
    ("marlin24-ct", "int4:g128:24", "marlin24-ct"),
    ("tcfpx", "fp6:channel", "tcfpx"),
    ("tcfpx", "fp5:channel", "tcfpx"),
    ("quick", "int4:g128:asym", "quick"),
    ("quick", "int4:g64", "quick"),
    ("compressed-tensors", "int4:g128", "marlin"),
    ("compressed-tensors", "int4:g32:asym", "quick"),
    ("compressed-tensors", "fp6:channel", "tcfpx"),
    ("gptq", "int4:g128", "marlin"),
    ("gptq-v2", "int4:g128:asym", "quick"),
    ("awq", "int4:g128:asym", "quick"),
    ("humming", "fp6:channel", "tcfpx"),
    ("humming", "fp5:channel", "tcfpx"),
]


def record(label: str, n: int, k: int, seed: int = 0) -> QuantizedTensor:
    """Draw a record whose codes, scales and zero points differ from row to row and from group to group."""
    scheme, generator = Scheme.parse(label), torch.Generator().manual_seed(seed)
    g, top = scheme.groups(k), 2**scheme.format.bits
    codes = torch.randint(0, top, (n, k), generator=generator, dtype=torch.uint8)
    if scheme.sparsity:
        quads = codes.view(n, k // 4, 4)
        first = torch.randint(0, 4, (n, k // 4, 1), generator=generator)
        for step in (0, 1 + int(torch.randint(0, 3, (1,), generator=generator))):
            quads.scatter_(2, (first + step) % 4, scheme.format.zero_code)
    scales = (torch.rand(n, g, generator=generator) + 0.5).half() / 64
    zeros = None
    if not scheme.symmetric:
        zeros = torch.randint(1, 16, (n, g), generator=generator, dtype=torch.uint8)
    return QuantizedTensor(scheme, codes, scales, zeros)


def packed(layout: str, q: QuantizedTensor) -> dict[str, Tensor]:
    return LAYOUTS[layout].pack(q)


def decoded(layout: str, label: str, tensors: dict[str, Tensor], out: int, k: int) -> Tensor:
    """Decode a packed share to float32 `[out, k]`, and check that its padding is zero."""
    weight = LAYOUTS[layout].unpack(tensors, Scheme.parse(label)).dequantize()
    assert not weight[out:].any() and not weight[:, k:].any(), "padding is not zero"
    return weight[:out, :k]
