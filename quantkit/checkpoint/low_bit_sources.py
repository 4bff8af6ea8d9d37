"""Weights of published models in few bits, found in a folder and dequantized on reading
(`low_bit_weights`).

The configuration names the form by its `quant_method`; the quantized tensors are named by the data:

- `fp8`: `X.weight` float8 with `X.weight_scale_inv` or another name of a scale, one for each block
  of `weight_block_size`, or without that for each tensor or row. Several experts in one tensor `X`
  have `X_scale_inv`.
- `mxfp4`: `X_blocks` uint8 `[experts, n, k / 32, 16]` and `X_scales` uint8 `[experts, n, k / 32]`;
  the model's parameter `X` is `[experts, k, n]`.
- `compressed-tensors`: `X.weight` or `X.weight_packed` with `X.weight_scale`; `FORMATS` lists the
  forms. The config group that names `X` states bits and groups. Integers may have
  `X.weight_zero_point` and `X.weight_g_idx`.

Scales of activations and of the cache belong to no dense model. They are left out, and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.checkpoint.low_bit_weights import (
    LowBitWeight,
    grid,
    unpack_e2m1,
    unpack_float8,
    unpack_words,
)
from quantkit.checkpoint.stored_tensors import Derived, StoredTensors
from quantkit.core.formats import dtype_name
from quantkit.errors import CheckpointError
from quantkit.io.json_files import AGAIN
from quantkit.layouts.compressed_tensors import (
    MARLIN24,
    METHOD as COMPRESSED_TENSORS,
    CompressedTensorsConfig,
    Weights,
    in_order_of_targets,
)
from quantkit.layouts.schemes import ORIGINAL, Patterns, Schemes, read
from quantkit.names import JsonView

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Dtypes of scales; E8M0, a bare exponent, is stored as float8 or as a plain byte.
EXPONENT = (torch.float8_e8m0fnu, torch.uint8)
FLOAT = (torch.float32, torch.bfloat16, torch.float16)
#: Suffixes of scales: after `X.` of a weight `X.weight`, or after `X_` of a tensor `X` of several
#: experts.
WEIGHT_SCALES = ("weight_scale_inv", "weight_scale", "scale_inv", "scale", "qscale_weight")
#: Last names of tensors that accompany codes, and may have their dtype.
SCALE, ZERO, ORDER = "weight_scale", "weight_zero_point", "weight_g_idx"
DIVISOR, SHAPE, PACKED = "weight_global_scale", "weight_shape", "weight_packed"
#: Names of scales for a linear's input and output and for the cache, which a dense model lacks.
INPUT_SCALES = (
    "activation_scale",
    "input_scale",
    "input_scale_ub",
    "qscale_act",
    "input_global_scale",
    "input_zero_point",
    "input_g_idx",
)
CACHE_SCALES = tuple(
    f"{of}_{what}" for of in ("output", "q", "k", "v") for what in ("scale", "zero_point")
)

#: MXFP4 of gpt-oss.
BLOCKS, EXPONENTS, GROUP = "_blocks", "_scales", 32

#: Rows and columns that share a scale; None: all columns, of a row or of the tensor.
Block = tuple[int, int] | None


class Form(NamedTuple):
    """How codes are stored: the last name of their tensor, the dtypes of codes and scales, and the
    bits of a code.
    """

    title: str
    codes: tuple[torch.dtype, ...]
    scales: tuple[torch.dtype, ...]
    bits: Collection[int]
    name: str = "weight"
    divisor: bool = False


_FP8 = Form("FP8", FP8, (*FLOAT, *EXPONENT), (8,))
_INT = Form("INT", (torch.int8,), FLOAT, range(2, 9))
#: Format and type in a compressed-tensors config -> form.
FORMATS = {
    ("pack-quantized", "int"): Form("INT", (torch.int32,), FLOAT, (2, 4, 8), PACKED),
    ("int-quantized", "int"): _INT,
    ("naive-quantized", "int"): _INT,
    ("naive-quantized", "float"): _FP8,
    ("float-quantized", "float"): _FP8,
    ("mxfp8-quantized", "float"): _FP8,
    ("nvfp4-pack-quantized", "float"): Form(
        "NVFP", (torch.uint8,), FP8[:1], (4,), PACKED, divisor=True
    ),
    ("mxfp4-pack-quantized", "float"): Form("MXFP", (torch.uint8,), EXPONENT, (4,), PACKED),
}


class Scheme(NamedTuple):
    """A configuration's entry for some weights: form, bits, and the block that shares a scale."""

    form: Form
    bits: int
    block: Block
    symmetric: bool = True
    scales: tuple[str, ...] = (SCALE,)

    @property
    def title(self) -> str:
        """The name of the form with its bits, such as INT4."""
        return self.form.title if self.form is _FP8 else f"{self.form.title}{self.bits}"

    @property
    def codes_an_entry(self) -> int:
        """The codes in an entry of the stored tensor."""
        return 8 * self.form.codes[0].itemsize // self.bits if self.form.name == PACKED else 1

    @property
    def unpack(self) -> Callable[[Tensor], Tensor]:
        """The function that turns codes into float32 values."""
        if self.form.name != PACKED:
            return unpack_float8 if self.form is _FP8 else torch.Tensor.float
        return partial(unpack_words, self.bits) if torch.int32 in self.form.codes else unpack_e2m1


