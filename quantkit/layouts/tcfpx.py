"""TC-FPx: FP6 and FP5 cut into bit planes, in the order of the kernel's tensor-core fragments (LAYOUTS 7).

A code's low four bits lie in one plane, the bits above them (two of FP6, one of FP5) in another before it; a plane is a
line of axes. Scales are the plain ones: the kernels multiply by the exponents' 2**12 or 2**14 themselves (LAYOUTS 6.4).

No names are established for a file's tensors: ours are `weight`, as fp6_llm shapes it, and `scales` (LAYOUTS 7.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit.core.formats import FORMATS, Format
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, LayoutError
from quantkit.layouts import validation
from quantkit.layouts.arrangement import Arrangement
from quantkit.layouts.base import Packing, SideFile, Stored, Unpacking
from quantkit.layouts.schemes import Schemes

NAME = "tcfpx"
TENSORS: tuple[str, ...] = ("weight", "scales")
MARKER = "scales"
SIDE_FILE: SideFile | None = None

_ROWS, _COLS = "N a:2 b:2 c:2 i:8", "K d:2 q:4 p:2"
LOW = Arrangement(_ROWS, _COLS, "N K a b i q p c d", "c d")
#: The plane of the bits above the low four, by the width of a code.
HIGH = {
    6: Arrangement(_ROWS, _COLS, "N K a i q p c b d", "b c d"),
    5: Arrangement(_ROWS, _COLS, "N K i q p c a b d", "a b c d"),
}

#: What a config calls each format.
SPLITS = {f"e{fmt.ebits}m{fmt.mbits}": fmt for fmt in FORMATS.values() if fmt.is_float}


def check(scheme: Scheme, n: int, k: int) -> None:
    """Raise LayoutError unless a floating format of 5 or 6 bits with one scale per row, n % 64 == 0 and k % 64 == 0."""
    _check_scheme(scheme)
    validation.multiples(
        "TC-FPx", n, k, of_n=64, of_k=64, way_out="--skip the weight, or use --layout compressed-tensors"
    )


def stored(scheme: Scheme, n: int, k: int) -> Stored:
    """Return suffix -> (dtype, shape) of what `pack` stores for an `[n, k]` weight (LAYOUTS 7.1)."""
    return {"weight": (torch.int32, (n, k * scheme.format.bits // 32)), "scales": (torch.float16, (n,))}


def size(shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
    """Return `(n, k)` from the shape of `weight` in words; LayoutError if they are no whole number of codes."""
    n, words = validation.matrix(shapes, "weight")
    if words % scheme.format.bits:
        raise LayoutError(f"{words} words a row are no multiple of {scheme.format.bits}, as {scheme.format.name} has")
    return n, words // scheme.format.bits * 32


def pack(q: QuantizedTensor) -> dict[str, Tensor]:
    """Return `weight` int32 `[n, k*bits/32]`, one flat buffer of two planes, and `scales` float16 `[n]`."""
    return packing(q.scheme, q.shape, q.scales, q.zeros).whole(q.codes)


def packing(scheme: Scheme, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None) -> Packing:
    """Return what `pack` does with rows of codes, and its tensors, of which those without codes are filled."""
    n, k = shape
    check(scheme, n, k)
    bits = scheme.format.bits
    words = torch.empty([n * k * bits // 32], dtype=torch.int32, device=scales.device)
    high, low = _planes(words, bits)
    upper = HIGH[bits].packing(high, bits - 4, shape, above=4)
    lower = LOW.packing(low, 4, shape, above=0)

    def add(first: int, codes: Tensor) -> None:
        upper(first, codes)
        lower(first, codes)

    return Packing({"weight": words.view(n, -1), "scales": validation.half(scales).view(n)}, add)


def unpack(tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedTensor:
    """Return the record; LayoutError for malformed tensors.

    `weight` may also be the same bytes as uint8 `[n, k*bits/8]`, as torchao has them, and `scales` be `[n, 1]`.
    """
    return unpacking(tensors, scheme).record()


def unpacking(tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
    """Return what `unpack` does, rows of codes at a time."""
    tensors = {**tensors, **_as_stored(tensors)}
    n, k = size({name: tuple(t.shape) for name, t in tensors.items()}, scheme)
    check(scheme, n, k)
    validation.match(tensors, stored(scheme, n, k))
    bits = scheme.format.bits
    high, low = _planes(tensors["weight"].reshape(-1), bits)
    lower = LOW.unpacking(low, 4, (n, k))
    upper = HIGH[bits].unpacking(high, bits - 4, (n, k), onto=True, above=4)

    def fill(first: int, codes: Tensor) -> None:
        lower(first, codes)
        upper(first, codes)

    return Unpacking(scheme, (n, k), validation.half(tensors["scales"].view(n, 1)), None, fill)


def write_config(schemes: Schemes) -> dict[str, Any]:
    """Return our own `quantization_config`: no program has one, and overrides stand in the `quantkit` key only."""
    for scheme in (schemes.default, *(scheme for _, scheme in schemes.overrides)):
        _check_scheme(scheme)
    fmt = schemes.default.format
    return {"quant_method": NAME, "format": _split(fmt), "bits": fmt.bits, "ignore": list(schemes.ignore)}


def read_config(config: Mapping[str, Any]) -> Schemes | None:
    """Return the schemes of a config as `write_config` makes it, None for another method."""
    if config.get("quant_method") != NAME:
        return None
    split = validation.entry(config, "format", str)
    if split not in SPLITS:
        raise CheckpointError(f"a TC-FPx checkpoint of {split!r:.40}: quantkit reads {', '.join(SPLITS)}")
    fmt = SPLITS[split]
    bits = validation.entry(config, "bits", int, default=fmt.bits)
    if bits != fmt.bits:
        raise CheckpointError(f"a TC-FPx config with format {split} and bits {bits}: {split} has {fmt.bits}")
    return Schemes(Scheme(fmt), ignore=validation.strings(config, "ignore"))


def _planes(words: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the plane of the bits above the low four, and theirs, of flat words."""
    high = len(words) * (bits - 4) // bits
    return words[:high], words[high:]


def _as_stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `weight` as words where it is bytes, and `scales` as a vector where they are a column."""
    changed = {}
    weight, scales = tensors.get("weight"), tensors.get("scales")
    if weight is not None and weight.dtype == torch.uint8 and weight.ndim == 2:
        if weight.shape[1] % 4:
            raise LayoutError(f"'weight' has rows of {weight.shape[1]} bytes, no whole words of four: it is damaged")
        changed["weight"] = weight.contiguous().view(torch.int32)
    if scales is not None and scales.ndim == 2 and scales.shape[1] == 1:
        changed["scales"] = scales[:, 0].contiguous()
    return changed


def _split(fmt: Format) -> str:
    return next(name for name, other in SPLITS.items() if other == fmt)


def _check_scheme(scheme: Scheme) -> None:
    if scheme.format not in SPLITS.values():
        raise LayoutError(f"TC-FPx holds fp6 and fp5, not {scheme.format.name}: use --layout compressed-tensors")
    if scheme.group_size is not None:
        raise LayoutError("TC-FPx has one scale per row: quantize with --group-size channel")
