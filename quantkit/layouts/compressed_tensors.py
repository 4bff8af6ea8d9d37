"""compressed-tensors: INT2 to INT8 as `pack-quantized`, NVFP4 and MXFP4 as `nvfp4-pack-quantized`
and `mxfp4-pack-quantized`, FP6 and FP5 exactly, in FP8 E4M3 as `float-quantized`.

Every value of the FP6 and FP5 formats is an E4M3 value (docs/layouts.md 11). The carrier holds
values, and the `quantkit` key of the config has the format. Integers are a stream of bits along a
row, zero points along a column (docs/layouts.md 9). Codes of four bits of NVFP4 and MXFP4 are the
same stream, in bytes (docs/layouts.md 9.1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from msgspec import UNSET, Struct, UnsetType, field
from torch import Tensor

from quantkit.core.formats import FORMATS, Format, aligned
from quantkit.core.quantized_tensor import Scheme, Shape, Tensors
from quantkit.errors import CheckpointError, LayoutError, Setting, Words
from quantkit.layouts.arrangement import (
    OnRows,
    blocks,
    decoded_rows,
    pack_zeros,
    stream_packer,
    stream_unpacker,
    stream_words,
    unpack_zeros,
)
from quantkit.layouts.base import DAMAGED, Layout, Stored, match, matrix
from quantkit.layouts.gptq import check_static
from quantkit.layouts.schemes import (
    EMBEDDINGS,
    LONGEST,
    ORIGINAL,
    Schemes,
    anchored,
    check_amount,
    is_embedding,
    literal,
    pattern,
)
from quantkit.names import Json

T = TypeVar("T")

#: Integers by `num_bits` of a config.
INTEGERS = {fmt.bits: fmt for fmt in FORMATS.values() if not fmt.is_float}
#: Stands for an FP8 byte that is no value of the format.
NO_CODE = 255
#: The method in configs, and the format that `Marlin24CompressedTensors` reads.
METHOD, MARLIN24 = "compressed-tensors", "marlin-24"
#: Targets that are classes of modules: of all linears, and of all embeddings.
LINEAR, EMBEDDING = "Linear", "Embedding"
#: The formats of weights that `CompressedTensors` holds.
INTEGER, FLOAT = "pack-quantized", "float-quantized"
#: The dtype in a file, if torch cannot compute with it, is that of a byte.
BYTES = {torch.float8_e8m0fnu: torch.uint8}


class Weights(Struct, kw_only=True):
    """The quantization of weights in a config group."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    dynamic: Any = False
    actorder: Any = None
    block_structure: Any = None
    observer: Any = "minmax"
    observer_kwargs: Any = field(default_factory=dict)


class Group(Struct, kw_only=True):
    """A config group: names or patterns of modules, and their schemes."""

    targets: list[str] | None = None
    input_activations: Any = None
    output_activations: Any = None
    weights: Weights | None = None
    format: str | UnsetType | None = UNSET

    @property
    def activations(self) -> bool:
        """Whether activations are quantized."""
        return self.input_activations is not None or self.output_activations is not None


class CompressedTensorsConfig(Struct, kw_only=True):
    """The config of compressed-tensors (docs/layouts.md 9)."""

    format: str | None = None
    quantization_status: Any = "compressed"
    global_compression_ratio: Any = None
    ignore: list[str] | None = None
    kv_cache_scheme: Json | None = None
    config_groups: dict[str, Group]
    transform_config: Json | UnsetType | None = UNSET
    sparsity_config: Json | UnsetType | None = UNSET


