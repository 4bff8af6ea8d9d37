"""AWQ checkpoints in the GEMM packing: eight neighbouring outputs a word, interleaved (LAYOUTS 2).

Zero points are stored as they are, and always: those of a symmetric weight are all 8, and the public config calls it
`zero_point` like any other. One scale per row is read by vLLM alone, AutoAWQ's own packing fails on it.
"""

from __future__ import annotations

import re
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

NAME = "awq"
TENSORS: tuple[str, ...] = ("qweight", "qzeros", "scales")
MARKER = "qweight"
SIDE_FILE: SideFile | None = None  # every reader of today looks into config.json

#: Of codes `[n, k]` and of zero points `[n, g]`: the even outputs of eight in the low half of a word.
WORDS = Arrangement("N h:4 o:2", "K", "K N o h")


def check(scheme: Scheme, n: int, k: int) -> None:
    """Raise LayoutError unless the scheme is INT4, n % 8 == 0 and the group size divides `k`.

    That is what readers ask; the reference writer takes multiples of 32 only (LAYOUTS 2).
    """
    _check_scheme(scheme)
    way_out = "use --layout compressed-tensors, or --skip the weight"
    validation.multiples("the AWQ layout", n, k, of_n=8, of_k=1, way_out=way_out)
    scheme.groups(k)


