"""The laws that every layout obeys: packing loses nothing, and every change is seen."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.layouts import LAYOUTS

#: layout -> (n, k) units of legal shapes.
UNITS = {"compressed-tensors": (1, 1), "humming": (1, 32), "tcfpx": (64, 64), "gptq": (32, 32), "gptq-v2": (32, 32)}
UNITS |= {"awq": (8, 1), "quick": (128, 32), "marlin": (64, 128), "marlin24": (128, 128), "marlin24-ct": (128, 128)}


def rows(tensor: Tensor) -> list[list[int]]:
    """The unsigned bits of a tensor as rows of integers."""
    width = tensor.element_size()
    if width == 8:
        return tensor.reshape(1, -1).tolist()
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[width]
    matrix = tensor.reshape(-1).view(signed).view(tensor.shape if tensor.ndim == 2 else (1, -1))
    return (matrix.to(torch.int64) & ((1 << 8 * width) - 1)).tolist()


def same_bytes(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == t.dtype and found[name].shape == t.shape and rows(found[name]) == rows(t)
        for name, t in expected.items()
    )


def obeys(layout: str, q: QuantizedTensor) -> None:
    """Assert laws 1 and 2, that `stored` and `size` agree with `pack`, and that `q` is unchanged."""
    module, (n, k) = LAYOUTS[layout], q.shape
    before = q.digest()
    module.check(q.scheme, n, k)
    packed = module.pack(q)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in packed.items()} == module.stored(q.scheme, n, k)
    assert set(packed) <= set(module.TENSORS) and module.MARKER in packed
    assert all(t.is_contiguous() for t in packed.values())
    shapes = {name: tuple(t.shape) for name, t in packed.items()}
    unclear = layout == "compressed-tensors" and not q.scheme.format.is_float and q.scheme.group_size is None
    bits = q.scheme.format.bits
    assert module.size(shapes, q.scheme) == (n, -(-k * bits // 32) * 32 // bits if unclear else k)
    frozen = {name: t.clone() for name, t in packed.items()}
    back = module.unpack(packed, q.scheme)
    assert back.equal(q)
    assert same_bytes(module.pack(back), frozen) and same_bytes(packed, frozen)
    assert q.digest() == before
