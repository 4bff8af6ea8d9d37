"""compressed-tensors: INT2 to INT8 as `pack-quantized`, FP6 and FP5 exactly, in FP8 E4M3 as
`float-quantized`.

Every value of the FP6 and FP5 formats is an E4M3 value (docs/layouts.md 11). The carrier holds
values, and the `quantkit` key of the config has the format. Integers are a stream of bits along a
row, zero points along a column (docs/layouts.md 9).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from quantkit.core.formats import FORMATS, Format
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, LayoutError, Setting, Words
from quantkit.layouts import bit_streams, validation
from quantkit.layouts.arrangement import blocks
from quantkit.layouts.base import Layout, Packing, Stored, Unpacking, static_groups
from quantkit.layouts.expressions import LONGEST, check_amount, literal
from quantkit.layouts.schemes import Schemes

T = TypeVar("T")

#: Integers by `num_bits` of a config.
INTEGERS = {fmt.bits: fmt for fmt in FORMATS.values() if not fmt.is_float}
#: Stands for an FP8 byte that is no value of the format.
NO_CODE = 255
#: The method in configs, and the format that `Marlin24CompressedTensors` reads.
METHOD, MARLIN24 = "compressed-tensors", "marlin-24"


class CompressedTensors(Layout):
    """compressed-tensors: integers of any group size, FP6 and FP5 with one scale per row, any `n`
    and `k`.
    """

    NAME = "compressed-tensors"
    QUANT_METHODS = (METHOD,)
    HOLDS = "integers, and floats whose values are FP8 E4M3 values"
    TENSORS = (
        "weight_packed",
        "weight_scale",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
        "weight",
    )
    MARKER = "weight_scale"
    TITLE, MULTIPLES = "compressed-tensors", (1, 1)
    WAY_OUT = Words(Setting("skip"), "the weight")
    INTEGERS_IF = "there is no act-order"
    FLOATS_IF = "every FP8 value is one of the format"

    def holds(self, fmt: Format) -> bool:
        return _is_carried(fmt) if fmt.is_float else fmt in INTEGERS.values()

    def check_scheme(self, scheme: Scheme) -> None:
        if not self.holds(scheme.format):
            raise LayoutError(
                f"{self.TITLE} holds {self.HOLDS}, not {scheme.format.name}",
                Words("use another", Setting("format")),
            )
        if scheme.format.is_float and scheme.group_size is not None:
            raise LayoutError(
                f"compressed-tensors carries {scheme.format.name} with one scale per row",
                Words("quantize with", Setting("group_size", "channel")),
            )

    def stored(self, scheme: Scheme, n: int, k: int) -> Stored:
        g = scheme.groups(k)
        scales = {"weight_scale": (torch.float16, (n, g))}
        if scheme.format.is_float:
            return {"weight": (torch.float8_e4m3fn, (n, k)), **scales}
        along = partial(bit_streams.words_of, bits=scheme.format.bits)
        zeros = {} if scheme.symmetric else {"weight_zero_point": (torch.int32, (along(n), g))}
        packed = {"weight_packed": (torch.int32, (n, along(k)))}
        return {**packed, **scales, "weight_shape": (torch.int64, (2,)), **zeros}

    def size(self, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
        """Compute `(n, k)`; with one scale per row `k` is the most that the words hold, as shapes
        say no more.
        """
        if scheme.format.is_float:
            return validation.matrix(shapes, "weight")
        n, words = validation.matrix(shapes, "weight_packed")
        if scheme.group_size is None:
            return n, 32 * words // scheme.format.bits
        return n, validation.matrix(shapes, "weight_scale")[1] * scheme.group_size

    def packing(
        self, scheme: Scheme, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None
    ) -> Packing:
        """Make a row-wise packer; places past `n` and `k` in the last words are 0."""
        n, k = shape
        self.check(scheme, n, k)
        if scheme.format.is_float:
            carrier, table = (
                torch.empty(shape, dtype=torch.uint8, device=scales.device),
                _carrier(scheme.format),
            )
            carried = {
                "weight": carrier.view(torch.float8_e4m3fn),
                "weight_scale": validation.half(scales),
            }
            return Packing(
                carried,
                lambda first, codes: _translate(codes, table, carrier[first : first + len(codes)]),
            )
        bits = scheme.format.bits
        words = torch.empty(
            (n, bit_streams.words_of(k, bits)), dtype=torch.int32, device=scales.device
        )
        tensors = {
            "weight_packed": words,
            "weight_scale": validation.half(scales),
            "weight_shape": torch.tensor([n, k], dtype=torch.int64),
        }
        if zeros is not None:
            tensors["weight_zero_point"] = bit_streams.pack_zeros(zeros, bits)
        return Packing(tensors, bit_streams.packer(words, bits, k))

    def unpack(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedTensor:
        """Unpack tensors to a record; LayoutError for act-order, or FP8 values that are not of the
        format.
        """
        found = self.unpacking(tensors, scheme)
        try:
            return found.record()
        except LayoutError:
            if scheme.format.is_float:
                _require_codes(found.codes(), tensors["weight"], scheme.format)  # the better reason
            raise

    def unpacking(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
        """Make a row-wise unpacker; FP8 values that are not of the format become NO_CODE."""
        if scheme.format.is_float:
            return self._unpacking_carrier(tensors, scheme)
        n, k = self._true_shape(tensors, scheme)
        expected = self.stored(scheme, n, k)
        order = tensors.get("weight_g_idx")
        if order is not None:
            expected["weight_g_idx"] = (torch.int32, (k,))
        validation.match(tensors, expected)
        if order is not None and not torch.equal(order, static_groups(scheme, k, order.device)):
            raise LayoutError(
                "weight_g_idx is not k // group_size, act-order at run time is not read",
                validation.ORIGINAL,
            )
        zeros, bits = None, scheme.format.bits
        if not scheme.symmetric:
            zeros = bit_streams.unpack_zeros(
                tensors["weight_zero_point"], bits, n, "weight_zero_point"
            )
        fill = bit_streams.unpacker(tensors["weight_packed"], bits, k, "weight_packed")
        return Unpacking(scheme, (n, k), validation.half(tensors["weight_scale"]), zeros, fill)

    def write_config(self, schemes: Schemes) -> dict[str, Any]:
        """Make the config of docs/layouts.md 9, with one config group for each scheme.

        The library takes the target that is a name before one that is a pattern, the first pattern
        in text order, and a class last. `overrides` has its own order. So each name has the same
        scheme as in `schemes`: every pattern excludes the patterns before it.
        """
        targets: dict[Scheme, list[str]] = {schemes.default: ["Linear"]}
        before = ""
        for pattern, scheme in schemes.overrides:
            name = literal(pattern)
            if name is not None and "." in name:  # without a dot it might be read as a class
                targets.setdefault(schemes.of(name), []).append(name)
            else:
                if len(before) > LONGEST:  # each pattern repeats all before it
                    raise LayoutError(
                        "compressed-tensors does not hold so many overrides by pattern",
                        "write patterns that match more, or the names in full",
                    )
                targets.setdefault(scheme, []).append(f"re:{before}{validation.anchored(pattern)}")
                before += f"(?!{validation.anchored(pattern)})"
        self.check_all(schemes)
        formats = sorted({_public_format(scheme) for scheme in targets})
        mixed = len(formats) > 1
        groups = {
            f"group_{i}": _group(names, scheme, mixed)
            for i, (scheme, names) in enumerate(targets.items())
        }
        return {
            "quant_method": METHOD,
            "format": "mixed-precision" if mixed else formats[0],
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "ignore": list(schemes.ignore),
            "kv_cache_scheme": None,
            "config_groups": groups,
        }

    def read_config(self, config: Mapping[str, Any]) -> Schemes | None:
        """Read the schemes of a compressed-tensors config; None for another method or format
        `marlin-24`.

        CheckpointError for other widths, quantized activations, transforms, and FP8 values that
        quantkit did not write: the record cannot hold them.
        """
        if config.get("quant_method") != METHOD or config.get("format") == MARLIN24:
            return None
        return schemes_of(config, "pack-quantized")

    def _unpacking_carrier(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
        n, k = self.check_tensors(tensors, scheme)
        carrier, table = tensors["weight"].view(torch.uint8), _codes_of_carrier(scheme.format)

        def fill(first: int, codes: Tensor) -> None:
            _translate(carrier[first : first + len(codes)], table, codes)

        return Unpacking(scheme, (n, k), validation.half(tensors["weight_scale"]), None, fill)

    def _true_shape(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> tuple[int, int]:
        shapes = {name: tensor for name, tensor in tensors.items() if name == "weight_shape"}
        validation.match(shapes, {"weight_shape": (torch.int64, (2,))})
        n, k = tensors["weight_shape"].tolist()
        try:
            self.check(scheme, n, k)
        except LayoutError as error:  # its way out is for a weight that is not packed yet
            rule = f"{error.rule}: 'weight_shape' says [{n}, {k}], it is damaged"
            raise LayoutError(f"{rule}, fetch it again") from error
        return n, k


def schemes_of(config: Mapping[str, Any], packed: str) -> Schemes:
    """Read the schemes of integers of the groups with the format `packed`; CheckpointError as
    `read_config`.
    """
    for key in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        if validation.entry(config, key, dict, type(None), default=None):
            raise CheckpointError(
                f"a compressed-tensors checkpoint with {key!r}: only plain weights are read, "
                f"{validation.ORIGINAL}"
            )
    groups = validation.entry(config, "config_groups", dict)
    by_target: dict[str, Scheme] = {}
    for name in groups:
        group = validation.entry(groups, name, dict)
        if any(group.get(key) is not None for key in ("input_activations", "output_activations")):
            raise CheckpointError(
                f"config group {name!r:.40} quantizes activations: only weights are read, "
                f"{validation.ORIGINAL}"
            )
        fmt = validation.entry(group, "format", str, type(None), default=None) or validation.entry(
            config, "format", str
        )
        scheme = _scheme_of(validation.entry(group, "weights", dict), fmt, packed)
        by_target |= dict.fromkeys(validation.strings(group, "targets"), scheme)
    if not by_target:
        raise CheckpointError("'config_groups' names no target: nothing is quantized")
    return Schemes(*in_order_of_targets(by_target), validation.strings(config, "ignore"))


def in_order_of_targets(by_target: Mapping[str, T]) -> tuple[T, tuple[tuple[str, T], ...]]:
    """Return the value of `Linear`, which is the default, and (regular expression, value) pairs of
    the other targets.

    The first match wins, in the library's order: names, then patterns as text, then classes.
    CheckpointError for a target that is no pattern.
    """
    ordered = sorted(by_target.items(), key=lambda pair: pair[0])
    exact = [
        (re.escape(t), value) for t, value in ordered if t != "Linear" and not t.startswith("re:")
    ]
    check_amount(t[3:] for t in by_target if t.startswith("re:"))
    patterns = [(f"(?:{t[3:]}).*", value) for t, value in ordered if t.startswith("re:")]
    for pattern, _ in patterns:
        validation.pattern(pattern)
    return by_target.get("Linear", next(iter(by_target.values()))), (*exact, *patterns)


def _require_codes(codes: Tensor, carrier: Tensor, fmt: Format) -> None:
    missing = (codes == NO_CODE).nonzero()
    if len(missing):
        row, column = missing[0].tolist()
        value = float(carrier[row, column])
        raise LayoutError(
            f"'weight' holds {value} at [{row}, {column}], which is no {fmt.name} value",
            "quantize the original model again",
        )


def _translate(numbers: Tensor, table: Tensor, out: Tensor) -> None:
    """Fill `out` with the entry of `table` for each byte of the matrix `numbers`."""
    table = table.to(out.device)
    for some, part in blocks(out.shape[1], numbers, out):
        part.copy_(table.index_select(0, some.reshape(-1).int()).view(part.shape))


@lru_cache
def _is_carried(fmt: Format) -> bool:
    """Return True if every value of a format is an E4M3 value."""
    values = torch.tensor(fmt.values)
    return torch.equal(values.to(torch.float8_e4m3fn).float(), values)


def _carrier(fmt: Format) -> Tensor:
    """Tabulate the E4M3 byte of every code."""
    return torch.tensor(fmt.values).to(torch.float8_e4m3fn).view(torch.uint8)


def _codes_of_carrier(fmt: Format) -> Tensor:
    """Tabulate the code of every E4M3 byte, NO_CODE for other values."""
    table = torch.full((256,), NO_CODE, dtype=torch.uint8)
    table[_carrier(fmt).long()] = torch.arange(len(fmt.values), dtype=torch.uint8)
    return table


def _public_format(scheme: Scheme) -> str:
    return "float-quantized" if scheme.format.is_float else "pack-quantized"


def _group(targets: list[str], scheme: Scheme, mixed: bool) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "num_bits": 8 if scheme.format.is_float else scheme.format.bits,
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
    group = {
        "targets": targets,
        "input_activations": None,
        "output_activations": None,
        "weights": weights,
    }
    return group | ({"format": _public_format(scheme)} if mixed else {})


def _scheme_of(weights: Mapping[str, Any], fmt: str, packed: str) -> Scheme:
    bits, kind = (
        validation.entry(weights, "num_bits", int, default=8),
        validation.entry(weights, "type", str, default="int"),
    )
    if fmt != packed or kind != "int" or bits not in ((4,) if packed == MARLIN24 else INTEGERS):
        raise CheckpointError(
            f"a compressed-tensors checkpoint of {kind}{bits} in format {fmt!r:.40}, not written "
            "by quantkit: "
            f"read are int2 to int6 and int8 in {packed!r}, and fp6 and fp5 in FP8 with the "
            "'quantkit' key; "
            f"{validation.ORIGINAL}"
        )
    strategy = validation.entry(weights, "strategy", str)
    group = validation.entry(weights, "group_size", int, type(None), default=None)
    if strategy == "channel" or (strategy == "group" and group is not None and group > 0):
        symmetric = validation.entry(weights, "symmetric", bool, default=True)
        return Scheme(INTEGERS[bits], group if strategy == "group" else None, symmetric)
    raise CheckpointError(
        f"strategy {strategy!r:.40} with group_size {group}: quantkit reads 'group' and 'channel', "
        f"{validation.ORIGINAL}"
    )
