"""A tokenizer of bytes and a dense model, for tests that evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.weights import load_dense_model
from tests.tiny_models import byte_tokenizer

TEXT = "".join(chr(97 + (i * i) % 26) for i in range(300))


@pytest.fixture(scope="module")
def bytes_() -> Any:
    return byte_tokenizer()


@pytest.fixture
def model(tiny_llama: Path) -> Any:
    return load_dense_model(Checkpoint(tiny_llama))
