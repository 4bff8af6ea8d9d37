"""QUICK: AWQ's weights in the order of a kernel that needs no shared memory for them (LAYOUTS 8).

The words are those of MARLIN in another order, which depends on the whole `n`. Scales and zero points are stored twice.
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
from quantkit.layouts import awq, gptq, validation
from quantkit.layouts.arrangement import Arrangement
from quantkit.layouts.base import Packing, SideFile, Stored, Unpacking
from quantkit.layouts.schemes import Schemes

NAME = "quick"
TENSORS: tuple[str, ...] = awq.TENSORS
MARKER = awq.MARKER

CODES = Arrangement("N t:2 j:4 b:2 h:2 a:4", "K s:2 r:2 q:4 e:2", "K t h N a q s j e b r")
#: Of scales and zero points `[g, n]`, once each.
ONCE = Arrangement("G", "N t:2 c:8 h:2 a:4", "G t h N a c")
#: Of zero points that lie in order already.
WORDS = Arrangement("G", "N i:8", "G N i")


def _older_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the loader reads: exactly these keys, and the version in capitals (LAYOUTS 8.4)."""
    return {
        "zero_point": config["zero_point"],
        "q_group_size": config["group_size"],
        "w_bit": config["bits"],
        "version": config["version"].upper(),
        "modules_to_not_convert": config["modules_to_not_convert"],
    }


SIDE_FILE: SideFile | None = SideFile("quant_config.json", _older_keys)


def check(scheme: Scheme, n: int, k: int) -> None:
    """Raise LayoutError unless INT4 in groups of a multiple of 32 that divides `k`, n % 128 == 0 and k % 32 == 0.

    The published packer fails when n / 128 is odd and not 1; the formulas of LAYOUTS 8.2 do not.
    """
    _check_scheme(scheme)
    validation.multiples("QUICK", n, k, of_n=128, of_k=32, way_out="--skip the weight, or use --layout awq")
    scheme.groups(k)


def stored(scheme: Scheme, n: int, k: int) -> Stored:
    """Return suffix -> (dtype, shape) of what `pack` stores for an `[n, k]` weight (LAYOUTS 8.1)."""
    g = scheme.groups(k)
    return {
        "qweight": (torch.int32, (k // 4, n // 2)),
        "qzeros": (torch.int32, (g, n // 4)),
        "scales": (torch.float16, (g, 2 * n)),
    }


def size(shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
    """Return `(n, k)` from the shape of `qweight`."""
    rows, columns = validation.matrix(shapes, "qweight")
    return 2 * columns, 4 * rows


def pack(q: QuantizedTensor) -> dict[str, Tensor]:
    """Return `qweight` int32 `[k/4, n/2]`, `qzeros` int32 `[g, n/4]`, `scales` float16 `[g, 2n]` (LAYOUTS 8.2)."""
    return packing(q.scheme, q.shape, q.scales, q.zeros).whole(q.codes)


def packing(scheme: Scheme, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None) -> Packing:
    """Return what `pack` does with rows of codes, and its tensors, of which those without codes are filled."""
    n, k = shape
    check(scheme, n, k)
    g = scales.shape[1]
    points = ONCE(gptq.zero_points(scales, zeros).t()).view(g, n // 4, 1, 4).repeat(1, 1, 2, 1)
    words = torch.empty([n * k // 8], dtype=torch.int32, device=scales.device)
    tensors = {
        "qweight": words.view(k // 4, n // 2),
        "qzeros": WORDS.pack(points.view(g, 2 * n), 4).view(g, n // 4),
        "scales": ONCE(validation.half(scales).t()).view(g, n, 1).repeat(1, 1, 2).view(g, 2 * n),
    }
    return Packing(tensors, CODES.packing(words, 4, shape))


def unpack(tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedTensor:
    """Return the record; LayoutError for malformed tensors, copies that differ, or a symmetric zero point but 8."""
    return unpacking(tensors, scheme).record()


def unpacking(tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
    """Return what `unpack` does, rows of codes at a time."""
    n, k = size({name: tuple(t.shape) for name, t in tensors.items()}, scheme)
    check(scheme, n, k)
    validation.match(tensors, stored(scheme, n, k))
    g = scheme.groups(k)
    scales = _one_of(tensors["scales"].contiguous().view(g, n, 2, 1), "scales")
    points = _one_of(WORDS.unpack(tensors["qzeros"], 4, (g, 2 * n)).view(g, n // 4, 2, 4), "qzeros")
    zeros = awq.zeros_of(ONCE.inverse(points, (g, n)).t(), scheme)
    fill = CODES.unpacking(tensors["qweight"], 4, (n, k))
    return Unpacking(scheme, (n, k), validation.half(ONCE.inverse(scales, (g, n)).t()), zeros, fill)


def write_config(schemes: Schemes) -> dict[str, Any]:
    """Return AWQ's `quantization_config` with the version `quick` (LAYOUTS 8.4); overrides as in AWQ."""
    for scheme in (schemes.default, *(scheme for _, scheme in schemes.overrides)):
        _check_scheme(scheme)
    return awq.config_of(schemes, NAME)


def read_config(config: Mapping[str, Any]) -> Schemes | None:
    """Return the schemes of a config of AWQ's version `quick`, None for anything else."""
    if awq.version_of(config) != NAME:
        return None
    schemes = awq.schemes_of(config)
    try:
        _check_scheme(schemes.default)
    except LayoutError as error:
        raise CheckpointError(f"no checkpoint of QUICK's is like this: {error}") from error
    return schemes


def _check_scheme(scheme: Scheme) -> None:
    if scheme.format != INT4:
        raise LayoutError(f"QUICK holds int4, not {scheme.format.name}: use --layout compressed-tensors")
    if scheme.group_size is None:  # its loader divides k by the group size, which would be -1
        raise LayoutError("QUICK cannot load one scale per row: use --group-size 128")
    if scheme.group_size % 32:
        raise LayoutError(
            f"QUICK has groups of a multiple of 32, not of {scheme.group_size}: use --group-size 128 or --layout awq"
        )


def _one_of(twice: Tensor, name: str) -> Tensor:
    """Return the first of both copies of `[g, blocks, 2, entries]`, flat; LayoutError unless their bits agree."""
    first, second = twice.unbind(2)
    if not torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8)):
        raise LayoutError(f"tensor {name!r} holds every entry twice, and two copies differ: it is damaged")
    return first.reshape(-1)
