"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def at_home(value: Any) -> Any:
    """Expand `~` at the start of a path, or of each path of a list, as a shell does; other values
    stay.
    """
    if isinstance(value, str | Path):
        return type(value)(os.path.expanduser(value)) if str(value).startswith("~") else value
    return type(value)(map(at_home, value)) if isinstance(value, list | tuple) else value
