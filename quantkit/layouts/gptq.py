"""GPTQ checkpoints, zero points as AutoGPTQ wrote them: less one (v1, LAYOUTS 1).

Plain words without interleaving, eight rows of the transposed weight a word. Act-order is read only where it is static
(`g_idx` is `k // g`), since no other layout can hold a shuffled one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantkit.core.formats import INT4
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, LayoutError
from quantkit.layouts import validation
from quantkit.layouts.arrangement import Arrangement
from quantkit.layouts.base import Packing, SideFile, Stored, Unpacking
from quantkit.layouts.schemes import Schemes

NAME = "gptq"
TENSORS: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")
MARKER = "qweight"
#: What a file may leave out.
OPTIONAL = ("g_idx",)
SIDE_FILE: SideFile | None = SideFile("quantize_config.json")

CODES = Arrangement("N", "K i:8", "K N i")
ZEROS = Arrangement("N i:8", "G", "G N i")

#: Stored zero point + this = zero code.
OFFSET = 1
#: A word of symmetric zero points as v1 and v2 store them, all 7 and all 8, in two's complement.
SYMMETRIC_V1, SYMMETRIC_V2 = 0x77777777, 0x88888888 - 2**32


def check(scheme: Scheme, n: int, k: int) -> None:
    """Raise LayoutError unless the scheme is INT4 and `n` and `k` are multiples of 32 (LAYOUTS 1.2)."""
    _check_scheme(scheme)
    way_out = "use --layout compressed-tensors, or --skip the weight"
    validation.multiples("the GPTQ layout", n, k, of_n=32, of_k=32, way_out=way_out)
    scheme.groups(k)


def stored(scheme: Scheme, n: int, k: int) -> Stored:
    """Return suffix -> (dtype, shape) of what `pack` stores for an `[n, k]` weight (LAYOUTS 1.1)."""
    g = scheme.groups(k)
    return {
        "qweight": (torch.int32, (k // 8, n)),
        "qzeros": (torch.int32, (g, n // 8)),
        "scales": (torch.float16, (g, n)),
        "g_idx": (torch.int32, (k,)),
    }


def size(shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
    """Return `(n, k)` from the shape of `qweight`."""
    words, n = validation.matrix(shapes, "qweight")
    return n, 8 * words


def pack(q: QuantizedTensor) -> dict[str, Tensor]:
    """Return the tensors of LAYOUTS 1.2; LayoutError for a zero point of 0, which v1 cannot store."""
    return packing(q.scheme, q.shape, q.scales, q.zeros).whole(q.codes)


def packing(scheme: Scheme, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None) -> Packing:
    """Return what `pack` does with rows of codes, and its tensors, of which those without codes are filled."""
    return packing_zeros_less(scheme, shape, scales, zeros, OFFSET)


def unpack(tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedTensor:
    """Return the record; LayoutError for act-order, zero points that contradict `sym`, or malformed tensors.

    Symmetric files are read by their data: all zero points 7 is v1 and all 8 is v2, whatever the label (LAYOUTS 1.4).
    A missing `g_idx` counts as `k // g`.
    """
    return unpacking(tensors, scheme).record()


def unpacking(tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
    """Return what `unpack` does, rows of codes at a time."""
    return unpacking_zeros_plus(tensors, scheme, OFFSET)


def write_config(schemes: Schemes) -> dict[str, Any]:
    """Return the `quantization_config` of LAYOUTS 1.3; other schemes and dense linears go to `dynamic`."""
    return config_of(schemes, NAME)


def read_config(config: Mapping[str, Any]) -> Schemes | None:
    """Return the schemes of a v1 config, None for another format; CheckpointError if it is unusable."""
    return schemes_of(config, NAME)


def packing_zeros_less(
    scheme: Scheme, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None, offset: int
) -> Packing:
    """Return the packing of a record into GPTQ tensors, zero points stored less `offset` (1: v1, 0: v2)."""
    n, k = shape
    check(scheme, n, k)
    if zeros is not None and bool((zeros < offset).any()):
        raise LayoutError("a zero point of 0 cannot be stored in GPTQ v1 (LAYOUTS 1.4): use --layout gptq-v2")
    if zeros is None:
        same = SYMMETRIC_V1 if offset else SYMMETRIC_V2
        points = scales.new_full((scheme.groups(k), n // 8), same, dtype=torch.int32)
    else:
        points = ZEROS.pack(zeros - offset, 4).view(-1, n // 8)
    words = torch.empty([n * k // 8], dtype=torch.int32, device=scales.device)
    tensors = {
        "qweight": words.view(k // 8, n),
        "qzeros": points,
        "scales": validation.half(scales).t().contiguous(),
        "g_idx": _natural_order(scheme.group_size or k, k, scales.device).clone(),
    }
    return Packing(tensors, CODES.packing(words, 4, shape))


def zero_points(scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Return the zero points uint8 `[n, g]` of a record, which are all 8 when it is symmetric."""
    return torch.full_like(scales, INT4.zero_code, dtype=torch.uint8) if zeros is None else zeros


