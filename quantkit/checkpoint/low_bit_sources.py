"""FP8 and MXFP4 weights of published models, dequantized on reading.

Three forms are read. Each is told by the `quant_method` of the configuration, and which tensors are quantized is told
by the data:

- `fp8`: `X.weight` float8 with `X.weight_scale_inv` or another name of a scale, one for each block of
  `weight_block_size`, or without that for each tensor or row. Several experts in one tensor `X` have `X_scale_inv`.
- `compressed-tensors` with 8-bit floats: `X.weight` float8 with `X.weight_scale`, one for each tensor, row, group of
  columns or block.
- `mxfp4`: `X_blocks` uint8 `[experts, n, k / 32, 16]` and `X_scales` uint8 `[experts, n, k / 32]`; the model's
  parameter `X` is `[experts, k, n]`.

A scale multiplies, in float32; the product is rounded once to the dtype of the model. Sources: the model card and code
of DeepSeek-V3 (blocks), the OCP Microscaling specification 1.0 (E2M1, E8M0), and the gpt-oss model card (MXFP4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.algorithms.numerics import row_slices
from quantkit.checkpoint.derived import Derived, Read
from quantkit.checkpoint.stored_tensors import StoredTensors
from quantkit.core.tensors import dtype_name
from quantkit.errors import CheckpointError
from quantkit.io.json_files import AGAIN
from quantkit.layouts import validation
from quantkit.layouts.compressed_tensors import METHOD as COMPRESSED_TENSORS

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Dtypes of scales; E8M0, a bare exponent, is stored as float8 or as a plain byte.
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8)
#: Names of scales behind `X.` of a weight `X.weight`, or behind `X_` of a tensor `X` of several experts.
WEIGHT_SCALES = ("weight_scale_inv", "weight_scale", "scale_inv", "scale", "qscale_weight")
#: Likewise of scales of a linear's input, which a dense model does not have, and of its output and the cache.
INPUT_SCALES = ("activation_scale", "input_scale", "input_scale_ub", "qscale_act")
CACHE_SCALES = ("output_scale", "q_scale", "k_scale", "v_scale")

BLOCKS, EXPONENTS = "_blocks", "_scales"
#: MXFP4: the weights that share a scale, and the value of each code; a byte has two codes, the first in its low bits.
GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E2M1_PAIRS = torch.tensor([[E2M1[byte & 15], E2M1[byte >> 4]] for byte in range(256)], device="cpu")

#: Rows and columns that share a scale; None: all columns, of a row or of the tensor.
Block = tuple[int, int] | None


class LowBit(NamedTuple):
    """Hold the form of a source's low-bit weights in words, their dense tensors, and the tensors to leave out."""

    form: str
    tensors: dict[str, Derived]
    dropped: tuple[str, ...] = ()


def find(src: StoredTensors, stated: Mapping[str, Any], dtype: torch.dtype) -> LowBit | None:
    """Find the low-bit weights of a source by its `quantization_config`, `stated`; None for other methods.

    CheckpointError for a weight without its scale or a scale without its weight, for wrong shapes and dtypes, and for
    a configuration that cannot be read. Values are checked when they are read.
    """
    method = stated.get("quant_method")
    if method == "mxfp4":
        return _mxfp4(src, dtype)
    if method == "fp8":
        sizes = stated.get("weight_block_size")
        return _fp8(src, stated, [None if sizes is None else _block(sizes, "weight_block_size")], dtype)
    if method == COMPRESSED_TENSORS and (blocks := _float8_blocks(stated)):
        return _fp8(src, stated, blocks, dtype)
    return None


def _float8_blocks(stated: Mapping[str, Any]) -> list[Block]:
    """Return the blocks of a compressed-tensors config if all its groups are of 8-bit floats, else none.

    FP8 with the `quantkit` key carries FP6 or FP5, which is a layout and no source.
    """
    groups = validation.entry(stated, "config_groups", dict, type(None), default=None) or {}
    weights = [group.get("weights") if isinstance(group, dict) else None for group in groups.values()]
    float8 = [w for w in weights if isinstance(w, dict) and w.get("type") == "float" and w.get("num_bits") == 8]
    if "quantkit" in stated or not weights or len(float8) < len(weights):
        return []
    for key in ("transform_config", "sparsity_config"):
        found = validation.entry(stated, key, dict, type(None), default=None)
        if found and found.get("format") != "dense":
            raise CheckpointError(f"FP8 weights with {key!r} are not read", validation.ORIGINAL)
    return list(dict.fromkeys(map(_block_of_strategy, float8)))


