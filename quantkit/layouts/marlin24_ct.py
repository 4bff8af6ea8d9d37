"""Sparse-MARLIN as compressed-tensors spells it, format `marlin-24`: the same bytes under other names (LAYOUTS 5.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, LayoutError
from quantkit.layouts import compressed_tensors, marlin24, validation
from quantkit.layouts.base import Packing, SideFile, Stored, Unpacking
from quantkit.layouts.schemes import Schemes

NAME = "marlin24-ct"
TENSORS: tuple[str, ...] = ("weight_packed", "meta", "scale_packed")
MARKER = "scale_packed"
SIDE_FILE: SideFile | None = None

FORMAT = compressed_tensors.MARLIN24
#: Our name -> that of the other spelling.
OTHER = dict(zip(TENSORS, marlin24.TENSORS, strict=True))

check = marlin24.check


def stored(scheme: Scheme, n: int, k: int) -> Stored:
    """Return suffix -> (dtype, shape) of what `pack` stores for an `[n, k]` weight (LAYOUTS 5.1)."""
    other = marlin24.stored(scheme, n, k)
    return {name: other[OTHER[name]] for name in TENSORS}


def size(shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
    """Return `(n, k)` from the shape of `weight_packed`."""
    rows, columns = validation.matrix(shapes, "weight_packed")
    return marlin24.size({"B_24": (rows, columns)}, scheme)


def pack(q: QuantizedTensor) -> dict[str, Tensor]:
    """Return the tensors of LAYOUTS 5.2, renamed."""
    return packing(q.scheme, q.shape, q.scales, q.zeros).whole(q.codes)


def packing(scheme: Scheme, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None) -> Packing:
    """Return what `pack` does with rows of codes, and its tensors, of which those without codes are filled."""
    other = marlin24.packing(scheme, shape, scales, zeros)
    return Packing({name: other.tensors[OTHER[name]] for name in TENSORS}, other.add)


def unpack(tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedTensor:
    """Return the record; LayoutError as for `marlin24`.

    The library's own writer left the scales of k = 256 in groups of 128 unpermuted, which nothing in the file tells
    from permuted ones; they are read as the kernel reads them, permuted (LAYOUTS 5.5).
    """
    return unpacking(tensors, scheme).record()


def unpacking(tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
    """Return what `unpack` does, rows of codes at a time."""
    n, k = size({name: tuple(t.shape) for name, t in tensors.items()}, scheme)
    check(scheme, n, k)
    validation.match(tensors, stored(scheme, n, k))
    return marlin24.unpacking({OTHER[name]: tensor for name, tensor in tensors.items()}, scheme)


def write_config(schemes: Schemes) -> dict[str, Any]:
    """Return the `quantization_config` of LAYOUTS 5.4.

    The format stands in every config group too: a library that cannot read it then refuses it by name, where it would
    otherwise take the tensors for `pack-quantized`.
    """
    for scheme in (schemes.default, *(scheme for _, scheme in schemes.overrides)):
        marlin24.check_scheme(scheme)
    config = compressed_tensors.write_config(schemes)
    groups = {name: group | {"format": FORMAT} for name, group in config["config_groups"].items()}
    return config | {"format": FORMAT, "config_groups": groups}


def read_config(config: Mapping[str, Any]) -> Schemes | None:
    """Return the schemes of a compressed-tensors config of format `marlin-24`, None for anything else.

    CheckpointError for what the kernel has no place for, as in `compressed_tensors.read_config`.
    """
    if config.get("quant_method") != compressed_tensors.NAME or config.get("format") != FORMAT:
        return None
    sparsity = validation.entry(config, "sparsity_config", dict, type(None), default=None) or {}
    if sparsity.get("format", "dense") not in ("dense", FORMAT):  # it may say 2:4, and that nothing more was packed
        raise CheckpointError(
            f"a {FORMAT} checkpoint with sparsity {str(sparsity['format'])!r:.40}: only dense is read"
        )
    schemes = compressed_tensors.schemes_of({**config, "sparsity_config": None}, FORMAT)
    overrides = tuple((pattern, _sparse(scheme)) for pattern, scheme in schemes.overrides)
    return Schemes(_sparse(schemes.default), overrides, schemes.ignore)


def _sparse(scheme: Scheme) -> Scheme:
    try:
        if not scheme.symmetric:
            raise LayoutError("Sparse-MARLIN is symmetric only, and the config says asymmetric: quantize again")
        sparse = replace(scheme, sparsity="2:4")
        marlin24.check_scheme(sparse)
    except LayoutError as error:
        raise CheckpointError(str(error)) from error
    return sparse