class LowBit(NamedTuple):
    """Hold the form of a source's low-bit weights in words, their dense tensors, and the tensors to
    leave out.
    """

    form: str
    tensors: dict[str, Derived]
    dropped: tuple[str, ...] = ()
    activations: bool = False

    @property
    def left_out(self) -> str:
        """List the parts of the source that the dense model lacks."""
        counted = Counter(name.rpartition(".")[2] for name in self.dropped).items()
        parts = [", ".join(f"{count} {name}" for name, count in counted)] if counted else []
        return " and ".join(parts + ["the rounding of activations"] * self.activations)


def find(src: StoredTensors, stated: JsonView, dtype: torch.dtype) -> LowBit | None:
    """Find the low-bit weights of a source by its `quantization_config`, `stated`; None for other
    methods.

    CheckpointError for a missing weight or scale, a wrong shape or dtype, or an unreadable
    configuration. Values are checked when they are read.
    """
    method = stated.get("quant_method")
    if method == "mxfp4":
        return _mxfp4(src, dtype)
    if method == "fp8":
        sizes = stated.get("weight_block_size")
        block = None if sizes is None else _block(sizes, "weight_block_size")
        only = Scheme(_FP8, 8, block, scales=WEIGHT_SCALES)
        return _weights(
            src,
            [only],
            lambda name: only,
            dtype,
            activations=stated.get("activation_scheme") is not None,
            cache=stated.get("kv_cache_scheme") is not None,
        )
    if (
        method == COMPRESSED_TENSORS and "quantkit" not in stated
    ):  # FP8 of quantkit carries FP6 or FP5, a layout
        return _compressed_tensors(src, stated, dtype)
    return None


def is_variant(src: StoredTensors, schemes: Schemes) -> bool:
    """Return True if INT4 weights of `pack-quantized` are stored otherwise than that layout can
    hold.

    Earlier writers left out shapes, or zero points unpacked. With act-order the groups of columns
    are in the data.
    """
    last = {name: name.rpartition(".") for name in src.names()}
    count = Counter(end for _, _, end in last.values())
    usual = {ZERO: torch.int32, SHAPE: torch.int64}
    odd = any(
        src.dtype(name) != usual.get(end, src.dtype(name)) for name, (*_, end) in last.items()
    )
    if odd or (count[PACKED] and not count[SHAPE]):
        return True
    for name, (module, _, end) in last.items():
        if end == ORDER and src.dtype(name) in (torch.int32, torch.int64):
            order = src.get(name)
            if not torch.equal(
                order, torch.arange(len(order)) // (schemes.of(module).group_size or len(order))
            ):
                return True
    return False


