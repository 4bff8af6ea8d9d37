"""`dynamic`, the exceptions in the configs of GPTQ and humming: other settings by pattern, and dense linears."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError
from quantkit.layouts import validation
from quantkit.layouts.expressions import check_amount, literal


def write_dynamic(
    overrides: Iterable[tuple[str, Scheme]], settings: Callable[[Scheme], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Make `dynamic`, the exceptions in a config; LayoutError for a pattern that cannot be embedded.

    A key is `+:pattern` for other settings, or `-:pattern` for dense linears. A pattern is matched from the start of a
    name, and the first that matches wins. Source: the documentation of GPTQModel; vLLM 0.26.0 reads humming's so too.
    """
    dynamic: dict[str, dict[str, Any]] = {}
    for pattern, scheme in overrides:
        dynamic.setdefault(f"+:^{validation.anchored(pattern)}", settings(scheme))
    return dynamic


def read_dynamic(
    config: Mapping[str, Any], scheme_of: Callable[[Mapping[str, Any]], Scheme]
) -> tuple[tuple[tuple[str, Scheme], ...], tuple[str, ...]]:
    """Read overrides and the entries for `ignore`; `scheme_of` reads a config with an exception's settings laid over.

    CheckpointError for a malformed entry.
    """
    overrides: list[tuple[str, Scheme]] = []
    ignore: list[str] = []
    dynamic = validation.entry(config, "dynamic", dict, type(None), default=None) or {}
    starts = {key: key.removeprefix("+:").removeprefix("-:") for key in dynamic}
    ours = {key: it[1] for key, start in starts.items() if (it := re.fullmatch(r"\^\(\?:(.*)\)\$", start))}
    check_amount((starts | ours).values())
    for key, changes in dynamic.items():
        own = ours.get(key)
        if own is None or not validation.is_pattern(own):
            own = validation.pattern(f"(?:{starts[key]}).*")
        if key.startswith("-:"):
            ignore.append(literal(own) or f"re:{own}")
        elif type(changes) is not dict:
            raise CheckpointError(f"{key!r:.80} in 'dynamic' must be an object")
        else:
            overrides.append((own, scheme_of({**config, **changes})))
    return tuple(overrides), tuple(ignore)
