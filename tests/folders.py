"""A short calibration text, and what tests compare of an output folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import REPORT

TEXT = "\n\n".join(f"Document {i}: " + "the quick brown fox jumps over the lazy dog " * (1 + i % 5) for i in range(12))
VOLATILE = {REPORT}  # holds times and peak memory


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