def _compressed_tensors(src: StoredTensors, stated: JsonView, dtype: torch.dtype) -> LowBit | None:
    config = read(CompressedTensorsConfig, stated)
    targets: dict[str, Scheme] = {}
    for group in config.config_groups.values():
        if group.weights is not None:
            fmt = group.format or config.format
            if fmt in (MARLIN24, "dense"):
                return None
            targets |= dict.fromkeys(group.targets or (), _scheme(group.weights, fmt))
    if not targets:
        return None
    for key in ("transform_config", "sparsity_config"):
        found = getattr(config, key)
        if found and found.get("format") != "dense":
            title = next(iter(targets.values())).title
            raise CheckpointError(f"{title} weights with {key!r} are not read", ORIGINAL)
    scheme_of = Patterns(*in_order_of_targets(targets)).of
    activations = any(group.activations for group in config.config_groups.values())
    weights = _weights(
        src,
        list(dict.fromkeys(targets.values())),
        scheme_of,
        dtype,
        activations,
        cache=activations or config.kv_cache_scheme is not None,
    )
    return weights if weights.tensors else None


def _scheme(weights: Weights, fmt: Any) -> Scheme:
    """Read the `weights` of a config group of format `fmt`; CheckpointError for a form that is not
    read.
    """
    kind, bits, size = weights.type, weights.num_bits, weights.group_size
    unstated = "tensor" if size is None else "group" if size > 0 else "channel"
    strategy = weights.strategy or unstated  # as the library takes it
    form = FORMATS.get((str(fmt), kind))
    if form is None or bits not in form.bits:
        raise CheckpointError(
            f"{kind}{bits} weights of compressed-tensors in format {str(fmt)!r:.40} are not read",
            ORIGINAL,
        )
    block: Block = None
    if strategy == "block":
        block = _block(weights.block_structure, "block_structure")
    elif strategy in ("group", "tensor_group") and (strategy == "group") != form.divisor:
        block = _block([1, size], "group_size")
    elif strategy not in ("tensor", "channel"):
        title = Scheme(form, bits, None).title
        raise CheckpointError(
            f"{title} weights of strategy {strategy!r:.40} are not read", ORIGINAL
        )
    return Scheme(form, bits, block, weights.symmetric)


def _block(sizes: Any, key: str) -> tuple[int, int]:
    if isinstance(sizes, str):
        sizes = [int(size) if size.isdecimal() else 0 for size in sizes.split("x")]
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or not all(type(size) is int and size > 0 for size in sizes)
    ):
        raise CheckpointError(
            f"{key!r} is {str(sizes)!r:.60} in the quantization config: it must be two positive "
            "sizes"
        )
    return sizes[0], sizes[1]


def _weights(
    src: StoredTensors,
    schemes: list[Scheme],
    scheme_of: Callable[[str], Scheme],
    dtype: torch.dtype,
    activations: bool,
    cache: bool,
) -> LowBit:
    """Find the weights of `schemes`; the source also rounds `activations`, or has scales of the
    `cache`.
    """
    names = src.names()
    stored = set(names)
    kinds = {kind for scheme in schemes for kind in scheme.form.codes if scheme.form.name != PACKED}
    tensors: dict[str, Derived] = {}
    forms: dict[str, Counter[str]] = {}
    for name in names:
        module, _, last = name.rpartition(".")
        if last != PACKED and (
            src.dtype(name) not in kinds or last in (SCALE, ZERO, *CACHE_SCALES, *INPUT_SCALES)
        ):
            continue
        prefix = f"{module}." if last in ("weight", PACKED) else f"{name}_"
        scheme = scheme_of(prefix[:-1])
        weight, shared = _weight(src, stored, name, prefix, scheme)
        forms.setdefault(scheme.title, Counter())[shared] += 1
        dense = name if last != PACKED else f"{prefix}weight"
        if dense in tensors or (dense != name and dense in stored):
            raise CheckpointError(f"{dense} is there twice, also as {name}", AGAIN)
        tensors[dense] = weight.derived(dtype)
    used = {part for derived in tensors.values() for part in derived.inputs}
    for name in names:
        if name not in used and name.endswith(("weight_scale_inv", SCALE, DIVISOR, PACKED)):
            titles = " or ".join(dict.fromkeys(scheme.title for scheme in schemes))
            raise CheckpointError(
                f"{name} is there, the {titles} weight that it scales is not", AGAIN
            )
    ends = [f"{mark}{end}" for end in INPUT_SCALES for mark in "._"] + [
        f".{end}" for end in CACHE_SCALES
    ] * cache
    dropped = [name for name in names if name.endswith(tuple(ends))]
    words = " and ".join(
        f"{title} ({', '.join(w for w, _ in c.most_common())})" for title, c in forms.items()
    )
    return LowBit(words or schemes[0].title, tensors, tuple(dropped), activations)


