"""Folders whose files are edited after they were recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.checkpoint.report import REPORT


def edit(folder: Path, module: str, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Rewrite the packed tensors of a module, as a faulty program would write them."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        part = {name.removeprefix(f"{module}."): t for name, t in tensors.items() if name.startswith(f"{module}.")}
        if part:
            change(part)
            tensors.update({f"{module}.{suffix}": t.contiguous() for suffix, t in part.items()})
            save_file(tensors, path)


def written(path: Path, *records: Any) -> Path:
    """Write a file of records, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def recorded(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / REPORT).read_text())
    return found
