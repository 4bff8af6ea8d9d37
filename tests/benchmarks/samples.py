"""Outlines of tiny models for benches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.random_model import Outline, Variant, build
from quantkit.progress import Progress

CPU, QUIET = torch.device("cpu"), Progress(quiet=True)
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 257,
    "max_position_embeddings": 512,
}


def tiny(**changes: Any) -> Outline:
    return Outline("tiny", Path("tiny"), LLAMA | changes)


def built(model: Outline, found: Variant, dtype: torch.dtype = torch.float32) -> Any:
    made, notices = build(model, found, dtype, CPU, QUIET)
    assert notices == []
    return made
