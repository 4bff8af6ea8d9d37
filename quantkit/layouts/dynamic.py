"""`dynamic`, the exceptions in the configs of GPTQ and humming, by regular expressions.

A key is `+:pattern` for other settings, or `-:pattern` for dense linears. A pattern is matched from the start of a
name, and the first that matches wins. Source: the documentation of GPTQModel; vLLM 0.26.0 reads humming's so too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError
from quantkit.layouts import validation

Overrides = tuple[tuple[str, Scheme], ...]


def write_dynamic(overrides: Overrides, settings: Callable[[Scheme], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Make the entries for `overrides`; LayoutError for a pattern that cannot be embedded."""
    dynamic: dict[str, dict[str, Any]] = {}
    for pattern, scheme in overrides:
        dynamic.setdefault(f"+:^{validation.anchored(pattern)}", settings(scheme))
    return dynamic


def read_dynamic(
    config: Mapping[str, Any], scheme_of: Callable[[Mapping[str, Any]], Scheme]
) -> tuple[Overrides, tuple[str, ...]]:
    """Read overrides and the entries for `ignore`; `scheme_of` reads a config with an exception's settings laid over.

    CheckpointError for a malformed entry.
    """
    overrides: list[tuple[str, Scheme]] = []
    ignore: list[str] = []
    for key, changes in (validation.entry(config, "dynamic", dict, type(None), default=None) or {}).items():
        start = key.removeprefix("+:").removeprefix("-:")
        own = re.fullmatch(r"\^\(\?:(.*)\)\$", start)
        pattern = own[1] if own and validation.is_pattern(own[1]) else validation.pattern(f"(?:{start}).*")
        if key.startswith("-:"):
            ignore.append(validation.literal(pattern) or f"re:{pattern}")
        elif type(changes) is not dict:
            raise CheckpointError(f"{key!r:.80} in 'dynamic' must be an object")
        else:
            overrides.append((pattern, scheme_of({**config, **changes})))
    return tuple(overrides), tuple(ignore)
