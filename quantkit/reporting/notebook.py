"""Results that print themselves: as one line, and as a table in a notebook."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from quantkit.reporting.templates import render


class Shown:
    """A dataclass that is shown as a table in a notebook.

    A subclass with long fields overrides `_shown`, and is made with `dataclass(repr=False)`.
    """

    def _shown(self) -> dict[str, Any]:
        """Choose the facts to show; all fields, unless a subclass has more of them than fit."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value!r}" for name, value in self._shown().items())
        return f"{type(self).__name__}({facts})"

    def _repr_html_(self) -> str:
        rows = [(name.replace("_", " "), _lines(value)) for name, value in self._shown().items()]
        return render("notebook.html.jinja", title=type(self).__name__, rows=rows)


def _lines(value: Any) -> list[str]:
    """Format a fact for a cell: a list has a line for each item."""
    if isinstance(value, float):
        return [f"{value:.6g}"]
    if isinstance(value, list | tuple):
        return [str(item) for item in value] or ["-"]
    return ["-" if value is None or value == "" else str(value)]
