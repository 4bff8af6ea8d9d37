"""Keys of a model's config that could run code, refused before a library reads it (RELIABILITY 1.6)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.io.json_files import entries, shown


def drop_auto_map(config: dict[str, Any]) -> list[str]:
    """Remove each `auto_map` beside a model type that transformers has code for; return a notice for each."""
    objects = [config, *(child for _, child in entries(config, Path("config.json")) if isinstance(child, dict))]
    asking = [found for found in objects if "auto_map" in found and isinstance(found.get("model_type"), str)]
    if not asking:
        return []
    from transformers import CONFIG_MAPPING

    known = [found for found in asking if found["model_type"] in CONFIG_MAPPING]
    for found in known:
        del found["auto_map"]
    return [f"auto_map is ignored: transformers has its own code for {shown(found['model_type'])}" for found in known]


def check_config(config: dict[str, Any], path: Path, trust_remote_code: bool = False) -> None:
    """Refuse a config whose keys, at any depth, make transformers load code (RELIABILITY 1.6).

    These are `auto_map` and `trust_remote_code`, unless the user trusts the model's code, and always what names an
    attention or expert implementation (a kernel from elsewhere); true, false and null in the latter name nothing.
    """
    for key, value in entries(config, path):
        if key in ("auto_map", "trust_remote_code") and not trust_remote_code:
            raise CheckpointError(
                f"{path}: {key} asks to run code that comes with the model: add --trust-remote-code if you trust it, "
                "or remove the key if the model works without"
            )
        implementation = key.lstrip("_").startswith(("attn_implementation", "experts_implementation"))
        if implementation and not (value is None or isinstance(value, bool)):
            raise CheckpointError(f"{path}: {shown(key)} can make a library load foreign code: remove the key")
