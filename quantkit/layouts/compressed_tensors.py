"""compressed-tensors: INT4 as `pack-quantized`, FP6 and FP5 exactly, carried in FP8 E4M3 as `float-quantized`.

Every value of the FP6 and FP5 formats is an E4M3 value (LAYOUTS 11), so the carrier holds values and the `quantkit` key
of the config says which format they are of. Words are filled along a row, without interleaving (LAYOUTS 9).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.core.formats import INT4, Format
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.core.tensors import aligned
from quantkit.errors import CheckpointError, LayoutError
from quantkit.layouts import validation
from quantkit.layouts.arrangement import Arrangement
from quantkit.layouts.base import Packing, SideFile, Stored, Unpacking
from quantkit.layouts.schemes import Schemes

NAME = "compressed-tensors"
TENSORS: tuple[str, ...] = (
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "weight",
)
MARKER = "weight_scale"
SIDE_FILE: SideFile | None = None

CODES = Arrangement("N", "K i:8", "N K i")
ZEROS = Arrangement("N i:8", "G", "N G i")

#: Codes translated at a time, with an index of four bytes for two: what stays in the cache.
CHUNK = 1 << 19
NO_CODE = 255
#: The format that `marlin24_ct` reads.
MARLIN24 = "marlin-24"


def check(scheme: Scheme, n: int, k: int) -> None:
    """Raise LayoutError unless INT4, or FP6 or FP5 with one scale per row; any `n`, and any `k` the groups divide."""
    _check_scheme(scheme)
    validation.multiples("compressed-tensors", n, k, of_n=1, of_k=1, way_out="--skip the weight")
    scheme.groups(k)


def stored(scheme: Scheme, n: int, k: int) -> Stored:
    """Return suffix -> (dtype, shape) of what `pack` stores for an `[n, k]` weight (LAYOUTS 9)."""
    g = scheme.groups(k)
    scales = {"weight_scale": (torch.float16, (n, g))}
    if scheme.format.is_float:
        return {"weight": (torch.float8_e4m3fn, (n, k)), **scales}
    zeros = {} if scheme.symmetric else {"weight_zero_point": (torch.int32, (-(-n // 8), g))}
    packed = {"weight_packed": (torch.int32, (n, -(-k // 8)))}
    return {**packed, **scales, "weight_shape": (torch.int64, (2,)), **zeros}


def size(shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
    """Return `(n, k)`; with one scale per row `k` comes out as the next multiple of 8, since shapes say no more."""
    if scheme.format.is_float:
        return validation.matrix(shapes, "weight")
    n, words = validation.matrix(shapes, "weight_packed")
    if scheme.group_size is None:
        return n, 8 * words
    return n, validation.matrix(shapes, "weight_scale")[1] * scheme.group_size


def pack(q: QuantizedTensor) -> dict[str, Tensor]:
    """Return the tensors of LAYOUTS 9; places past `n` and `k` in the last words are 0."""
    return packing(q.scheme, q.shape, q.scales, q.zeros).whole(q.codes)


def packing(scheme: Scheme, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None) -> Packing:
    """Return what `pack` does with rows of codes, and its tensors, of which those without codes are filled."""
    n, k = shape
    check(scheme, n, k)
    halves = validation.half(scales)
    if scheme.format.is_float:
        carrier, table = (
            torch.empty(shape, dtype=torch.uint8, device=scales.device),
            _carrier(scheme.format, scales.device),
        )

        def carry(first: int, codes: Tensor) -> None:
            _translate(codes, table, carrier[first : first + len(codes)])

        return Packing({"weight": carrier.view(torch.float8_e4m3fn), "weight_scale": halves}, carry)
    wide = k + -k % 8
    words = torch.empty([n * wide // 8], dtype=torch.int32, device=scales.device)
    tensors = {
        "weight_packed": words.view(n, -1),
        "weight_scale": halves,
        "weight_shape": torch.tensor([n, k], dtype=torch.int64),
    }
    if zeros is not None:
        points = ZEROS.pack(pad(zeros, (0, 0, 0, -n % 8)), 4)
        tensors["weight_zero_point"] = points.view(-1, zeros.shape[1])
    packed = CODES.packing(words, 4, (n, wide))
    return Packing(tensors, packed if wide == k else lambda first, codes: packed(first, pad(codes, (0, wide - k))))


def unpack(tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedTensor:
    """Return the record; LayoutError for act-order, FP8 values that are not of the format, or malformed tensors."""
    found = unpacking(tensors, scheme)
    try:
        return found.record()
    except LayoutError:
        if scheme.format.is_float:
            _require_codes(found.codes(), tensors["weight"], scheme.format)  # the better reason
        raise


def unpacking(tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
    """Return what `unpack` does, rows of codes at a time: FP8 values that are not of the format become NO_CODE."""
    if scheme.format.is_float:
        return _unpacking_carrier(tensors, scheme)
    n, k = _true_shape(tensors, scheme)
    expected = stored(scheme, n, k)
    if "weight_g_idx" in tensors:
        expected["weight_g_idx"] = (torch.int32, (k,))
    validation.match(tensors, expected)
    if "weight_g_idx" in tensors:
        order = tensors["weight_g_idx"]
        natural = torch.arange(k, dtype=torch.int32, device=order.device) // (scheme.group_size or k)
        if not torch.equal(order, natural):
            raise LayoutError("weight_g_idx is not k // group_size: act-ordered groups are not read")
    zeros = None
    if not scheme.symmetric:
        zeros = ZEROS.unpack(tensors["weight_zero_point"], 4, (n + -n % 8, scheme.groups(k)))
        _nothing_in(zeros[n:], "weight_zero_point")
        zeros = zeros[:n].contiguous()
    wide = k + -k % 8
    unpacked = CODES.unpacking(tensors["weight_packed"], 4, (n, wide))

    def fill_some(first: int, codes: Tensor) -> None:
        padded = codes.new_empty(len(codes), wide)
        unpacked(first, padded)
        _nothing_in(padded[:, k:], "weight_packed")
        codes.copy_(padded[:, :k])

    fill = unpacked if wide == k else fill_some
    return Unpacking(scheme, (n, k), validation.half(tensors["weight_scale"]), zeros, fill)


def write_config(schemes: Schemes) -> dict[str, Any]:
    """Return the `quantization_config` of LAYOUTS 9, one config group for each scheme.

    Of the targets that match a module, the library takes a name before a pattern, the first pattern in text order, and
    a class last; `overrides` goes by its own order. So a name gets what `schemes` gives it, and every pattern excludes
    the ones before it.
    """
    targets: dict[Scheme, list[str]] = {schemes.default: ["Linear"]}
    before = ""
    for pattern, scheme in schemes.overrides:
        name = validation.literal(pattern)
        if name is not None and "." in name:  # without a dot it might be read as a class
            targets.setdefault(schemes.of(name), []).append(name)
        else:
            targets.setdefault(scheme, []).append(f"re:{before}{validation.whole(pattern)}")
            before += f"(?!{validation.whole(pattern)})"
    for scheme in (schemes.default, *(scheme for _, scheme in schemes.overrides)):
        _check_scheme(scheme)
    formats = sorted({_public_format(scheme) for scheme in targets})
    mixed = len(formats) > 1
    groups = {f"group_{i}": _group(names, scheme, mixed) for i, (scheme, names) in enumerate(targets.items())}
    return {
        "quant_method": NAME,
        "format": "mixed-precision" if mixed else formats[0],
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": list(schemes.ignore),
        "kv_cache_scheme": None,
        "config_groups": groups,
    }


def read_config(config: Mapping[str, Any]) -> Schemes | None:
    """Return the schemes of a compressed-tensors config, None for another method or format `marlin-24`.

    CheckpointError for what the record cannot hold: other widths, quantized activations, transforms, and FP8 values
    that quantkit did not write.
    """
    if config.get("quant_method") != NAME or config.get("format") == MARLIN24:
        return None
    return schemes_of(config, "pack-quantized")


def schemes_of(config: Mapping[str, Any], packed: str) -> Schemes:
    """Return the INT4 schemes of a config whose groups have the format `packed`; CheckpointError as `read_config`."""
    for key in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        if validation.entry(config, key, dict, type(None), default=None):
            raise CheckpointError(f"a compressed-tensors checkpoint with {key!r}: only plain weights are read")
    groups = validation.entry(config, "config_groups", dict)
    by_target: dict[str, Scheme] = {}
    for name in groups:
        group = validation.entry(groups, name, dict)
        if any(group.get(key) is not None for key in ("input_activations", "output_activations")):
            raise CheckpointError(f"config group {name!r:.40} quantizes activations: only weights are read")
        fmt = validation.entry(group, "format", str, type(None), default=None) or validation.entry(
            config, "format", str
        )
        scheme = _scheme_of(validation.entry(group, "weights", dict), fmt, packed)
        by_target |= dict.fromkeys(validation.strings(group, "targets"), scheme)
    if not by_target:
        raise CheckpointError("'config_groups' names no target: nothing is quantized")
    # The library's own order: names, then patterns as text, then classes.
    exact = [(re.escape(t), s) for t, s in sorted(by_target.items()) if t != "Linear" and not t.startswith("re:")]
    patterns = [(f"(?:{t[3:]}).*", s) for t, s in sorted(by_target.items()) if t.startswith("re:")]
    for pattern, _ in patterns:
        validation.pattern(pattern)
    default = by_target.get("Linear", next(iter(by_target.values())))
    return Schemes(default, (*exact, *patterns), validation.strings(config, "ignore"))


def _check_scheme(scheme: Scheme) -> None:
    if scheme.format.is_float and scheme.group_size is not None:
        raise LayoutError(
            f"compressed-tensors carries {scheme.format.name} with one scale per row: quantize with "
            "--group-size channel"
        )


def _unpacking_carrier(tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
    n, k = size({name: tuple(t.shape) for name, t in tensors.items()}, scheme)
    check(scheme, n, k)
    validation.match(tensors, stored(scheme, n, k))
    carried = tensors["weight"].contiguous().view(torch.uint8)
    table = _codes_of_carrier(scheme.format, carried.device)

    def fill(first: int, codes: Tensor) -> None:
        _translate(carried[first : first + len(codes)], table, codes)

    return Unpacking(scheme, (n, k), validation.half(tensors["weight_scale"]), None, fill)


def _require_codes(codes: Tensor, carrier: Tensor, fmt: Format) -> None:
    missing = (codes == NO_CODE).nonzero()
    if len(missing):
        row, column = missing[0].tolist()
        value = float(carrier[row, column])
        raise LayoutError(
            f"'weight' holds {value} at [{row}, {column}], which is no {fmt.name} value: quantize the original model "
            "again"
        )


def _true_shape(tensors: Mapping[str, Tensor], scheme: Scheme) -> tuple[int, int]:
    validation.match({k: v for k, v in tensors.items() if k == "weight_shape"}, {"weight_shape": (torch.int64, (2,))})
    n, k = tensors["weight_shape"].tolist()
    try:
        check(scheme, n, k)
    except LayoutError as error:  # whose way out is one for a weight that is yet to be packed
        rule = str(error).split(": ")[0]
        raise LayoutError(f"{rule}: 'weight_shape' says [{n}, {k}], it is damaged, fetch it again") from error
    return n, k


def _nothing_in(padding: Tensor, name: str) -> None:
    if bool(padding.any()):
        raise LayoutError(f"{name!r} holds codes past its true shape, where it must be 0: the file is damaged")


def _translate(codes: Tensor, table: Tensor, out: Tensor) -> None:
    """Fill contiguous `out` with what `table` (of `_in_pairs`) has for every byte of `codes`."""
    flat, found = codes.reshape(-1), out.view(-1)
    if len(flat) % 2 or found.storage_offset() % 2:
        both = torch.empty_like(pad(flat, (0, len(flat) % 2)))
        _translate(pad(flat, (0, len(flat) % 2)), table, both)
        found.copy_(both[: len(flat)])
        return
    for some, slot in zip(flat.split(CHUNK), found.split(CHUNK), strict=True):
        pairs = aligned(some, torch.uint16).view(torch.uint16)
        torch.index_select(table, 0, pairs.int(), out=slot.view(torch.int16))


@lru_cache(maxsize=16)
def _carrier(fmt: Format, device: torch.device) -> Tensor:
    """The E4M3 bytes of every two codes."""
    return _in_pairs(_carried(fmt)).to(device)


@lru_cache(maxsize=16)
def _codes_of_carrier(fmt: Format, device: torch.device) -> Tensor:
    """The codes of every two E4M3 bytes, NO_CODE where a byte is no value of the format."""
    table = torch.full((256,), NO_CODE, dtype=torch.uint8)
    table[_carried(fmt).long()] = torch.arange(len(fmt.values), dtype=torch.uint8)
    return _in_pairs(table).to(device)


def _carried(fmt: Format) -> Tensor:
    return torch.tensor(fmt.values).to(torch.float8_e4m3fn).view(torch.uint8)


def _in_pairs(table: Tensor) -> Tensor:
    """Return a table of bytes as int16 `[65536]`, for two bytes at a time."""
    table = pad(table, (0, 256 - len(table)))
    return torch.stack(torch.meshgrid(table, table, indexing="xy"), -1).view(torch.int16).flatten()


def _public_format(scheme: Scheme) -> str:
    return "float-quantized" if scheme.format.is_float else "pack-quantized"


def _group(targets: list[str], scheme: Scheme, mixed: bool) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "num_bits": 8 if scheme.format.is_float else 4,
        "type": "float" if scheme.format.is_float else "int",
        "symmetric": scheme.symmetric,
        "strategy": "group" if scheme.group_size else "channel",
        "group_size": scheme.group_size,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {"targets": targets, "input_activations": None, "output_activations": None, "weights": weights}
    return group | ({"format": _public_format(scheme)} if mixed else {})


def _scheme_of(weights: Mapping[str, Any], fmt: str, packed: str) -> Scheme:
    bits, kind = (
        validation.entry(weights, "num_bits", int, default=8),
        validation.entry(weights, "type", str, default="int"),
    )
    if fmt != packed or kind != "int" or bits != 4:
        raise CheckpointError(
            f"a compressed-tensors checkpoint of {kind}{bits} in format {fmt!r:.40}, not written by quantkit: "
            f"read are int4 in {packed!r}, and fp6 and fp5 in FP8 with the 'quantkit' key"
        )
    strategy = validation.entry(weights, "strategy", str)
    group = validation.entry(weights, "group_size", int, type(None), default=None)
    if strategy == "group" and group is not None and group > 0:
        return Scheme(INT4, group, symmetric=validation.entry(weights, "symmetric", bool, default=True))
    if strategy == "channel":
        return Scheme(INT4, None, symmetric=validation.entry(weights, "symmetric", bool, default=True))
    raise CheckpointError(f"strategy {strategy!r:.40} with group_size {group}: quantkit reads 'group' and 'channel'")
