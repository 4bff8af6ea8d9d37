"""Which scheme each linear of a checkpoint has, and its true shape, as its configuration states it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quantkit.core.scheme import Scheme


@dataclass(frozen=True)
class Schemes:
    """The default scheme of a checkpoint's quantized linears, exceptions by module name, and what was left dense.

    `overrides` are (regular expression, scheme) pairs matched against the whole module name, the first match wins.
    `ignore` lists the module names that stayed dense, as public readers want them named. `padded` are (module name,
    true shape `[n, k]`) pairs of those stored larger, with zeros; only the `quantkit` key says so.
    """

    default: Scheme
    overrides: tuple[tuple[str, Scheme], ...] = ()
    ignore: tuple[str, ...] = ()
    padded: tuple[tuple[str, tuple[int, int]], ...] = ()

    def of(self, module: str) -> Scheme:
        """Return the scheme of the linear called `module`, e.g. `model.layers.0.self_attn.q_proj`."""
        for pattern, scheme in self.overrides:
            if re.fullmatch(pattern, module):
                return scheme
        return self.default