class CompressedTensors(Layout):
    """compressed-tensors: integers of any group size, NVFP4 and MXFP4, FP6 and FP5 with one scale
    per row, any `n` and `k`.
    """

    NAME = "compressed-tensors"
    QUANT_METHODS = (METHOD,)
    CONFIG = CompressedTensorsConfig
    HOLDS = "integers, and floats whose values are FP8 E4M3 values"
    TENSORS = (
        "weight_packed",
        "weight_scale",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
        "weight_global_scale",
        "weight",
    )
    MARKER = "weight_scale"
    TITLE, MULTIPLES = "compressed-tensors", (1, 1)
    WAY_OUT = Words(Setting("skip"), "the weight")
    OTHER_FORMAT = Words("use another", Setting("format"))
    GATHERS = True
    INTEGERS_IF = "there is no act-order"
    FLOATS_IF = "every FP8 value is one of the format"

    def holds(self, fmt: Format) -> bool:
        return _is_carried(fmt) if fmt.is_float else fmt in INTEGERS.values()

    def stored(self, scheme: Scheme, n: int, k: int) -> Stored:
        g = scheme.groups(k)
        scales = {"weight_scale": (torch.float16, (n, g))}
        if scheme.format.is_microscaled:
            return _microscaled(scheme.format, n, k, g)
        if scheme.format.is_float:
            return {"weight": (torch.float8_e4m3fn, (n, k)), **scales}
        along = partial(stream_words, bits=scheme.format.bits)
        zeros = {} if scheme.symmetric else {"weight_zero_point": (torch.int32, (along(n), g))}
        return {
            "weight_packed": (torch.int32, (n, along(k))),
            **scales,
            "weight_shape": (torch.int64, (2,)),
            **zeros,
        }

    def size(self, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> Shape:
        """Compute `(n, k)`; with one scale per row `k` is the most that the words hold, as shapes
        say no more.
        """
        if scheme.format.is_microscaled:
            n, pairs = matrix(shapes, "weight_packed")
            return n, 2 * pairs
        if scheme.format.is_float:
            return matrix(shapes, "weight")
        n, words = matrix(shapes, "weight_packed")
        if scheme.group_size is None:
            return n, 32 * words // scheme.format.bits
        return n, matrix(shapes, "weight_scale")[1] * scheme.group_size

    def packer(
        self,
        tensors: Tensors,
        scheme: Scheme,
        shape: Shape,
        scales: Tensor,
        zeros: Tensor | None,
    ) -> OnRows:
        """Make a row-wise packer; places past `n` and `k` in the last words are 0."""
        if scheme.format.is_microscaled:
            _store_scales(tensors, scales, scheme.format)
            return stream_packer(
                tensors["weight_packed"].view(torch.int32), scheme.format.bits, shape[1]
            )
        tensors["weight_scale"].copy_(scales)
        if scheme.format.is_float:
            carrier, table = tensors["weight"].view(torch.uint8), _carrier(scheme.format)
            return lambda first, codes: _translate(
                codes, table, carrier[first : first + len(codes)]
            )
        if zeros is not None:
            tensors["weight_zero_point"].copy_(pack_zeros(zeros, scheme.format.bits))
        tensors["weight_shape"].copy_(torch.tensor(shape))
        return stream_packer(tensors["weight_packed"], scheme.format.bits, shape[1])

    def unpacker(
        self, tensors: Tensors, scheme: Scheme, shape: Shape
    ) -> tuple[Tensor, Tensor | None, OnRows]:
        """Make a row-wise unpacker, which raises LayoutError for FP8 values that are not of the
        format.
        """
        scales, (n, k), bits, zeros = tensors["weight_scale"], shape, scheme.format.bits, None
        if scheme.format.is_microscaled:
            _check_divisor(tensors, scheme.format)
            words = aligned(tensors["weight_packed"]).view(torch.int32)
            return _scales(scales, scheme.format), None, stream_unpacker(words, bits, k)
        if scheme.format.is_float:
            return scales, None, partial(_fill_codes, tensors["weight"], scheme.format)
        if not scheme.symmetric:
            zeros = unpack_zeros(tensors["weight_zero_point"], bits, n, "weight_zero_point")
        return scales, zeros, stream_unpacker(tensors["weight_packed"], bits, k, "weight_packed")

    def check_tensors(self, tensors: Tensors, scheme: Scheme) -> Shape:
        if scheme.format.is_float:
            return super().check_tensors(tensors, scheme)
        shape = {name: tensor for name, tensor in tensors.items() if name == "weight_shape"}
        match(shape, {"weight_shape": (torch.int64, (2,))})
        n, k = shape["weight_shape"].tolist()
        try:
            self.check(scheme, n, k)
        except LayoutError as error:  # its way out is for a weight that is not packed yet
            raise LayoutError(
                f"{error.rule}: 'weight_shape' says [{n}, {k}], it is damaged, fetch it again"
            ) from error
        stated = {"weight_g_idx": (torch.int32, (k,))} if "weight_g_idx" in tensors else {}
        match(tensors, self.stored(scheme, n, k) | stated)
        check_static(tensors, "weight_g_idx", scheme, k)
        return n, k

    def gather(self, scheme: Scheme, tensors: Tensors, rows: Tensor, k: int) -> Tensor:
        if scheme.format.is_microscaled:
            words = aligned(tensors["weight_packed"]).view(torch.int32)
            scales = _scales(tensors["weight_scale"], scheme.format)
            return decoded_rows(scheme, rows, k, words, scales, None)
        if not scheme.format.is_float:
            return decoded_rows(
                scheme,
                rows,
                k,
                tensors["weight_packed"],
                tensors["weight_scale"],
                tensors.get("weight_zero_point"),
            )
        scales = tensors["weight_scale"].index_select(0, rows).float()
        return tensors["weight"].index_select(0, rows).float().mul_(scales)

    def config(self, schemes: Schemes) -> CompressedTensorsConfig:
        """Make the config of docs/layouts.md 9, with one config group for each scheme.

        The library prefers a target that is a name, then the first pattern in text order, then a
        class. `overrides` has its own order. So each name has the same scheme as in `schemes`:
        every pattern excludes the patterns before it. Embeddings of one scheme are stated by their
        class, because many classes of vLLM do not tell the name.
        """
        targets: dict[Scheme, list[str]] = {schemes.default: [LINEAR]}
        names = {literal(text): scheme for text, scheme in schemes.overrides}
        tables = {scheme for name, scheme in names.items() if name and is_embedding(name)}
        for scheme in tables if len(tables) == 1 else ():
            targets.setdefault(scheme, []).append(EMBEDDING)
        before = ""
        for text, scheme in schemes.overrides:
            name = literal(text)
            if name is not None and "." in name:  # without a dot it might be read as a class
                targets.setdefault(schemes.of(name), []).append(name)
            else:
                if len(before) > LONGEST:  # each pattern repeats all before it
                    raise LayoutError(
                        "compressed-tensors does not hold so many overrides by pattern",
                        "write patterns that match more, or the names in full",
                    )
                targets.setdefault(scheme, []).append(f"re:{before}{anchored(text)}")
                before += f"(?!{anchored(text)})"
        groups = [Group(targets=names, weights=_weights(s)) for s, names in targets.items()]
        formats = [_format_of(scheme) for scheme in targets]
        mixed = len(set(formats)) > 1
        for group, name in zip(groups, formats if mixed else (), strict=mixed):
            group.format = name
        return CompressedTensorsConfig(
            format="mixed-precision" if mixed else formats[0],
            ignore=list(schemes.ignore),
            config_groups={f"group_{i}": group for i, group in enumerate(groups)},
        )

    def claims(self, config: Mapping[str, Any]) -> bool:
        return config.get("format") != MARLIN24

    def schemes(self, config: CompressedTensorsConfig) -> Schemes:
        """Read the schemes; CheckpointError for other widths, quantized activations, transforms,
        and FP8 values that quantkit did not write: the record cannot hold them.
        """
        return schemes_of(config, INTEGER)


def schemes_of(config: CompressedTensorsConfig, packed: str) -> Schemes:
    """Read the schemes of integers of the groups with the format `packed`; CheckpointError as
    `CompressedTensors.schemes`.
    """
    for key in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        if getattr(config, key):
            raise CheckpointError(
                f"a compressed-tensors checkpoint with {key!r}: only plain weights are read",
                ORIGINAL,
            )
    by_target: dict[str, Scheme] = {}
    for name, group in config.config_groups.items():
        if group.weights is None or group.activations:
            raise CheckpointError(
                f"config group {name!r:.40} quantizes activations: only weights are read", ORIGINAL
            )
        by_target |= dict.fromkeys(
            group.targets or (), _scheme_of(group.weights, group.format or config.format, packed)
        )
    if not by_target:
        raise CheckpointError("'config_groups' names no target: nothing is quantized")
    return Schemes(*in_order_of_targets(by_target), tuple(config.ignore or ()))


def in_order_of_targets(by_target: Mapping[str, T]) -> tuple[T, tuple[tuple[str, T], ...]]:
    """Return the value of `Linear`, which is the default, and (regular expression, value) pairs of
    the other targets.

    The first match wins, in the library's order: names, then patterns as text, then classes. The
    class `Embedding` stands for the names of token embeddings. CheckpointError for a target that is
    no pattern.
    """
    ordered = sorted(by_target.items(), key=lambda pair: pair[0])
    classes = {LINEAR, EMBEDDING}
    exact = [
        (re.escape(t), value) for t, value in ordered if not (t in classes or t.startswith("re:"))
    ]
    check_amount(t[3:] for t in by_target if t.startswith("re:"))
    patterns = [(f"(?:{t[3:]}).*", value) for t, value in ordered if t.startswith("re:")]
    for text, _ in patterns:
        pattern(text)
    tables = [(EMBEDDINGS, by_target[EMBEDDING])] if EMBEDDING in by_target else []
    return (
        by_target.get(LINEAR, next(iter(by_target.values()))),
        (*exact, *patterns, *tables),
    )


def _microscaled(fmt: Format, n: int, k: int, g: int) -> Stored:
    """Give dtype and shape of every tensor of NVFP4, or of MXFP4, which has no tensor scale."""
    stored: Stored = {
        "weight_packed": (torch.uint8, (n, k // 2)),
        "weight_scale": (BYTES.get(fmt.scale_dtype, fmt.scale_dtype), (n, g)),
    }
    if fmt.scale_unit != 1:
        stored["weight_global_scale"] = (torch.float32, (1,))
    return stored


def _store_scales(tensors: Tensors, scales: Tensor, fmt: Format) -> None:
    """Fill in the scales of eight bits, and the tensor scale, by which readers divide them;
    LayoutError for a scale that the format does not store.
    """
    found = (scales.float() / fmt.scale_unit).to(fmt.scale_dtype)
    wrong = found.float() * fmt.scale_unit != scales.float()
    if bool(wrong.any()):
        row, group = wrong.nonzero()[0].tolist()
        raise LayoutError(
            f"the scale of row {row}, group {group} is {float(scales[row, group])}, which is no "
            f"scale of {fmt.name}",
            "quantize the original model again",
        )
    tensors["weight_scale"].copy_(found.view(tensors["weight_scale"].dtype))
    if "weight_global_scale" in tensors:
        tensors["weight_global_scale"].fill_(1 / fmt.scale_unit)


def _check_divisor(tensors: Tensors, fmt: Format) -> None:
    """Raise LayoutError for a tensor scale that quantkit does not write."""
    found = tensors.get("weight_global_scale")
    if found is not None and float(found) != 1 / fmt.scale_unit:
        raise LayoutError(
            f"'weight_global_scale' is {float(found)}, it must be {1 / fmt.scale_unit:.0f}", DAMAGED
        )


def _scales(stored: Tensor, fmt: Format) -> Tensor:
    """Read scales of eight bits to float32."""
    return stored.view(fmt.scale_dtype).float() * fmt.scale_unit


def _fill_codes(weight: Tensor, fmt: Format, first: int, codes: Tensor) -> None:
    """Fill in the codes of some rows of an FP8 weight; LayoutError for a value that has no code."""
    some = weight[first : first + len(codes)]
    _translate(some.view(torch.uint8), _codes_of_carrier(fmt), codes)
    if codes.numel() and int(codes.max()) == NO_CODE:
        row, column = (codes == NO_CODE).nonzero()[0].tolist()
        raise LayoutError(
            f"'weight' holds {float(some[row, column])} at [{first + row}, {column}], which is no "
            f"{fmt.name} value",
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


@lru_cache
def _codes_of_carrier(fmt: Format) -> Tensor:
    """Tabulate the code of every E4M3 byte, NO_CODE for other values."""
    table = torch.full((256,), NO_CODE, dtype=torch.uint8)
    table[_carrier(fmt).long()] = torch.arange(len(fmt.values), dtype=torch.uint8)
    return table


def _weights(scheme: Scheme) -> Weights:
    by_group = "group" if scheme.format.scale_unit == 1 else "tensor_group"
    return Weights(
        num_bits=8 if _format_of(scheme) == FLOAT else scheme.format.bits,
        type="float" if scheme.format.is_float else "int",
        symmetric=scheme.symmetric,
        strategy="channel" if scheme.group_size is None else by_group,
        group_size=scheme.group_size,
    )


def _format_of(scheme: Scheme) -> str:
    if scheme.format.is_microscaled:
        return f"{scheme.format.name}-pack-quantized"
    return FLOAT if scheme.format.is_float else INTEGER


def _scheme_of(weights: Weights, fmt: str | None, packed: str) -> Scheme:
    bits, kind, group = weights.num_bits, weights.type, weights.group_size
    if fmt != packed or kind != "int" or bits not in ((4,) if packed == MARLIN24 else INTEGERS):
        raise CheckpointError(
            f"a compressed-tensors checkpoint of {kind}{bits} in format {fmt!r:.40}, not written "
            f"by quantkit: read are int2 to int6 and int8 in {packed!r}, and fp6, fp5, nvfp4 and "
            "mxfp4 with the 'quantkit' key",
            ORIGINAL,
        )
    if weights.strategy == "channel" or (weights.strategy == "group" and (group or 0) > 0):
        return Scheme(
            INTEGERS[bits], group if weights.strategy == "group" else None, weights.symmetric
        )
    raise CheckpointError(
        f"strategy {weights.strategy!r:.40} with group_size {group}: quantkit reads 'group' and "
        "'channel'",
        ORIGINAL,
    )