def stored(scheme: Scheme, n: int, k: int) -> Stored:
    """Return suffix -> (dtype, shape) of what `pack` stores for an `[n, k]` weight (LAYOUTS 2)."""
    g = scheme.groups(k)
    return {
        "qweight": (torch.int32, (k, n // 8)),
        "qzeros": (torch.int32, (g, n // 8)),
        "scales": (torch.float16, (g, n)),
    }


def size(shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
    """Return `(n, k)` from the shape of `qweight`."""
    k, words = validation.matrix(shapes, "qweight")
    return 8 * words, k


def pack(q: QuantizedTensor) -> dict[str, Tensor]:
    """Return `qweight` int32 `[k, n/8]`, `qzeros` int32 `[g, n/8]` (8s when symmetric), `scales` float16 `[g, n]`."""
    return packing(q.scheme, q.shape, q.scales, q.zeros).whole(q.codes)


def packing(scheme: Scheme, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None) -> Packing:
    """Return what `pack` does with rows of codes, and its tensors, of which those without codes are filled."""
    n, k = shape
    check(scheme, n, k)
    words = torch.empty([n * k // 8], dtype=torch.int32, device=scales.device)
    tensors = {
        "qweight": words.view(k, n // 8),
        "qzeros": WORDS.pack(gptq.zero_points(scales, zeros), 4).view(-1, n // 8),
        "scales": validation.half(scales).t().contiguous(),
    }
    return Packing(tensors, WORDS.packing(words, 4, shape))


def unpack(tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedTensor:
    """Return the record; LayoutError for malformed tensors, or zero points that are not 8 in a symmetric scheme."""
    return unpacking(tensors, scheme).record()


def unpacking(tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
    """Return what `unpack` does, rows of codes at a time."""
    n, k = size({name: tuple(t.shape) for name, t in tensors.items()}, scheme)
    check(scheme, n, k)
    validation.match(tensors, stored(scheme, n, k))
    zeros = zeros_of(WORDS.unpack(tensors["qzeros"], 4, (n, scheme.groups(k))), scheme)
    fill = WORDS.unpacking(tensors["qweight"], 4, (n, k))
    return Unpacking(scheme, (n, k), validation.half(tensors["scales"].t()), zeros, fill)


def write_config(schemes: Schemes) -> dict[str, Any]:
    """Return the `quantization_config` of LAYOUTS 2; it has no place for overrides (the `quantkit` key has)."""
    for scheme in (schemes.default, *(scheme for _, scheme in schemes.overrides)):
        _check_scheme(scheme)
    return config_of(schemes, "gemm")


def read_config(config: Mapping[str, Any]) -> Schemes | None:
    """Return the schemes of a GEMM config with the newer or the older keys, None for another method or QUICK.

    CheckpointError names any other version of AWQ, since its words lie otherwise. `zero_point` false, which no GEMM
    packer writes, reads as symmetric: `unpack` then refuses zero points other than 8.
    """
    version = version_of(config)
    if version in (None, "quick"):
        return None
    if version != "gemm" or config.get("backend") == "llm-awq":
        raise CheckpointError(
            f"an AWQ checkpoint of version {version!r:.40}, backend {str(config.get('backend'))!r:.40}: "
            "quantkit reads the versions gemm and quick, export it in one of them"
        )
    return schemes_of(config)


def zeros_of(zeros: Tensor, scheme: Scheme) -> Tensor | None:
    """Return zero points `[n, g]`, or None when symmetric: then LayoutError unless all of them are 8."""
    if not scheme.symmetric:
        return zeros
    other = zeros != INT4.zero_code
    if bool(other.any()):
        row, group = other.nonzero()[0].tolist()
        raise LayoutError(
            f"the config says symmetric, and the zero point of row {row}, group {group} is {int(zeros[row, group])}, "
            "not 8: the config or the tensors are wrong, fetch both again"
        )
    return None


def config_of(schemes: Schemes, version: str) -> dict[str, Any]:
    """Return the public config with `version`; dense linears but the head go to `modules_to_not_convert`.

    That is a list of substrings: of the patterns in `ignore` only those stand there that ask for a substring.
    """
    dense = [_substring(module) for module in schemes.ignore if module != "lm_head"]  # which readers expect dense
    config: dict[str, Any] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": schemes.default.group_size or -1,
        "zero_point": True,
        "version": version,
        "modules_to_not_convert": [part for part in dense if part] or None,
    }
    return config | ({"lm_head": True} if gptq.head_is_packed(schemes) else {})


def version_of(config: Mapping[str, Any]) -> str | None:
    """Return the version in an AWQ config in small letters (`gemm` where none is stated), None for other methods."""
    if config.get("quant_method") != "awq":
        return None
    older, newer = (validation.entry(config, key, str, type(None), default=None) for key in ("version", "format"))
    return (older or newer or "gemm").lower()


def schemes_of(config: Mapping[str, Any]) -> Schemes:
    """Return the schemes of an AWQ config, also with the older keys `w_bit` and `q_group_size`."""
    bits = validation.entry(config, "w_bit" if "w_bit" in config else "bits", int)
    group = validation.entry(config, "q_group_size" if "q_group_size" in config else "group_size", int)
    if bits != 4:
        raise CheckpointError(f"an AWQ checkpoint of {bits} bits: quantkit reads 4")
    if group < 1 and group != -1:
        raise CheckpointError(f"AWQ group_size {group}: it must be positive, or -1 for one scale per row")
    dense = [part for part in validation.strings(config, "modules_to_not_convert") if part != "lm_head"]
    head = [] if validation.entry(config, "lm_head", bool, default=False) else ["lm_head"]
    symmetric = not validation.entry(config, "zero_point", bool, default=True)
    return Schemes(
        Scheme(INT4, None if group == -1 else group, symmetric=symmetric),
        ignore=(*head, *(f"re:.*{re.escape(part)}.*" for part in dense)),
    )


def _check_scheme(scheme: Scheme) -> None:
    if scheme.format != INT4:
        raise LayoutError(f"the AWQ layout holds int4, not {scheme.format.name}: use --layout compressed-tensors")


def _substring(module: str) -> str | None:
    """Return the substring that an entry of `ignore` asks for, None for a pattern that is more than that."""
    if not module.startswith("re:"):
        return module
    inner = module.removeprefix("re:")
    return (
        validation.literal(inner[2:-2]) if inner.startswith(".*") and inner.endswith(".*") and len(inner) > 4 else None
    )
