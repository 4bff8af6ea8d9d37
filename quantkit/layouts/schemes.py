"""`Schemes`: the scheme and the true shape of each linear of a checkpoint, as its configuration states them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from quantkit.core.scheme import Scheme
from quantkit.layouts.expressions import Patterns


@dataclass(frozen=True)
class Schemes:
    """The default scheme of a checkpoint's quantized linears, exceptions by module name, and the dense linears.

    `overrides` are (regular expression, scheme) pairs, matched against the whole module name; the first match wins.
    `ignore` lists the names of dense modules, or patterns `re:...`, as public readers expect them. `padded` are
    (module name, true shape `[n, k]`) pairs of linears stored larger, with zeros; only the `quantkit` key has them.
    """

    default: Scheme
    overrides: tuple[tuple[str, Scheme], ...] = ()
    ignore: tuple[str, ...] = ()
    padded: tuple[tuple[str, tuple[int, int]], ...] = ()

    def of(self, module: str) -> Scheme:
        """Give the scheme of the linear called `module`; CheckpointError if the patterns take too long."""
        found = self._patterns.first(module)
        return self.default if found is None else self.overrides[found][1]

    @cached_property
    def _patterns(self) -> Patterns:
        return Patterns([pattern for pattern, _ in self.overrides])

    @property
    def quantizes_head(self) -> bool:
        """True if the output head is quantized too: `ignore` has none of the names that models give it."""
        return not any(module.rpartition(".")[2] in ("lm_head", "embed_out") for module in self.ignore)
