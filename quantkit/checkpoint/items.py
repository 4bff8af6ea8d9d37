"""What passes from the loops to the writer, one tensor after another."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme


class Packed(NamedTuple):
    """A quantized weight `[n, k]` as a layout stores it (suffix -> tensor), and the digest of its record."""

    scheme: Scheme
    shape: tuple[int, int]
    tensors: dict[str, Tensor]
    digest: str


class Item(NamedTuple):
    """A tensor under its name, or a quantized one under its weight's (`....q_proj.weight`), with facts to report."""

    name: str
    value: Tensor | QuantizedTensor | Packed
    facts: dict[str, Any] | None = None


class Commit(NamedTuple):
    """Says that all items so far may be made durable; `facts` go into the journal."""

    facts: dict[str, Any]
