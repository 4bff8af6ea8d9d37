"""File layouts: the place of each code, scale and zero point in a checkpoint, and the form of its
config.json.

docs/layouts.md has the bit-exact definitions. To add a layout, start with the shortest one,
`humming.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from msgspec import UNSET, Struct, UnsetType, to_builtins

from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import CheckpointError, LayoutError, QuantkitError, about
from quantkit.keys import Positive
from quantkit.layouts.awq import Awq, Quick
from quantkit.layouts.base import Layout as Layout
from quantkit.layouts.compressed_tensors import CompressedTensors
from quantkit.layouts.gptq import Gptq, GptqV2
from quantkit.layouts.humming import Humming
from quantkit.layouts.marlin import Marlin, Marlin24, Marlin24CompressedTensors
from quantkit.layouts.schemes import ORIGINAL, Schemes, check_amount, pattern, read
from quantkit.layouts.tcfpx import TcFpx
from quantkit.names import Json, JsonView

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

#: Keys of the public config that distinguish layouts; they must agree with the `quantkit` key.
FORMAT_KEYS = ("quant_method", "format", "checkpoint_format", "is_marlin_format", "b_dtype")


class OwnConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """The `quantkit` key of a `quantization_config`, which states all schemes exactly.

    `recipe_sha256` is None for a checkpoint that no recipe of quantkit made. `padded` has the true
    shapes `[n, k]` of linears that are stored larger.
    """

    version: str
    layout: str
    scheme: str
    overrides: dict[str, str] = {}
    ignore: list[str] | None = None
    recipe_sha256: str | None = None
    padded: dict[str, tuple[Positive, Positive]] | UnsetType = UNSET


def read_config(quantization_config: JsonView, path: Path | str) -> tuple[Layout, Schemes]:
    """Read the layout and the schemes from the `quantization_config` of the file `path`.

    The `quantkit` key has precedence, because public configs cannot state everything.
    CheckpointError, with `path`, for a config that is unknown to all layouts, malformed or
    contradictory.
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
            f"weights quantized by {_method(quantization_config)} are not read", ORIGINAL
        )


def quantkit_key(
    layout_name: str, schemes: Schemes, version: str, recipe_sha256: str | None
) -> Json:
    """Make the `quantkit` key of a config, which `read_config` reads back exactly."""
    overrides: dict[str, str] = {}
    for name, scheme in schemes.overrides:
        overrides.setdefault(name, scheme.label)
    return cast(
        "Json",
        to_builtins(
            OwnConfig(
                version=version,
                layout=layout_name,
                scheme=schemes.default.label,
                overrides=overrides,
                ignore=list(schemes.ignore),
                recipe_sha256=recipe_sha256,
                padded=dict(schemes.padded) or UNSET,
            )
        ),
    )


def _method(config: JsonView) -> str:
    """Name the method of a config that no layout reads; early tools do not state theirs."""
    keys = (*FORMAT_KEYS, "quant_algo", "version", "backend")
    stated = [config[key] for key in keys if config.get(key) is not None]
    if not stated and any(key in config for key in ("load_in_4bit", "load_in_8bit")):
        return "bitsandbytes"
    if not stated and {"bits", "group_size"} <= config.keys():
        return "MLX, or a method without a name,"
    return " ".join(f"{value!r:.40}" for value in stated) or "a method without a name"


def _read_own(config: JsonView) -> tuple[Layout, Schemes]:
    own = read(OwnConfig, config["quantkit"], "the 'quantkit' key", "use a newer quantkit")
    if own.layout not in LAYOUTS:
        raise CheckpointError(
            f"layout {own.layout!r:.40} is not one of {', '.join(LAYOUTS)}: a newer quantkit may "
            "read it"
        )
    check_amount(own.overrides)
    overrides = tuple((pattern(name), _parse(label)) for name, label in own.overrides.items())
    ignore, padded = tuple(own.ignore or ()), tuple((own.padded or {}).items())
    schemes = Schemes(_parse(own.scheme), overrides, ignore, padded)
    try:
        public = LAYOUTS[own.layout].write_config(schemes)
    except LayoutError as error:
        raise CheckpointError("the 'quantkit' key contradicts itself", error.typed) from error
    # `version` is the version of AWQ's words. Other methods write a library version there.
    for key in (*FORMAT_KEYS, *(public.keys() & {"version"})):
        if config.get(key) != public.get(key):
            raise CheckpointError(
                f"{key!r} is {str(config.get(key))!r:.40}, and the 'quantkit' key says layout "
                f"{own.layout!r} with {own.scheme}: they contradict each other"
            )
    return LAYOUTS[own.layout], schemes


def _parse(label: str) -> Scheme:
    try:
        return Scheme.parse(label)
    except (QuantkitError, ValueError) as error:
        raise CheckpointError(
            f"scheme {label!r:.60} in the 'quantkit' key", "write it like int4:g128"
        ) from error
