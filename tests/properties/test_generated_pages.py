"""The pages that come from the code are what the code gives today."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

GENERATE = Path(__file__).resolve().parents[2] / "docs" / "generate.py"


@pytest.mark.parametrize("name", ["cli.md", "api.md", "conversions.md"])
def test_generated_page_is_current(name: str) -> None:
    path = GENERATE.with_name(name)
    pages = runpy.run_path(str(GENERATE))["pages"]()
    assert path.read_text(encoding="utf-8") == pages[path], "run: make docs"
