"""The pages that come from the code are what the code gives today."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

GENERATE = Path(__file__).resolve().parents[2] / "docs" / "generate.py"


@pytest.mark.parametrize(
    "name", ["docs/cli.md", "docs/api.md", "docs/conversions.md", "docs/recipes.md", "quantkit/recipes/keywords.py"]
)
def test_generated_page_is_current(name: str) -> None:
    path = GENERATE.parents[1] / name
    pages = runpy.run_path(str(GENERATE))["pages"]()
    assert path.read_text(encoding="utf-8") == pages[path], "run: make docs"
