"""Results whose repr is one line, however many rows they hold."""

from __future__ import annotations

from typing import Any


class ShortRepr:
    """The base of a class made with `dataclass(repr=False)`, which chooses the facts of its repr in
    `_shown`.
    """

    def _shown(self) -> dict[str, Any]:
        raise NotImplementedError

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value!r}" for name, value in self._shown().items())
        return f"{type(self).__name__}({facts})"
