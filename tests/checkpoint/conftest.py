"""Models that tests only read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.low_bit import LLAMA, write_dense


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random bfloat16 Llama of two layers with a tokenizer."""
    return write_dense(tmp_path_factory.mktemp("llama"), "LlamaConfig", LLAMA)
