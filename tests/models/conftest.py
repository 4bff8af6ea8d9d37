"""A fixture that changes tensors and config of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint


@pytest.fixture
def changed(folders: dict[str, Path], tmp_path: Path) -> Any:
    """Return a function that copies a family's folder with other tensors (None: removed) or config keys."""

    def change(family: str, tensors: dict[str, Tensor | None] | None = None, **config: Any) -> Path:
        from safetensors.torch import save_file

        src = Checkpoint(folders[family])
        found: dict[str, Tensor | None] = {**{name: src.get(name) for name in src.names()}, **(tensors or {})}
        save_file({k: v.contiguous() for k, v in found.items() if v is not None}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({**src.config, **config}))
        return tmp_path

    return change
