"""The config.json of an output, with the names under which engines look up joined linears."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quantkit.checkpoint.origin import without_paths
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.scheme import Scheme
from quantkit.core.tensors import dtype_name
from quantkit.engines.joined import aliases, asked_names, fused_groups, joined_name
from quantkit.layouts import quantkit_key
from quantkit.layouts.base import Layout
from quantkit.layouts.expressions import literal
from quantkit.layouts.schemes import Schemes
from quantkit.version import __version__


def output_config(
    src: Checkpoint,
    layout: Layout | None,
    schemes: Schemes | None,
    true_shapes: Mapping[str, Sequence[int] | None],
    recipe_sha256: str | None,
) -> dict[str, Any]:
    """Make the config.json of an output; `true_shapes` has every changed linear, with its shape if
    it is padded.
    """
    config: dict[str, Any] = without_paths(src.dense_config(), src.path)
    if src.written_dtype is not None:
        for part in (config, *config.values()):  # the parts of an image-text model state theirs too
            if isinstance(part, dict):
                part |= {
                    key: dtype_name(src.written_dtype)
                    for key in ("dtype", "torch_dtype")
                    if key in part
                }
    if layout is not None and schemes is not None:
        padded = tuple((name, (shape[0], shape[1])) for name, shape in true_shapes.items() if shape)
        schemes = replace(schemes, padded=padded)
        config["quantization_config"] = quantization_config(
            layout, schemes, list(true_shapes), recipe_sha256
        )
    return config


def quantization_config(
    layout: Layout, schemes: Schemes, modules: Collection[str], recipe_sha256: str | None
) -> dict[str, Any]:
    """Make the public config of a layout and the `quantkit` key; `modules` are the quantized
    linears.
    """
    public = layout.write_config(with_joined_names(schemes, modules))
    return {**public, "quantkit": quantkit_key(layout.NAME, schemes, __version__, recipe_sha256)}


def with_joined_names(schemes: Schemes, modules: Collection[str]) -> Schemes:
    """State the scheme of each joined linear too, if its members share a scheme that no pattern
    gives to its name.

    `modules` are the quantized linears. A config of exact names does not match joined linears. The
    same holds for a group that is dense as a whole, and for a dense linear that engines ask for by
    an alias.
    """
    exact = (
        literal(pattern) for pattern, _ in schemes.overrides
    )  # a linear's other names are there too
    named: list[tuple[str, Scheme]] = []
    for joined, members in fused_groups(dict.fromkeys([*modules, *filter(None, exact)])).items():
        found = {schemes.of(member) for member in members}
        if len(found) == 1:
            scheme = found.pop()
            asked = [name for name in asked_names(joined, members) if schemes.of(name) != scheme]
            named += [(re.escape(name), scheme) for name in asked]
    ignore, packed = dict.fromkeys(schemes.ignore), set(map(joined_name, modules))
    for joined, members in fused_groups(schemes.ignore).items():
        if joined not in packed:
            ignore |= dict.fromkeys(asked_names(joined, members))
    ignore |= dict.fromkeys(name for module in schemes.ignore for name in aliases(module))
    return replace(schemes, overrides=(*named, *schemes.overrides), ignore=tuple(ignore))
