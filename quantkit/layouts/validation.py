"""Checks of stored tensors and config entries; a failure is one line that names the tensor or
entry, and the rule.

Checkpoints are untrusted input: type, shape and contents are checked before anything is used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from quantkit.core.formats import Format
from quantkit.core.tensors import dtype_name
from quantkit.errors import CheckpointError, Command, LayoutError, Option, Setting, Words
from quantkit.layouts.expressions import compiled, literal

#: Names the layout that holds every scheme.
USUAL = Words("use", Setting("layout", "compressed-tensors"))
_SCALES = (torch.float16, torch.bfloat16, torch.float32)
#: The way out for weights of a method that is not read.
ORIGINAL = "give the original model, which the model card names as base_model"
DAMAGED = "the checkpoint is damaged or in another layout than its config states, fetch it again"


def check_multiples(
    title: str, shape: tuple[int, int], units: tuple[int, int], way_out: str
) -> None:
    """Raise LayoutError unless `n` and `k` of `shape` are positive multiples of `units`."""
    for letter, size, unit in zip("nk", shape, units, strict=True):
        if size < 1 or size % unit:
            rule = f"a multiple of {unit}" if unit > 1 else "positive"
            raise LayoutError(f"{title} needs {letter} to be {rule}, and it is {size}", way_out)


def half(scales: Tensor) -> Tensor:
    """Copy scales `[n, g]` to contiguous float16; zero and negative ones are legal.

    LayoutError for NaN, infinity, and values that float16 would change (docs/layouts.md 11).
    """
    if scales.numel() and not isfinite(float(scales.abs().amax())):  # amax propagates NaN
        row, group = (~torch.isfinite(scales)).nonzero()[0].tolist()
        raise LayoutError(
            f"the scale of row {row}, group {group} is {float(scales[row, group])}",
            "quantize again",
        )
    exact = scales.to(torch.float16, copy=True, memory_format=torch.contiguous_format)
    changed = exact.float() != scales.float()
    if bool(changed.any()):
        row, group = changed.nonzero()[0].tolist()
        fits = bool(torch.isfinite(exact).all())
        rounding = Words(
            "round them (reported) by", Command("pack"), "with", Option("requantize_scales", True)
        )
        raise LayoutError(
            f"{int(changed.sum())} {dtype_name(scales.dtype)} scales are no float16 values, first "
            f"{float(scales[row, group])} at row {row}, group {group}",
            rounding if fits else "the largest is 65504, " + ORIGINAL,
        )
    return exact


def match(
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    optional: Collection[str] = (),
) -> None:
    """Raise LayoutError unless `tensors` have the dtypes and shapes of `stored`; scales may be
    bfloat16 or float32.
    """
    for name, (dtype, shape) in stored.items():
        if name not in tensors:
            if name in optional:
                continue
            raise LayoutError(f"tensor {name!r} is missing: the checkpoint is incomplete")
        found = tensors[name]
        if tuple(found.shape) != shape:
            raise LayoutError(
                f"tensor {name!r} must have shape {list(shape)}, it has {list(found.shape)}",
                DAMAGED,
            )
        if found.dtype != dtype and not (dtype == torch.float16 and found.dtype in _SCALES):
            was = dtype_name(found.dtype)
            raise LayoutError(f"tensor {name!r} must be {dtype_name(dtype)}, it is {was}", DAMAGED)
    for name in tensors:
        if name not in stored:
            raise LayoutError(
                f"tensor {name!r} does not belong to this scheme: it would be ignored"
            )


def matrix(shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, int]:
    """Give both sizes of the stored matrix `name`; raise LayoutError if it is missing
    or no matrix.
    """
    shape = shapes.get(name)
    if shape is None or len(shape) != 2:
        raise LayoutError(
            f"tensor {name!r} must be a matrix, it is {'missing' if shape is None else list(shape)}"
        )
    return shape[0], shape[1]


def codes_in_words(words: int, fmt: Format) -> int:
    """Count the codes in 32-bit `words` of a row; raise LayoutError unless they hold a multiple of
    32 codes.
    """
    if words % fmt.bits:
        raise LayoutError(f"{words} words a row are no multiple of {fmt.bits}, as {fmt.name} has")
    return words // fmt.bits * 32


def entry(config: Mapping[str, Any], key: str, *kinds: type, default: Any = ...) -> Any:
    """Get `config[key]`; raise CheckpointError unless its type is one of `kinds` (a bool is no
    int).
    """
    value = config.get(key, default)
    if value is ...:
        raise CheckpointError(f"{key!r} is missing in the quantization config")
    if type(value) not in kinds and not (key not in config and value is default):
        expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise CheckpointError(
            f"{key!r} must be {expected} in the quantization config, it is {str(value)!r:.60}"
        )
    return value


def strings(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Get the list of strings `config[key]`, `()` when missing or null; raise CheckpointError
    otherwise.
    """
    values = entry(config, key, list, type(None), default=None) or []
    if not all(type(value) is str for value in values):
        raise CheckpointError(f"{key!r} must be a list of strings in the quantization config")
    return tuple(values)


def dense_head(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Name the output head, which stays dense unless the config has it quantized."""
    return () if entry(config, "lm_head", bool, default=False) else ("lm_head",)


def group_size(size: int, method: str) -> int | None:
    """Convert a config's group size, where -1 stands for one scale per row; raise CheckpointError
    for other signs.
    """
    if size < 1 and size != -1:
        raise CheckpointError(
            f"{method} group_size {size}: it must be positive, or -1 for one scale per row"
        )
    return None if size == -1 else size


def pattern(text: str) -> str:
    """Return `text` if it is a regular expression; raise CheckpointError otherwise."""
    try:
        if literal(text) is None:
            compiled(text)
    except ValueError as error:
        raise CheckpointError(
            f"{text!r:.80} in the quantization config is no regular expression ({error!s:.80})",
            "mend it",
        ) from error
    return text


def anchored(text: str) -> str:
    """Wrap a pattern so that it matches to the end of a name; raise LayoutError if it cannot be
    embedded.
    """
    inner = f"(?:{text})$"
    if literal(text) is None and not (is_pattern(text) and is_pattern(inner)):
        raise LayoutError(
            f"override {text!r:.80} cannot stand in a config", "write it without flags at its start"
        )
    return inner


def is_pattern(text: str) -> bool:
    """Return True if `text` is a regular expression that quantkit matches."""
    try:
        pattern(text)
    except CheckpointError:
        return False
    return True
