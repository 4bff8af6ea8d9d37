"""Entries of a model's config that could run code or fill the memory, refused before a library
reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError, Option, Words
from quantkit.io.json_files import entries, shown

#: Keys of a config by their meaning: counts of layers, counts of smaller parts, sizes.
_LAYERS = re.compile(r"(layers?|blocks?|depths?|stages)$")
_PARTS = re.compile(r"(experts|heads?|groups?|labels|codebooks)$")
_SIZE = re.compile(r"(size|dims?|rank|width|embd|inner|model|ctx|positions|words)$|^d_")
#: Numbers up to these are not compared with the weights: such a model is built in seconds.
_FREE_LAYERS, _FREE_PARTS, _FREE_SIZE = 1000, 2**16, 2**24


def drop_auto_map(config: dict[str, Any]) -> list[str]:
    """Remove each `auto_map` beside a model type that transformers has code for; return a notice
    for each.
    """
    objects = [
        config,
        *(child for _, child in entries(config, Path("config.json")) if isinstance(child, dict)),
    ]
    asking = [
        found
        for found in objects
        if "auto_map" in found and isinstance(found.get("model_type"), str)
    ]
    if not asking:
        return []
    from transformers import CONFIG_MAPPING

    known = [found for found in asking if found["model_type"] in CONFIG_MAPPING]
    for found in known:
        del found["auto_map"]
    return [
        f"auto_map is ignored: transformers has its own code for {shown(found['model_type'])}"
        for found in known
    ]


def check_config(config: dict[str, Any], path: Path, trust_remote_code: bool = False) -> None:
    """Refuse a config whose keys, at any depth, make transformers load code (RELIABILITY 1.6).

    These are `auto_map` and `trust_remote_code`, unless the user trusts the model's code, and
    always what names an attention or expert implementation (a kernel from elsewhere); true, false
    and null in the latter name nothing.
    """
    for key, value in entries(config, path):
        if key in ("auto_map", "trust_remote_code") and not trust_remote_code:
            raise CheckpointError(
                f"{key} asks to run code that comes with the model",
                Words("add", Option("trust_remote_code", True), "if you trust it"),
                "remove the key if the model works without",
                subject=path,
            )
        implementation = key.lstrip("_").startswith(
            ("attn_implementation", "experts_implementation")
        )
        if implementation and not (value is None or isinstance(value, bool)):
            raise CheckpointError(
                f"{shown(key)} can make a library load foreign code", "remove the key", subject=path
            )
    for key, value in entries(config, path):
        if key == "model_type" and not (value is None or isinstance(value, str)):
            raise CheckpointError(
                f"model_type is {shown(value)}, and must be text",
                "fetch the folder again",
                subject=path,
            )


def check_sizes(config: dict[str, Any], path: Path, tensors: int, nbytes: int) -> None:
    """Refuse counts and sizes that weight files of `tensors` tensors in `nbytes` bytes cannot have.

    A library would build such a model before it compares any tensor, for hours or until memory is
    full.
    """
    for key, value in _numbers(config, ""):
        most = _FREE_LAYERS if _LAYERS.search(key) else _FREE_PARTS if _PARTS.search(key) else None
        if most is not None and value > most + tensors:
            held = f"the weight files hold {tensors} tensors"
        elif _SIZE.search(key) and value > max(
            _FREE_SIZE, 8 * nbytes
        ):  # no weight has less than a bit
            held = f"the weight files hold {nbytes} bytes"
        else:
            continue
        raise CheckpointError(
            f"{shown(key)} is {value}, and {held}",
            "mend the entry",
            "fetch the folder again",
            subject=path,
        )


def _numbers(value: Any, key: str) -> Iterator[tuple[str, int | float]]:
    """Yield (key, number) for each number in a JSON value, at any depth. Numbers of a list have the
    list's key.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield key, value
    elif isinstance(value, list):
        for child in value:
            yield from _numbers(child, key)
    elif isinstance(value, dict):
        for name, child in value.items():
            yield from _numbers(child, str(name))