def unpacking_zeros_plus(tensors: Mapping[str, Tensor], scheme: Scheme, offset: int) -> Unpacking:
    """Return the unpacking of GPTQ tensors whose zero points are stored less `offset`."""
    n, k = size({name: tuple(t.shape) for name, t in tensors.items()}, scheme)
    check(scheme, n, k)
    validation.match(tensors, stored(scheme, n, k), optional=OPTIONAL)
    if "g_idx" in tensors and not torch.equal(
        tensors["g_idx"], _natural_order(scheme.group_size or k, k, tensors["g_idx"].device)
    ):
        raise LayoutError("g_idx is not k // group_size: the checkpoint is act-ordered, and only static order is read")
    zeros = _zero_codes(tensors["qzeros"], scheme, (n, scheme.groups(k)), offset)
    fill = CODES.unpacking(tensors["qweight"], 4, (n, k))
    return Unpacking(scheme, (n, k), validation.half(tensors["scales"].t()), zeros, fill)


def config_of(schemes: Schemes, name: str) -> dict[str, Any]:
    """Return the public config with `name` as the checkpoint format, `-` written as `_`."""
    _check_scheme(schemes.default)
    label = name.replace("-", "_")
    dynamic: dict[str, dict[str, Any]] = {}
    for module in schemes.ignore:
        if module.startswith("re:"):
            dynamic[f"-:{module[3:]}"] = {}
        elif module != "lm_head":  # which has a key of its own
            dynamic[f"-:^(?:{re.escape(module)})$"] = {}
    for pattern, scheme in schemes.overrides:
        _check_scheme(scheme)
        dynamic.setdefault(f"+:^{validation.whole(pattern)}", _entries(scheme))
    config = {
        "quant_method": "gptq",
        **_entries(schemes.default),
        "desc_act": False,
        "checkpoint_format": label,
        "format": label,
        "lm_head": head_is_packed(schemes),
        "pack_dtype": "int32",
    }
    return config | ({"dynamic": dynamic} if dynamic else {})


def schemes_of(config: Mapping[str, Any], name: str) -> Schemes | None:
    """Return the schemes of a GPTQ config whose checkpoint format is `name`, None for another."""
    if config.get("quant_method") != "gptq" or config.get("is_marlin_format") is True:
        return None
    older, newer = (
        validation.entry(config, key, str, type(None), default=None) for key in ("checkpoint_format", "format")
    )
    if older and newer and older != newer:
        raise CheckpointError(f"checkpoint_format {older!r:.40} contradicts format {newer!r:.40}: keep the right one")
    if (newer or older or NAME) != name.replace("-", "_"):
        return None
    if validation.entry(config, "pack_dtype", str, default="int32") != "int32":
        raise CheckpointError(f"GPTQ words of pack_dtype {config['pack_dtype']!r:.40}: only int32 is read")
    ignore = [] if validation.entry(config, "lm_head", bool, default=False) else ["lm_head"]
    overrides: list[tuple[str, Scheme]] = []
    for key, changes in (validation.entry(config, "dynamic", dict, type(None), default=None) or {}).items():
        start = key.removeprefix("+:").removeprefix("-:")
        own = re.fullmatch(r"\^\(\?:(.*)\)\$", start)
        pattern = own[1] if own and validation.compiles(own[1]) else validation.pattern(f"(?:{start}).*")
        if key.startswith("-:"):
            ignore.append(validation.literal(pattern) or f"re:{pattern}")
        elif type(changes) is not dict:
            raise CheckpointError(f"{key!r:.80} in 'dynamic' must be an object")
        else:
            overrides.append((pattern, _scheme({**config, **changes})))
    return Schemes(_scheme(config), tuple(overrides), tuple(ignore))


def head_is_packed(schemes: Schemes) -> bool:
    """Return whether the output head is quantized too: none of the names that models give it is ignored."""
    return not any(module.rpartition(".")[2] in ("lm_head", "embed_out") for module in schemes.ignore)


def _check_scheme(scheme: Scheme) -> None:
    if scheme.format != INT4:
        raise LayoutError(f"the GPTQ layout holds int4, not {scheme.format.name}: use --layout compressed-tensors")


def _zero_codes(words: Tensor, scheme: Scheme, shape: tuple[int, int], offset: int) -> Tensor | None:
    if scheme.symmetric:
        if not any(bool((words == same).all()) for same in (SYMMETRIC_V1, SYMMETRIC_V2)):
            raise LayoutError("the config says symmetric, but qzeros are neither all 7 (v1) nor all 8 (v2)")
        return None
    raw = ZEROS.unpack(words, 4, shape)
    if offset and bool((raw == 15).any()):
        raise LayoutError(
            "a stored zero point of 15 means 16 in GPTQ v1, and readers disagree on it (LAYOUTS 1.4): if these are "
            "v2's zero points under v1's label, set checkpoint_format and format to gptq_v2 in config.json"
        )
    return raw + offset


@lru_cache(maxsize=16)
def _natural_order(group: int, k: int, device: torch.device) -> Tensor:
    return torch.arange(k, dtype=torch.int32, device=device) // group


def _entries(scheme: Scheme) -> dict[str, Any]:
    return {"bits": scheme.format.bits, "group_size": scheme.group_size or -1, "sym": scheme.symmetric}


def _scheme(config: Mapping[str, Any]) -> Scheme:
    bits, group = validation.entry(config, "bits", int), validation.entry(config, "group_size", int)
    if bits != 4:
        raise CheckpointError(f"a GPTQ checkpoint of {bits} bits: quantkit reads 4")
    if group < 1 and group != -1:
        raise CheckpointError(f"GPTQ group_size {group}: it must be positive, or -1 for one scale per row")
    return Scheme(INT4, None if group == -1 else group, symmetric=validation.entry(config, "sym", bool))
