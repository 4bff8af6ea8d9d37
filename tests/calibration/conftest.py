"""Models and runs that several modules share."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.checkpoint.writer import Item
from quantkit.recipes.recipe import from_mapping
from tests.calibration.runs import COARSE, quantized
from tests.tiny_models import write_model


@pytest.fixture(scope="package")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Llama of three small blocks."""
    return write_model("llama", tmp_path_factory.mktemp("three") / "model", num_hidden_layers=3)


@pytest.fixture(scope="package")
def whole(three: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Item]:
    """All that an undisturbed run on `three` yields."""
    return quantized(three, from_mapping(COARSE), tmp_path_factory.mktemp("whole"))[0]
