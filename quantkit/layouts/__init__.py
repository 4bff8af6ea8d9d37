"""Where each code, scale and zero point lies in a file: one module a layout, all of them in `LAYOUTS`.

The bit-exact definitions are in docs/layouts.md. A new layout is a module and a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, LayoutError, QuantkitError, about
from quantkit.layouts import (
    awq,
    compressed_tensors,
    gptq,
    gptq_v2,
    humming,
    marlin,
    marlin24,
    marlin24_ct,
    quick,
    tcfpx,
    validation,
)
from quantkit.layouts.base import Layout
from quantkit.layouts.schemes import Schemes

LAYOUTS: dict[str, Layout] = {
    compressed_tensors.NAME: compressed_tensors,
    humming.NAME: humming,
    tcfpx.NAME: tcfpx,
    gptq.NAME: gptq,
    gptq_v2.NAME: gptq_v2,
    awq.NAME: awq,
    quick.NAME: quick,
    marlin.NAME: marlin,
    marlin24.NAME: marlin24,
    marlin24_ct.NAME: marlin24_ct,
}

#: Keys of the public config that tell layouts apart; they must agree with our own key.
FORMAT_KEYS = ("quant_method", "format", "checkpoint_format", "is_marlin_format", "b_dtype")

#: Layouts that are another's under other names or numbers -> that other one.
SPELLINGS = {gptq_v2.NAME: gptq.NAME, marlin24_ct.NAME: marlin24.NAME}

OWN_KEYS = {"version", "layout", "scheme", "overrides", "ignore", "recipe_sha256", "padded"}


def family(name: str) -> str:
    """Return the name that `convert A-to-B` uses for a layout: both GPTQ versions are `gptq`."""
    return SPELLINGS.get(name, name)


def read_config(quantization_config: Mapping[str, Any], path: Path | str) -> tuple[Layout, Schemes]:
    """Return the layout and the schemes that the `quantization_config` of the file `path` states.

    Our own `quantkit` key wins where it is present, since public configs cannot say everything. CheckpointError names
    `path` for a config that no layout knows, that is malformed, or that contradicts itself.
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
        said = {key: quantization_config[key] for key in FORMAT_KEYS if key in quantization_config}
        raise CheckpointError(f"{said!s:.120} is no layout that quantkit reads: {', '.join(LAYOUTS)}")


def stored_as(layout: Layout, tensors: Mapping[str, Tensor], scheme: Scheme) -> str:
    """Return the name of the layout that stored tensors are in, which may be another spelling than the label's.

    That is GPTQ's version of symmetric zero points, which are read by their data (LAYOUTS 1.4).
    """
    if family(layout.NAME) == gptq.NAME and scheme.symmetric and "qzeros" in tensors:
        return gptq_v2.NAME if bool((tensors["qzeros"] == gptq.SYMMETRIC_V2).all()) else gptq.NAME
    return layout.NAME


def quantkit_key(layout_name: str, schemes: Schemes, version: str, recipe_sha256: str | None) -> dict[str, Any]:
    """Return what stands under `quantkit` inside `quantization_config`; `read_config` reads it back exactly.

    `recipe_sha256` is None for a checkpoint that no recipe of ours made.
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
    return key | ({"padded": {module: list(shape) for module, shape in schemes.padded}} if schemes.padded else {})


def _read_own(config: Mapping[str, Any]) -> tuple[Layout, Schemes]:
    own = validation.entry(config, "quantkit", dict)
    unknown = own.keys() - OWN_KEYS
    if unknown:
        raise CheckpointError(f"unknown entries {sorted(unknown)!s:.80} in the 'quantkit' key: use a newer quantkit")
    validation.entry(own, "version", str)
    validation.entry(own, "recipe_sha256", str, type(None), default=None)
    name = validation.entry(own, "layout", str)
    if name not in LAYOUTS:
        raise CheckpointError(f"layout {name!r:.40} is not one of {', '.join(LAYOUTS)}: a newer quantkit may read it")
    overrides = validation.entry(own, "overrides", dict, default={})
    schemes = Schemes(
        _parse(validation.entry(own, "scheme", str)),
        tuple((validation.pattern(key), _parse(validation.entry(overrides, key, str))) for key in overrides),
        validation.strings(own, "ignore"),
        _true_shapes(validation.entry(own, "padded", dict, default={})),
    )
    try:
        public = LAYOUTS[name].write_config(schemes)
    except LayoutError as error:
        raise CheckpointError(f"the 'quantkit' key contradicts itself: {error}") from error
    for key in (*FORMAT_KEYS, *(public.keys() & {"version"})):  # AWQ's; of others it is the version of a library
        if config.get(key) != public.get(key):
            raise CheckpointError(
                f"{key!r} is {str(config.get(key))!r:.40}, and the 'quantkit' key says layout {name!r} "
                f"with {schemes.default.label}: they contradict each other"
            )
    return LAYOUTS[name], schemes


def _true_shapes(padded: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, int]], ...]:
    for module, shape in padded.items():
        if type(shape) is not list or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
            raise CheckpointError(
                f"'padded' says {str(shape)!r:.40} of {module!r:.80}: a true shape is a list of two positive sizes"
            )
    return tuple((module, (n, k)) for module, (n, k) in padded.items())


def _parse(label: str) -> Scheme:
    try:
        return Scheme.parse(label)
    except (QuantkitError, ValueError) as error:
        raise CheckpointError(f"scheme {label!r:.60} in the 'quantkit' key: write it like int4:g128") from error
