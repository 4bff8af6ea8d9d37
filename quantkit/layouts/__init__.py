"""File layouts: the place of each code, scale and zero point in a checkpoint, and the form of its
config.json.

docs/layouts.md has the bit-exact definitions. To add a layout, start with `marlin.py`, the shortest
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, LayoutError, QuantkitError, about
from quantkit.layouts import validation
from quantkit.layouts.awq import Awq
from quantkit.layouts.base import Layout
from quantkit.layouts.compressed_tensors import CompressedTensors
from quantkit.layouts.expressions import check_amount
from quantkit.layouts.gptq import Gptq, GptqV2
from quantkit.layouts.humming import Humming
from quantkit.layouts.marlin import Marlin
from quantkit.layouts.marlin24 import Marlin24, Marlin24CompressedTensors
from quantkit.layouts.quick import Quick
from quantkit.layouts.schemes import Schemes
from quantkit.layouts.tcfpx import TcFpx

LAYOUTS: dict[str, Layout] = {
    layout.NAME: layout
    for layout in (
        CompressedTensors(),
        Gptq(),
        GptqV2(),
        Awq(),
        Humming(),
        TcFpx(),
        Quick(),
        Marlin(),
        Marlin24(),
        Marlin24CompressedTensors(),
    )
}

#: Keys of the public config that tell layouts apart; they must agree with the `quantkit` key.
FORMAT_KEYS = ("quant_method", "format", "checkpoint_format", "is_marlin_format", "b_dtype")

OWN_KEYS = {"version", "layout", "scheme", "overrides", "ignore", "recipe_sha256", "padded"}


def read_config(quantization_config: Mapping[str, Any], path: Path | str) -> tuple[Layout, Schemes]:
    """Read the layout and the schemes from the `quantization_config` of the file `path`.

    The `quantkit` key has precedence, because public configs cannot state everything.
    CheckpointError, which names `path`, for a config that no layout knows, that is malformed, or
    that contradicts itself.
    """
    with about(str(path)):
        if not isinstance(quantization_config, Mapping):
            raise CheckpointError("'quantization_config' must be an object")
        if "quantkit" in quantization_config:
            return _read_own(quantization_config)
        for layout in LAYOUTS.values():
            schemes = layout.read_config(quantization_config)
            if schemes is not None:
                return layout, schemes
        raise CheckpointError(
            f"weights quantized by {_method(quantization_config)} are not read", validation.ORIGINAL
        )


def quantkit_key(
    layout_name: str, schemes: Schemes, version: str, recipe_sha256: str | None
) -> dict[str, Any]:
    """Make the `quantkit` entry of `quantization_config`, which `read_config` reads back exactly.

    `recipe_sha256` is None for a checkpoint that no recipe of quantkit made.
    """
    overrides: dict[str, str] = {}
    for pattern, scheme in schemes.overrides:
        overrides.setdefault(pattern, scheme.label)
    key = {
        "version": version,
        "layout": layout_name,
        "scheme": schemes.default.label,
        "overrides": overrides,
        "ignore": list(schemes.ignore),
        "recipe_sha256": recipe_sha256,
    }
    return key | (
        {"padded": {module: list(shape) for module, shape in schemes.padded}}
        if schemes.padded
        else {}
    )


def _method(config: Mapping[str, Any]) -> str:
    """Name the method of a config that no layout reads; early tools do not state theirs."""
    stated = [config[key] for key in (*FORMAT_KEYS, "quant_algo") if config.get(key) is not None]
    if not stated and any(key in config for key in ("load_in_4bit", "load_in_8bit")):
        return "bitsandbytes"
    if not stated and {"bits", "group_size"} <= config.keys():
        return "MLX, or a method without a name,"
    return " ".join(f"{value!r:.40}" for value in stated) or "a method without a name"


def _read_own(config: Mapping[str, Any]) -> tuple[Layout, Schemes]:
    own = validation.entry(config, "quantkit", dict)
    unknown = own.keys() - OWN_KEYS
    if unknown:
        raise CheckpointError(
            f"unknown entries {sorted(unknown)!s:.80} in the 'quantkit' key", "use a newer quantkit"
        )
    validation.entry(own, "version", str)
    validation.entry(own, "recipe_sha256", str, type(None), default=None)
    name = validation.entry(own, "layout", str)
    if name not in LAYOUTS:
        raise CheckpointError(
            f"layout {name!r:.40} is not one of {', '.join(LAYOUTS)}: a newer quantkit may read it"
        )
    overrides = validation.entry(own, "overrides", dict, default={})
    check_amount(overrides)
    schemes = Schemes(
        _parse(validation.entry(own, "scheme", str)),
        tuple(
            (validation.pattern(key), _parse(validation.entry(overrides, key, str)))
            for key in overrides
        ),
        validation.strings(own, "ignore"),
        _true_shapes(validation.entry(own, "padded", dict, default={})),
    )
    try:
        public = LAYOUTS[name].write_config(schemes)
    except LayoutError as error:
        raise CheckpointError("the 'quantkit' key contradicts itself", error.typed) from error
    for key in (
        *FORMAT_KEYS,
        *(public.keys() & {"version"}),
    ):  # of AWQ; other methods state a library version there
        if config.get(key) != public.get(key):
            raise CheckpointError(
                f"{key!r} is {str(config.get(key))!r:.40}, and the 'quantkit' key says layout "
                f"{name!r} "
                f"with {schemes.default.label}: they contradict each other"
            )
    return LAYOUTS[name], schemes


def _true_shapes(padded: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, int]], ...]:
    for module, shape in padded.items():
        if (
            type(shape) is not list
            or len(shape) != 2
            or not all(type(size) is int and size > 0 for size in shape)
        ):
            raise CheckpointError(
                f"'padded' says {str(shape)!r:.40} of {module!r:.80}: a true shape is a list of "
                "two positive sizes"
            )
    return tuple((module, (n, k)) for module, (n, k) in padded.items())


def _parse(label: str) -> Scheme:
    try:
        return Scheme.parse(label)
    except (QuantkitError, ValueError) as error:
        raise CheckpointError(
            f"scheme {label!r:.60} in the 'quantkit' key", "write it like int4:g128"
        ) from error
