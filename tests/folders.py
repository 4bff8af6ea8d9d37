"""A short calibration text, what tests compare of an output folder, and changes to the files of a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import REPORT
from quantkit.io.safetensors_files import read_header

TEXT = "\n\n".join(f"Document {i}: " + "the quick brown fox jumps over the lazy dog " * (1 + i % 5) for i in range(12))
VOLATILE = {REPORT}  # holds times and peak memory


#: The last transformers and compressed-tensors for Python 3.10 open less than the newest.
NEWEST = pytest.mark.skipif(
    tuple(map(int, version("transformers").split(".")[:2])) < (5, 23), reason="this transformers is too old"
)


def gptq(calib: str, **changes: object) -> dict[str, object]:
    """Return a short calibrated recipe; only `clip` makes it search scales, and `gptq` descend."""
    text = {"data": calib, "samples": 8, "max_length": 64}
    return {"calibration": text, "clip": "none", "gptq": {"descent": 0}, **changes}


def tensors(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    src = Checkpoint(folder)
    return {
        name: (t.dtype, tuple(t.shape), t.contiguous().view(torch.uint8).numpy().tobytes())
        for name in src.names()
        for t in [src.get(name).reshape(-1)]
    }


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def hashes(folder: Path) -> dict[str, str]:
    return {p.name: sha256(p) for p in sorted(folder.iterdir()) if p.name not in VOLATILE}


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: t for shard in sorted(folder.glob("*.safetensors")) for name, t in load_file(shard).items()}


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Change the tensors of a folder, which then has one weight file."""
    found = stored(folder)
    change(found)
    for path in [*folder.glob("*.safetensors*")]:
        path.unlink()
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    return folder


def flip(folder: Path, tensor: str, byte: int = 0) -> Path:
    """Flip a bit of a stored tensor; return its file."""
    path = next(path for path in folder.glob("*.safetensors") if tensor in read_header(path)[0])
    data = bytearray(path.read_bytes())
    data[read_header(path)[0][tensor].start + byte] ^= 1
    path.write_bytes(data)
    return path


def restate(path: Path, **entries: object) -> None:
    """Change entries of a JSON file, or write it."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, **entries}))
