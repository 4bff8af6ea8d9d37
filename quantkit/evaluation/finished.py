"""Finished parts of a long evaluation, in a file from which the same command continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from quantkit.errors import FILE, CheckpointError, Option, RecipeError, Words
from quantkit.io.staging import append_journal, read_journal

_T = TypeVar("_T")


class Finished:
    """A store of computed values by name; without a `path` only in memory.

    `run` has everything that the results depend on, as JSON has it. It is the first line of the
    file. RecipeError if the file is another run's, CheckpointError if it is damaged.
    """

    def __init__(self, path: str | Path | None, run: Mapping[str, Any]) -> None:
        self._path, self._run = None if path is None else Path(path), json.loads(json.dumps(run))
        try:
            lines = read_journal(self._path) if self._path else []
        except CheckpointError as error:
            raise CheckpointError(error.rule, "remove the file", subject=path) from error
        if lines and lines[0] != {"run": self._run}:
            before = lines[0].get("run", {})
            keys = [
                key
                for key in self._run
                if not isinstance(before, dict) or before.get(key) != self._run[key]
            ]
            raise RecipeError(
                f"belongs to another run ({', '.join(keys) or 'of another version'} differ)",
                Words("name another file with", Option("journal", FILE)),
                subject=path,
            )
        self._known = {line["name"]: line["value"] for line in lines[1:]}
        self._begun = bool(lines)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def value(self, name: str) -> Any:
        """Return the value stored under a name."""
        return self._known[name]

    def get(self, name: str, compute: Callable[[], _T]) -> _T:
        """Return the value of a name; a missing value is computed and stored. It must be JSON."""
        if name not in self._known:
            value = compute()
            if self._path is not None:
                if not self._begun:
                    append_journal(self._path, {"run": self._run})
                    self._begun = True
                append_journal(self._path, {"name": name, "value": value})
            self._known[name] = value
        found: _T = self._known[name]
        return found
