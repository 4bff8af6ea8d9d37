"""MARLIN: symmetric INT4 in the order of the kernel's tensor-core fragments (LAYOUTS 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit.core.formats import INT4
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, LayoutError
from quantkit.layouts import gptq, validation
from quantkit.layouts.arrangement import Arrangement
from quantkit.layouts.base import Packing, SideFile, Stored, Unpacking
from quantkit.layouts.schemes import Schemes

NAME = "marlin"
TENSORS: tuple[str, ...] = ("B", "s")
MARKER = "B"
SIDE_FILE: SideFile | None = SideFile("quantize_config.json")

CODES = Arrangement("N j:4 y:2 w:8", "K d:2 e:4 f:2", "K N w e j f y d")
GROUPED_SCALES = Arrangement("G", "N a:8 b:8", "G N b a")
SINGLE_SCALES = Arrangement("G", "N a:4 b:4 c:2", "G N b a c")


def check(scheme: Scheme, n: int, k: int) -> None:
    """Raise LayoutError unless INT4, symmetric, group 128 or one scale per row, n % 64 == 0 and k % 128 == 0."""
    _check_scheme(scheme)
    way_out = "--skip the weight, or use --layout compressed-tensors"
    validation.multiples("MARLIN", n, k, of_n=64, of_k=128, way_out=way_out)


def stored(scheme: Scheme, n: int, k: int) -> Stored:
    """Return suffix -> (dtype, shape) of what `pack` stores for an `[n, k]` weight (LAYOUTS 3.1)."""
    return {"B": (torch.int32, (k // 16, 2 * n)), "s": (torch.float16, (scheme.groups(k), n))}


def size(shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
    """Return `(n, k)` from the shape of `B`."""
    rows, columns = validation.matrix(shapes, "B")
    return columns // 2, 16 * rows


def pack(q: QuantizedTensor) -> dict[str, Tensor]:
    """Return `B` int32 `[k/16, 2n]` and `s` float16 `[g, n]`, permuted (LAYOUTS 3.2, 3.3)."""
    return packing(q.scheme, q.shape, q.scales, q.zeros).whole(q.codes)


def packing(scheme: Scheme, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None) -> Packing:
    """Return what `pack` does with rows of codes, and its tensors, of which those without codes are filled."""
    n, k = shape
    check(scheme, n, k)
    g = scales.shape[1]
    words = torch.empty([n * k // 8], dtype=torch.int32, device=scales.device)
    tensors = {"B": words.view(k // 16, 2 * n), "s": _scales(g)(validation.half(scales).t()).view(g, n)}
    return Packing(tensors, CODES.packing(words, 4, shape))


def unpack(tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedTensor:
    """Return the record; LayoutError for malformed tensors."""
    return unpacking(tensors, scheme).record()


def unpacking(tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
    """Return what `unpack` does, rows of codes at a time."""
    n, k = size({name: tuple(t.shape) for name, t in tensors.items()}, scheme)
    check(scheme, n, k)
    validation.match(tensors, stored(scheme, n, k))
    g = scheme.groups(k)
    scales = validation.half(_scales(g).inverse(tensors["s"], (g, n)).t())
    return Unpacking(scheme, (n, k), scales, None, CODES.unpacking(tensors["B"], 4, (n, k)))


def write_config(schemes: Schemes) -> dict[str, Any]:
    """Return the `quantization_config` of LAYOUTS 3.5, with both published keys.

    It has no place for overrides or for dense linears other than `lm_head`: those stand in the `quantkit` key only.
    """
    for scheme in (schemes.default, *(scheme for _, scheme in schemes.overrides)):
        _check_scheme(scheme)
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": schemes.default.group_size or -1,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "marlin",
        "is_marlin_format": True,
        "lm_head": gptq.head_is_packed(schemes),
    }


def read_config(config: Mapping[str, Any]) -> Schemes | None:
    """Return the schemes of a MARLIN config in any of its three published forms, None for anything else."""
    method = config.get("quant_method")
    marked = config.get("is_marlin_format") is True or "marlin" in (
        config.get("checkpoint_format"),
        config.get("format"),
    )
    if method != "marlin" and not (method == "gptq" and marked):
        return None
    bits = validation.entry(config, "bits", int, default=4)
    group = validation.entry(config, "group_size", int)
    symmetric = validation.entry(config, "sym", bool, default=True)
    if bits != 4 or group not in (128, -1) or not symmetric:
        raise CheckpointError(
            f"a MARLIN config with bits {bits}, group_size {group}, sym {symmetric}: "
            "it can only be 4, 128 or -1, and true"
        )
    lm_head = validation.entry(config, "lm_head", bool, default=False)
    return Schemes(Scheme(INT4, None if group == -1 else group), ignore=() if lm_head else ("lm_head",))


def _check_scheme(scheme: Scheme) -> None:
    if scheme.format != INT4:
        raise LayoutError(f"MARLIN holds int4, not {scheme.format.name}: use --layout compressed-tensors")
    if not scheme.symmetric:
        raise LayoutError(
            "MARLIN is symmetric only: quantize without --asym, or use --layout gptq-v2 or compressed-tensors"
        )
    if scheme.group_size not in (128, None):
        raise LayoutError(
            f"MARLIN has groups of 128 or one scale per row, not groups of {scheme.group_size}: "
            "quantize with --group-size 128 or channel, or use --layout gptq"
        )


def _scales(g: int) -> Arrangement:
    # The kernel goes by the number of scale rows: one group of 128 in k = 128 counts as per row (LAYOUTS 3.3).
    return GROUPED_SCALES if g > 1 else SINGLE_SCALES
