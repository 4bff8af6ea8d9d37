"""Shared fixtures: reference material beside the checkout, and small models made on the spot (no downloads)."""

from __future__ import annotations

import os
from pathlib import Path

# A thread that waits for its twin by spinning makes a busy machine many times slower; set before torch starts any.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

torch.set_num_threads(1)  # the models here are too small for two
SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with golden vectors, models and text; tests that need it are skipped where it is missing."""
    if not SHARED.is_dir():
        pytest.skip("needs the reference material in ../shared (golden vectors, models, text), which is not here")
    return SHARED


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-block Llama with random weights (hidden 256, intermediate 512) in several fp16 shards, with a tokenizer."""
    from tests.models import write_model

    return write_model("llama", tmp_path_factory.mktemp("models") / "llama")
