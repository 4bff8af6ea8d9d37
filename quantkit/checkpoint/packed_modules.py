"""Packed weights among the tensors of a folder: which tensors belong together, by their names and headers."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quantkit.checkpoint.stored_tensors import StoredTensors
from quantkit.core.tensors import FLOATS
from quantkit.errors import CheckpointError
from quantkit.io.json_files import AGAIN
from quantkit.layouts import LAYOUTS
from quantkit.layouts.base import Layout
from quantkit.layouts.schemes import Schemes

#: Dtypes that codes are packed into. No dense weight of a causal LM has one of them.
PACKED = (torch.int32, torch.int16, torch.uint8, torch.float8_e4m3fn)


def find_packed(src: StoredTensors, layout: Layout, schemes: Schemes) -> dict[str, dict[str, str]]:
    """Map each packed module to suffix -> stored name of its tensors, in file order.

    CheckpointError if a module is incomplete, stored twice, listed as dense, or of another layout.
    """
    found: dict[str, dict[str, str]] = {}
    for name in src.names():
        module, _, suffix = name.rpartition(".")
        if module and suffix in layout.TENSORS:
            found.setdefault(module, {})[suffix] = name
    packed = {module: parts for module, parts in found.items() if layout.MARKER in parts}
    stored = set(src.names())
    for module, parts in found.items():
        stray = [name for suffix, name in parts.items() if suffix != "weight" or src.dtype(name) not in FLOATS]
        if module not in packed and stray:
            raise CheckpointError(f"{stray[0]} is there, {module}.{layout.MARKER} is missing", AGAIN, subject=src.path)
        if module in packed and "weight" not in parts and f"{module}.weight" in stored:
            raise CheckpointError(f"{module} is there twice, packed and as {module}.weight", subject=src.path)
        if module in packed and module in schemes.ignore:
            raise CheckpointError(f"{module} is packed, and config.json says that it is not", subject=src.path)
    _require_one_layout(src, layout, packed)
    return packed


def _require_one_layout(src: StoredTensors, layout: Layout, packed: Mapping[str, Mapping[str, str]]) -> None:
    ours = {name for parts in packed.values() for name in parts.values()}
    suffixes = {suffix for each in LAYOUTS.values() for suffix in each.TENSORS}
    for name in src.names():
        if name not in ours and name.rpartition(".")[2] in suffixes and src.dtype(name) in PACKED:
            raise CheckpointError(
                f"{name} is packed and no part of the {layout.NAME} layout that config.json states: a folder holds "
                "one layout, convert each on its own",
                subject=src.path,
            )