def _block_of_strategy(weights: Mapping[str, Any]) -> Block:
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy in ("tensor", "channel"):
        return None
    if strategy == "block":
        return _block(weights.get("block_structure"), "block_structure")
    if strategy == "group":
        return _block([1, size], "group_size")
    raise CheckpointError(f"FP8 weights of strategy {str(strategy)!r:.40} are not read", validation.ORIGINAL)


def _block(sizes: Any, key: str) -> tuple[int, int]:
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise CheckpointError(
            f"{key!r} is {str(sizes)!r:.60} in the quantization config: it must be two positive sizes"
        )
    return sizes[0], sizes[1]


def _fp8(src: StoredTensors, stated: Mapping[str, Any], blocks: list[Block], dtype: torch.dtype) -> LowBit:
    names = src.names()
    stored = set(names)
    tensors: dict[str, Derived] = {}
    forms: Counter[str] = Counter()
    dropped: list[str] = []
    for name in names:
        if src.dtype(name) not in FP8:
            continue
        prefix = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
        scale = next((prefix + last for last in WEIGHT_SCALES if prefix + last in stored), None)
        if scale is None:
            raise CheckpointError(f"{name} is FP8 and has no {prefix}{WEIGHT_SCALES[0]}", AGAIN)
        rows, columns, form = _shared_by(src, name, scale, blocks)
        forms[form] += 1
        compute = partial(_read_fp8, (name, scale), src.shape(name), (rows, columns), dtype)
        tensors[name] = Derived(src.shape(name), dtype, (name, scale), compute)
        dropped += [prefix + last for last in INPUT_SCALES if prefix + last in stored]
    scaled = {scale for derived in tensors.values() for scale in derived.inputs}
    for name in names:
        if name not in scaled and name.endswith(("weight_scale_inv", "weight_scale")):
            raise CheckpointError(f"{name} is there, the FP8 weight that it scales is not", AGAIN)
    if stated.get("kv_cache_scheme") is not None:
        dropped += [name for name in names if name.rpartition(".")[2] in CACHE_SCALES]
    words = ", ".join(form for form, _ in forms.most_common())
    return LowBit(f"FP8 ({words})" if words else "FP8", tensors, tuple(dropped))


def _shared_by(src: StoredTensors, name: str, scale: str, blocks: list[Block]) -> tuple[int, int, str]:
    """Return how many rows and columns share a scale, also in words; CheckpointError for wrong shapes and dtypes."""
    shape, found = src.shape(name), src.shape(scale)
    if src.dtype(scale) not in SCALES:
        raise CheckpointError(f"{scale} has dtype {dtype_name(src.dtype(scale))}, no scale has", AGAIN)
    if len(shape) not in (2, 3):
        raise CheckpointError(f"{name} is FP8 of shape {list(shape)}, which is no matrix", AGAIN)
    *_, n, k = shape
    whole = [(1, k, "one scale a row"), (n, k, "one scale a tensor")]
    sizes = [size for b in blocks for size in (whole if b is None else [(*b, f"{b[0]}x{b[1]} block scales")])]
    fitting = {
        (min(rows, n), min(columns, k)): (rows, columns, form)
        for rows, columns, form in sizes
        if _trimmed(_grid(shape, rows, columns)) == _trimmed(found)
    }
    if len(fitting) != 1:
        asked = " or ".join(str(list(_grid(shape, rows, columns))) for rows, columns, _ in sizes)
        raise CheckpointError(
            f"{scale} has shape {list(found)}, config.json asks for {asked} with a weight of {list(shape)}", AGAIN
        )
    return next(iter(fitting.values()))


