"""`Schemes`: the scheme and the true shape of each linear of a checkpoint, as its configuration
states them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError
from quantkit.layouts import validation
from quantkit.layouts.expressions import Patterns, check_amount, literal


@dataclass(frozen=True)
class Schemes:
    """The default scheme of a checkpoint's quantized linears, exceptions by module name, and the
    dense linears.

    `overrides` are (regular expression, scheme) pairs, matched against the whole module name; the
    first match wins. `ignore` lists the names of dense modules, or patterns `re:...`, as public
    readers expect them. `padded` are (module name, true shape `[n, k]`) pairs of linears stored
    larger, with zeros; only the `quantkit` key has them.
    """

    default: Scheme
    overrides: tuple[tuple[str, Scheme], ...] = ()
    ignore: tuple[str, ...] = ()
    padded: tuple[tuple[str, tuple[int, int]], ...] = ()

    def of(self, module: str) -> Scheme:
        """Give the scheme of the linear called `module`; CheckpointError if the patterns take too
        long.
        """
        found = self._patterns.first(module)
        return self.default if found is None else self.overrides[found][1]

    @cached_property
    def _patterns(self) -> Patterns:
        return Patterns([pattern for pattern, _ in self.overrides])

    @property
    def quantizes_head(self) -> bool:
        """True if the output head is quantized too: `ignore` has none of the names that models give
        it.
        """
        return not any(
            module.rpartition(".")[2] in ("lm_head", "embed_out") for module in self.ignore
        )


def write_dynamic(
    overrides: Iterable[tuple[str, Scheme]], settings: Callable[[Scheme], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Make `dynamic`, the exceptions in a config; LayoutError for a pattern that cannot be
    embedded.

    A key is `+:pattern` for other settings, or `-:pattern` for dense linears. A pattern is matched
    from the start of a name, and the first that matches wins. Source: the documentation of
    GPTQModel; vLLM 0.26.0 reads humming's so too.
    """
    dynamic: dict[str, dict[str, Any]] = {}
    for pattern, scheme in overrides:
        dynamic.setdefault(f"+:^{validation.anchored(pattern)}", settings(scheme))
    return dynamic


def read_dynamic(
    config: Mapping[str, Any], scheme_of: Callable[[Mapping[str, Any]], Scheme]
) -> tuple[tuple[tuple[str, Scheme], ...], tuple[str, ...]]:
    """Read overrides and the entries for `ignore`; `scheme_of` reads a config with an exception's
    settings laid over.

    CheckpointError for a malformed entry.
    """
    overrides: list[tuple[str, Scheme]] = []
    ignore: list[str] = []
    dynamic = validation.entry(config, "dynamic", dict, type(None), default=None) or {}
    starts = {key: key.removeprefix("+:").removeprefix("-:") for key in dynamic}
    ours = {
        key: it[1]
        for key, start in starts.items()
        if (it := re.fullmatch(r"\^\(\?:(.*)\)\$", start))
    }
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
