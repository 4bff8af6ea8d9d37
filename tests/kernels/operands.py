"""Packed weights for products: the schemes and shapes `[n, k]` of each layout."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import LayoutError
from quantkit.layouts import LAYOUTS, marlin
from tests.layouts.samples import record, tame

#: layout -> schemes and shapes; some that no checkpoint has, see `packed`.
TAKEN = {
    "marlin": (
        ["int4:g128", "int4:channel", "int4:g64", "int4:g32", "int4:g128:24"],
        [(64, 128), (192, 384), (256, 1152)],
    ),
    "marlin24": (["int4:g128:24", "int4:channel:24"], [(64, 128), (384, 256), (256, 1152)]),
    "marlin24-ct": (["int4:g128:24", "int4:channel:24"], [(128, 256)]),
    "tcfpx": (
        ["fp6:channel", "fp5:channel", "fp6-e2m3:channel", "fp5-e2m2:channel"],
        [(64, 64), (192, 128), (256, 1152)],
    ),
    "quick": (["int4:g128", "int4:g128:asym", "int4:g32:asym", "int4:g64"], [(128, 128), (384, 256), (256, 1152)]),
}
CASES = [(layout, label, n, k) for layout, (labels, shapes) in TAKEN.items() for label in labels for n, k in shapes]
#: The first scheme and the middle shape of each.
ONE_EACH = [(layout, labels[0], *shapes[len(shapes) // 2]) for layout, (labels, shapes) in TAKEN.items()]


def weight(label: str, n: int, k: int, seed: int = 0) -> QuantizedTensor:
    """Make a record with all possible codes and scales around 0.01."""
    return tame(record(Scheme.parse(label), n, k, seed), torch.float16)


def packed(layout: str, q: QuantizedTensor) -> dict[str, Tensor]:
    """Pack a weight; for MARLIN with any groups and k, as vLLM repacks them (docs/layouts.md, 3.6).

    Sparse-MARLIN may have any number of 64-row blocks.
    """
    (n, k), g = q.shape, q.scales.shape[1]
    if layout.startswith("marlin24") and n % 128 == 64:  # packed in blocks of 64 rows, and kernels take any
        twice = QuantizedTensor(q.scheme, q.codes.repeat(2, 1), q.scales.repeat(2, 1))
        both = LAYOUTS[layout].pack(twice)
        return {name: tensor[:, : tensor.shape[1] // 2].contiguous() for name, tensor in both.items()}
    if layout != "marlin" or (q.scheme.group_size in (128, None) and k % 128 == 0):
        return LAYOUTS[layout].pack(q)
    order = marlin.GROUPED_SCALES if g > 1 else marlin.SINGLE_SCALES
    return {"B": marlin.CODES.pack(q.codes, 4).view(k // 16, 2 * n), "s": order(q.scales.t()).view(g, n)}


def is_second_copy(name: str, bit: int) -> bool:
    """Return True if a bit of a QUICK tensor belongs to the second copy, which no kernel reads."""
    return (name == "qzeros" and bit % 32 >= 16) or (name == "scales" and bit // 16 % 2 == 1)


def differs(layout: str, tensors: Mapping[str, Tensor], q: QuantizedTensor) -> bool | None:
    """Return True if the tensors have other values than `q`; None if unpacking refuses them."""
    try:
        return not torch.equal(LAYOUTS[layout].unpack(tensors, q.scheme).dequantize(), q.dequantize())
    except LayoutError:
        return None