def _grid(shape: tuple[int, ...], rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape of the scales of a weight."""
    *outer, n, k = shape
    return *outer, -(-n // rows), -(-k // columns)


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Remove sizes of 1 at the end, which programs write or leave out."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _read_fp8(
    inputs: tuple[str, str],
    shape: tuple[int, ...],
    block: tuple[int, int],
    dtype: torch.dtype,
    read: Read,
    index: int | slice | None,
) -> Tensor:
    """Read and dequantize a weight, or the entry or range `index` of its experts, or of the rows of a matrix."""
    name, scale = inputs
    *outer, n, k = shape
    if outer and not isinstance(index, int):
        return _stacked(shape, dtype, partial(_read_fp8, inputs, shape, block, dtype, read), index)
    expert = index if isinstance(index, int) and _trimmed(tuple(outer)) else None
    scales = _as_float32(read, scale, expert).reshape(_grid((n, k), *block))
    rows = torch.arange(n)
    if not outer and index is not None:
        rows = rows[index].reshape(-1)
    values = read(name, index)
    return _scaled(values.view(-1, k), scales, rows // block[0], block[1], dtype).view(values.shape)


def _scaled(values: Tensor, scales: Tensor, rows: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Multiply float8 values `[n, k]` by scales in float32, and round to `dtype`.

    `rows` maps each row of values to a row of scales; each scale covers `columns` columns.
    """
    n, k = values.shape
    out = torch.empty(n, k, dtype=dtype)
    for some in row_slices(values, k):
        factors = scales[rows[some]].repeat_interleave(columns, 1)[:, :k]
        out[some] = values[some].float().mul_(factors)
    return out


def _mxfp4(src: StoredTensors, dtype: torch.dtype) -> LowBit:
    names = src.names()
    shapes = {name: src.shape(name) for name in names if src.dtype(name) == torch.uint8}
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
                f"{weight}{BLOCKS} has shape {list(codes)} and {weight}{EXPONENTS} {list(exponents)}: MXFP4 experts "
                f"have [experts, n, k / {GROUP}, {GROUP // 2}] and the same without the last",
                AGAIN,
            )
        experts, n, groups, _ = codes
        inputs = (weight + BLOCKS, weight + EXPONENTS)
        shape = (experts, GROUP * groups, n)
        tensors[weight] = Derived(shape, dtype, inputs, partial(_read_mxfp4, inputs, shape, dtype))
    return LowBit(f"MXFP4 (one scale for {GROUP})", tensors)


def _read_mxfp4(
    inputs: tuple[str, str], shape: tuple[int, int, int], dtype: torch.dtype, read: Read, index: int | slice | None
) -> Tensor:
    """Read and dequantize all experts or a range of them, or the matrix `[k, n]` of one."""
    if not isinstance(index, int):
        return _stacked(shape, dtype, partial(_read_mxfp4, inputs, shape, dtype, read), index)
    _, k, n = shape
    codes, scales = read(inputs[0], index), _as_float32(read, inputs[1], index)
    out = torch.empty(k, n, dtype=dtype)
    for some in row_slices(codes, k):
        values = E2M1_PAIRS.index_select(0, codes[some].flatten().int()).view(-1, k // GROUP, GROUP)
        out[:, some] = values.mul_(scales[some].unsqueeze(-1)).view(-1, k).t()
    return out


def _stacked(shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[int], Tensor], some: slice | None) -> Tensor:
    """Read the matrices of all experts, or of `some`, one by one into a tensor of `shape`."""
    experts = range(shape[0])[some or slice(None)]
    out = torch.empty(len(experts), *shape[1:], dtype=dtype)
    for place, expert in enumerate(experts):
        out[place] = read(expert)
    return out


def _as_float32(read: Read, name: str, index: int | None) -> Tensor:
    """Read scales, or a slice of them; CheckpointError if one is not finite (E8M0: a byte of 255)."""
    scales = read(name, index)
    scales = (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()
    if not bool(torch.isfinite(scales).all()):
        first = (~torch.isfinite(scales)).nonzero()[0].tolist()
        at = first if index is None else [index, *first]
        raise CheckpointError(f"{name} has a scale that is NaN or infinite, first at {at}", AGAIN)
    return scales
