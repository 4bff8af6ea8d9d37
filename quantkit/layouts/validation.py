"""What a stored tensor or a config entry must be; anything else ends in one line that names it and the rule.

Checkpoints come from strangers: nothing is used before its type, shape and contents were looked at.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from quantkit.core.tensors import dtype_name
from quantkit.errors import CheckpointError, LayoutError
from quantkit.layouts.base import Stored

_SCALES = (torch.float16, torch.bfloat16, torch.float32)
DAMAGED = "the checkpoint is damaged or in another layout than its config states, fetch it again"


def multiples(layout: str, n: int, k: int, *, of_n: int, of_k: int, way_out: str) -> None:
    """Raise LayoutError unless `n` and `k` are positive multiples of `of_n` and `of_k`."""
    for letter, size, unit in (("n", n, of_n), ("k", k, of_k)):
        if size < 1 or size % unit:
            rule = f"a multiple of {unit}" if unit > 1 else "positive"
            raise LayoutError(f"{layout} needs {letter} to be {rule}, and it is {size}: {way_out}")


def half(scales: Tensor) -> Tensor:
    """Return a contiguous float16 copy of scales `[n, g]`; zero and negative ones are legal.

    LayoutError for NaN, infinity, and values that float16 would change (LAYOUTS 11).
    """
    if scales.numel() and not isfinite(float(scales.abs().amax())):  # in which a NaN comes out too
        row, group = (~torch.isfinite(scales)).nonzero()[0].tolist()
        raise LayoutError(f"the scale of row {row}, group {group} is {float(scales[row, group])}: quantize again")
    if scales.dtype == torch.float16:
        return scales.clone(memory_format=torch.contiguous_format)
    exact = scales.to(torch.float16, memory_format=torch.contiguous_format)
    changed = exact.float() != scales.float()
    if bool(changed.any()):
        row, group = changed.nonzero()[0].tolist()
        raise LayoutError(
            f"{int(changed.sum())} {dtype_name(scales.dtype)} scales are no float16 values, first "
            f"{float(scales[row, group])} at row {row}, group {group}: quantize the original model again"
        )
    return exact


def match(tensors: Mapping[str, Tensor], stored: Stored, optional: Collection[str] = ()) -> None:
    """Raise LayoutError unless `tensors` are those of `stored`; scales may also be bfloat16 or float32."""
    for name, (dtype, shape) in stored.items():
        if name not in tensors:
            if name in optional:
                continue
            raise LayoutError(f"tensor {name!r} is missing: the checkpoint is incomplete")
        found = tensors[name]
        if tuple(found.shape) != shape:
            raise LayoutError(f"tensor {name!r} must have shape {list(shape)}, it has {list(found.shape)}: {DAMAGED}")
        if found.dtype != dtype and not (dtype == torch.float16 and found.dtype in _SCALES):
            was = dtype_name(found.dtype)
            raise LayoutError(f"tensor {name!r} must be {dtype_name(dtype)}, it is {was}: {DAMAGED}")
    for name in tensors:
        if name not in stored:
            raise LayoutError(f"tensor {name!r} does not belong to this scheme: it would be ignored")


def matrix(shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, int]:
    """Return the two sizes of the stored matrix `name`; LayoutError if it is missing or no matrix."""
    shape = shapes.get(name)
    if shape is None or len(shape) != 2:
        raise LayoutError(f"tensor {name!r} must be a matrix, it is {'missing' if shape is None else list(shape)}")
    return shape[0], shape[1]


def entry(config: Mapping[str, Any], key: str, *kinds: type, default: Any = ...) -> Any:
    """Return `config[key]` if its type is one of `kinds` (a bool is no int); CheckpointError otherwise."""
    value = config.get(key, default)
    if value is ...:
        raise CheckpointError(f"{key!r} is missing in the quantization config")
    if type(value) not in kinds and not (key not in config and value is default):
        expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise CheckpointError(f"{key!r} must be {expected} in the quantization config, it is {str(value)!r:.60}")
    return value


def strings(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the list of strings `config[key]`, `()` when missing or null; CheckpointError otherwise."""
    values = entry(config, key, list, type(None), default=None) or []
    if not all(type(value) is str for value in values):
        raise CheckpointError(f"{key!r} must be a list of strings in the quantization config")
    return tuple(values)


def pattern(text: str) -> str:
    """Return `text` if it is a regular expression; CheckpointError otherwise."""
    if not compiles(text):
        raise CheckpointError(f"{text!r:.80} in the quantization config is no regular expression")
    return text


def whole(text: str) -> str:
    """Return the pattern that matches what `text` matches as a whole; LayoutError if it cannot be part of another."""
    inner = f"(?:{text})$"
    if not compiles(text) or not compiles(inner):
        raise LayoutError(f"override {text!r:.80} cannot stand in a config: write it without flags at its start")
    return inner


def literal(text: str) -> str | None:
    """Return the one name that the pattern `text` matches if it is `re.escape` of a name, else None."""
    name = re.sub(r"\\(.)", r"\1", text)
    return name if re.escape(name) == text else None


def compiles(text: str) -> bool:
    """Return whether `text` is a regular expression."""
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return False
    return True
