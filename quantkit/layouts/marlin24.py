"""Sparse-MARLIN: 2:4-sparse symmetric INT4, the two kept codes of each four as MARLIN fragments (LAYOUTS 5).

Which two were kept is computed from the codes and stored beside them. A file whose metadata was made from a pruning
mask is read too, with the values it means: written again, it gets the metadata of LAYOUTS 4.1, and `verify` tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit.core.formats import INT4
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, LayoutError
from quantkit.layouts import gptq, sparse24, validation
from quantkit.layouts.arrangement import Arrangement
from quantkit.layouts.base import Packing, SideFile, Stored, Unpacking
from quantkit.layouts.schemes import Schemes

NAME = "marlin24"
TENSORS: tuple[str, ...] = ("B_24", "B_meta", "s")
MARKER = "B_24"
SIDE_FILE: SideFile | None = SideFile("quantize_config.json")

#: The public name of the format, and vLLM's own name of the method.
FORMAT, METHOD = "marlin_24", "gptq_marlin_24"

KEPT = Arrangement("N a:8 b:2 j:4", "K h:2 q:4 e:2", "K N a q j e b h")
GROUPED_SCALES = Arrangement("G", "N b:2 c:4", "G N c b")


def check(scheme: Scheme, n: int, k: int) -> None:
    """Raise LayoutError unless INT4, 2:4, group 128 or one scale per row, n % 128 == 0 and k % 128 == 0."""
    check_scheme(scheme)
    way_out = "--skip the weight, or use --layout compressed-tensors"
    validation.multiples("Sparse-MARLIN", n, k, of_n=128, of_k=128, way_out=way_out)


def stored(scheme: Scheme, n: int, k: int) -> Stored:
    """Return suffix -> (dtype, shape) of what `pack` stores for an `[n, k]` weight (LAYOUTS 5.1)."""
    return {
        "B_24": (torch.int32, (k // 32, 2 * n)),
        "B_meta": (torch.int16, (k // 32, 2 * n)),
        "s": (torch.float16, (scheme.groups(k), n)),
    }


def size(shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
    """Return `(n, k)` from the shape of `B_24`."""
    rows, columns = validation.matrix(shapes, "B_24")
    return columns // 2, 32 * rows


def pack(q: QuantizedTensor) -> dict[str, Tensor]:
    """Return `B_24` int32 and `B_meta` int16 `[k/32, 2n]`, and `s` float16 `[g, n]` (LAYOUTS 5.2)."""
    return packing(q.scheme, q.shape, q.scales, q.zeros).whole(q.codes)


def packing(scheme: Scheme, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None) -> Packing:
    """Return what `pack` does with rows of codes, and its tensors, of which those without codes are filled."""
    n, k = shape
    check(scheme, n, k)
    rows = validation.half(scales).t()
    words, meta = (torch.empty([n * k // size], dtype=torch.int32, device=scales.device) for size in (16, 32))
    values, places = KEPT.packing(words, 4, (n, k // 2)), sparse24.SPARSE_MARLIN.packing(meta, 4, (n, k // 4))

    def add(first: int, codes: Tensor) -> None:
        kept, where = sparse24.compress4(codes, INT4.zero_code)
        values(first, kept)
        places(first, where)

    tensors = {
        "B_24": words.view(k // 32, 2 * n),
        "B_meta": meta.view(torch.int16).view(k // 32, 2 * n),
        "s": GROUPED_SCALES(rows).view(rows.shape) if len(rows) > 1 else rows.contiguous(),
    }
    return Packing(tensors, add)


def unpack(tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedTensor:
    """Return the record; LayoutError for malformed tensors and metadata that does not describe two of four."""
    return unpacking(tensors, scheme).record()


def unpacking(tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
    """Return what `unpack` does, rows of codes at a time."""
    n, k = size({name: tuple(t.shape) for name, t in tensors.items()}, scheme)
    check(scheme, n, k)
    validation.match(tensors, stored(scheme, n, k))
    places = sparse24.unpacking_codes(tensors["B_meta"], sparse24.SPARSE_MARLIN, (n, k))
    values = KEPT.unpacking(tensors["B_24"], 4, (n, k // 2))

    def fill(first: int, codes: Tensor) -> None:
        kept, where = (codes.new_empty(len(codes), k // size) for size in (2, 4))
        values(first, kept)
        places(first, where)
        sparse24.expand4(kept, where, INT4.zero_code, out=codes)

    scales = tensors["s"]
    if len(scales) > 1:  # the number of rows decides, as in MARLIN (LAYOUTS 5.2)
        scales = GROUPED_SCALES.inverse(scales, (len(scales), n))
    return Unpacking(scheme, (n, k), validation.half(scales.t()), None, fill)


def write_config(schemes: Schemes) -> dict[str, Any]:
    """Return the `quantization_config` of LAYOUTS 5.4.

    It has no place for overrides or for dense linears other than `lm_head`: those stand in the `quantkit` key only.
    """
    for scheme in (schemes.default, *(scheme for _, scheme in schemes.overrides)):
        check_scheme(scheme)
    return {
        "quant_method": "gptq",  # not METHOD: readers that do not know it take it for a dense model
        "bits": 4,
        "group_size": schemes.default.group_size or -1,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": FORMAT,
        "lm_head": gptq.head_is_packed(schemes),
    }


def read_config(config: Mapping[str, Any]) -> Schemes | None:
    """Return the schemes of a Sparse-MARLIN config by its format or vLLM's method, None for anything else."""
    method = config.get("quant_method")
    marked = FORMAT in (config.get("checkpoint_format"), config.get("format"))
    if method != METHOD and not (method == "gptq" and marked):
        return None
    bits = validation.entry(config, "bits", int, default=4)
    group = validation.entry(config, "group_size", int)
    symmetric = validation.entry(config, "sym", bool, default=True)
    if bits != 4 or group not in (128, -1) or not symmetric:
        raise CheckpointError(
            f"a Sparse-MARLIN config with bits {bits}, group_size {group}, sym {symmetric}: "
            "quantkit reads 4, 128 or -1, and true"
        )
    lm_head = validation.entry(config, "lm_head", bool, default=False)
    return Schemes(Scheme(INT4, None if group == -1 else group, True, "2:4"), ignore=() if lm_head else ("lm_head",))


def check_scheme(scheme: Scheme) -> None:
    """Raise LayoutError unless the scheme is INT4, symmetric, 2:4, of group 128 or one scale per row."""
    if scheme.format != INT4:
        raise LayoutError(f"Sparse-MARLIN holds int4, not {scheme.format.name}: use --layout compressed-tensors")
    if scheme.sparsity is None:
        raise LayoutError(
            "Sparse-MARLIN holds 2:4 weights only, two of four along k: quantize with --prune 2:4, or use "
            "--layout marlin"
        )
    if scheme.group_size not in (128, None):
        raise LayoutError(
            f"Sparse-MARLIN has groups of 128 or one scale per row, not groups of {scheme.group_size}: "
            "quantize with --group-size 128 or channel, or use --layout gptq"
        )