def _weight(
    src: StoredTensors, stored: Collection[str], name: str, prefix: str, scheme: Scheme
) -> tuple[LowBitWeight, str]:
    """Collect the tensors of a weight, and the block that shares a scale. CheckpointError if a
    tensor is missing or malformed.
    """
    form = scheme.form
    if src.dtype(name) not in form.codes:
        raise CheckpointError(
            f"{name} has dtype {dtype_name(src.dtype(name))}, config.json says {scheme.title}",
            AGAIN,
        )
    scale = next((prefix + end for end in scheme.scales if prefix + end in stored), None)
    needed = {ZERO: not scheme.symmetric, DIVISOR: form.divisor}
    missing = [prefix + end for end in needed if needed[end] and prefix + end not in stored]
    if scale is None or missing:
        absent = prefix + scheme.scales[0] if scale is None else missing[0]
        raise CheckpointError(f"{name} is {scheme.title} and has no {absent}", AGAIN)
    if src.dtype(scale) not in form.scales:
        raise CheckpointError(
            f"{scale} has dtype {dtype_name(src.dtype(scale))}, no scale of {scheme.title} has",
            AGAIN,
        )
    zero, order, divisor, size = (
        prefix + end if prefix + end in stored else None for end in (ZERO, ORDER, DIVISOR, SHAPE)
    )
    shape = _shape(src, name, scale, size, scheme)
    rows, columns, words = _shared_by(src, scale, shape, scheme.block)
    weight = LowBitWeight(
        name,
        scale,
        shape,
        block=(rows, columns),
        unpack=scheme.unpack,
        zero=zero,
        order=order,
        divisor=divisor,
        others=() if size is None else (size,),
    )
    _check_parts(src, weight, scheme)
    return weight, words if scheme.symmetric else f"{words}, zero points"


def _shape(
    src: StoredTensors, name: str, scale: str, size: str | None, scheme: Scheme
) -> tuple[int, ...]:
    """Return the shape of a weight by its codes, its stored shape, or its groups: the last entry
    may be half full.
    """
    shape, many = src.shape(name), scheme.codes_an_entry
    if len(shape) not in (2, 3) or not all(shape):
        raise CheckpointError(
            f"{name} is {scheme.title} of shape {list(shape)}, which is no matrix", AGAIN
        )
    *outer, n, entries = shape
    if size is not None and len(shape) == 2:
        true = src.get(size).tolist() if src.shape(size) == (2,) else None
        if true is None or true[0] != n or not (entries - 1) * many < true[1] <= entries * many:
            raise CheckpointError(f"{size} says {true}, and {name} has shape {list(shape)}", AGAIN)
        return n, int(true[1])
    k, block, found = entries * many, scheme.block, src.shape(scale)
    if (
        block is not None
        and block[0] == 1
        and len(found) > 1
        and 0 <= k - found[-1] * block[1] < many
    ):
        k = found[-1] * block[1]
    return *outer, n, k


