"""The stream from the pipeline's loops to the writer: tensors one by one, and commits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme

#: Bytes for each quantized weight that waits to be written: a byte of codes, and the packed bytes.
WAITING_BYTES = 2


class Packed(NamedTuple):
    """Hold a quantized weight `[n, k]` as a layout stores it (suffix -> tensor), and the digest of
    its record.
    """

    scheme: Scheme
    shape: tuple[int, int]
    tensors: dict[str, Tensor]
    digest: str


class Item(NamedTuple):
    """Hold a tensor, or a quantized weight under its dense name (`....q_proj.weight`), and facts to
    report.
    """

    name: str
    value: Tensor | QuantizedTensor | Packed
    facts: dict[str, Any] | None = None


class Commit(NamedTuple):
    """Ask the writer to make all items so far durable; `facts` go into the journal.

    `late` returns facts that are known only just before the write, such as those of a snapshot.
    """

    facts: dict[str, Any]
    late: Callable[[], dict[str, Any]] | None = None
