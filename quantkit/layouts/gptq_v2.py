"""GPTQ checkpoints with zero points as they are (v2, LAYOUTS 1): the one that can hold a zero point of 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.layouts import gptq
from quantkit.layouts.base import Packing, Unpacking
from quantkit.layouts.schemes import Schemes

NAME = "gptq-v2"
TENSORS: tuple[str, ...] = gptq.TENSORS
MARKER = gptq.MARKER
SIDE_FILE = gptq.SIDE_FILE

check = gptq.check
stored = gptq.stored
size = gptq.size


def pack(q: QuantizedTensor) -> dict[str, Tensor]:
    """Return the tensors of LAYOUTS 1.2 with zero points 0 to 15 stored as they are."""
    return packing(q.scheme, q.shape, q.scales, q.zeros).whole(q.codes)


def packing(scheme: Scheme, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None) -> Packing:
    """Return what `pack` does with rows of codes, and its tensors, of which those without codes are filled."""
    return gptq.packing_zeros_less(scheme, shape, scales, zeros, 0)


def unpack(tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedTensor:
    """Return the record; LayoutError and the reading of symmetric zero points as in GPTQ v1."""
    return unpacking(tensors, scheme).record()


def unpacking(tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
    """Return what `unpack` does, rows of codes at a time."""
    return gptq.unpacking_zeros_plus(tensors, scheme, 0)


def write_config(schemes: Schemes) -> dict[str, Any]:
    """Return the `quantization_config` of LAYOUTS 1.3 with the checkpoint format `gptq_v2`."""
    return gptq.config_of(schemes, NAME)


def read_config(config: Mapping[str, Any]) -> Schemes | None:
    """Return the schemes of a v2 config, None for anything else; CheckpointError if unusable."""
    return gptq.schemes_of(config, NAME)