def _check_parts(src: StoredTensors, w: LowBitWeight, scheme: Scheme) -> None:
    """Raise CheckpointError for zero points, groups of columns or a global scale that do not belong
    to a weight.
    """
    rows_and_groups = grid(w.shape, *w.block)
    *outer, rows, groups = rows_and_groups
    if w.zero is not None:
        packed = scheme.form.name == PACKED and src.dtype(w.zero) == torch.int32
        asked = (*outer, -(-rows // scheme.codes_an_entry), groups) if packed else rows_and_groups
        if (
            _trimmed(src.shape(w.zero)) != _trimmed(asked)
            or (src.dtype(w.zero) == torch.int32) != packed
        ):
            raise CheckpointError(
                f"{w.zero} is {dtype_name(src.dtype(w.zero))} of shape {list(src.shape(w.zero))}, "
                f"its weight needs {list(asked)}",
                AGAIN,
            )
        if scheme.form.title == "INT" and not src.dtype(w.zero).is_signed:
            was = dtype_name(src.dtype(w.zero))
            raise CheckpointError(f"{w.zero} is {was}, {scheme.title} needs signed ones", AGAIN)
    if w.order is not None and (
        src.shape(w.order) != w.shape[-1:] or src.dtype(w.order).is_floating_point
    ):
        raise CheckpointError(
            f"{w.order} has shape {list(src.shape(w.order))}, its weight needs {[w.shape[-1]]}",
            AGAIN,
        )
    if w.divisor is not None and _trimmed(src.shape(w.divisor)) not in ((), _trimmed(tuple(outer))):
        raise CheckpointError(
            f"{w.divisor} has shape {list(src.shape(w.divisor))}, its weight needs [1]", AGAIN
        )


def _shared_by(
    src: StoredTensors, scale: str, shape: tuple[int, ...], block: Block
) -> tuple[int, int, str]:
    """Return how many rows and columns share a scale, also in words; CheckpointError for another
    shape of scales.
    """
    *_, n, k = shape
    found, whole = src.shape(scale), [(1, k, "one scale a row"), (n, k, "one scale a tensor")]
    sizes = whole if block is None else [(*block, _words(block))]
    fitting = {
        (min(rows, n), min(columns, k)): (rows, columns, form)
        for rows, columns, form in sizes
        if _trimmed(grid(shape, rows, columns)) == _trimmed(found)
    }
    if len(fitting) != 1:
        asked = " or ".join(str(list(grid(shape, rows, columns))) for rows, columns, _ in sizes)
        raise CheckpointError(
            f"{scale} has shape {list(found)}, config.json asks for {asked} with a weight of "
            f"{list(shape)}",
            AGAIN,
        )
    return next(iter(fitting.values()))


def _words(block: tuple[int, int]) -> str:
    return f"one scale for {block[1]}" if block[0] == 1 else f"{block[0]}x{block[1]} block scales"


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Remove sizes of 1 at the end, which programs write or leave out."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _mxfp4(src: StoredTensors, dtype: torch.dtype) -> LowBit:
    shapes = {name: src.shape(name) for name in src.names() if src.dtype(name) == torch.uint8}
    tensors: dict[str, Derived] = {}
    for name in shapes:
        weight = name.removesuffix(BLOCKS).removesuffix(EXPONENTS)
        codes, exponents = shapes.get(weight + BLOCKS), shapes.get(weight + EXPONENTS)
        if weight == name or weight in tensors:
            continue
        if codes is None or exponents is None:
            absent = weight + (BLOCKS if codes is None else EXPONENTS)
            raise CheckpointError(f"{name} is MXFP4 and {absent} is missing", AGAIN)
        if len(codes) != 4 or codes[3] != GROUP // 2 or codes[:3] != exponents:
            raise CheckpointError(
                f"{weight}{BLOCKS} has shape {list(codes)} and {weight}{EXPONENTS} "
                f"{list(exponents)}: MXFP4 experts "
                f"have [experts, n, k / {GROUP}, {GROUP // 2}] and the same without the last",
                AGAIN,
            )
        experts, n, groups, _ = codes
        stored = LowBitWeight(
            weight + BLOCKS,
            weight + EXPONENTS,
            (experts, n, GROUP * groups),
            block=(1, GROUP),
            unpack=unpack_e2m1,
            transposed=True,
        )
        tensors[weight] = stored.derived(dtype)
    return LowBit(f"MXFP4 ({_words((1, GROUP))})", tensors)
