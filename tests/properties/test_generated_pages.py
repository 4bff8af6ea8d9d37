"""The pages that come from the code are what the code gives today."""

from __future__ import annotations

import runpy
from pathlib import Path

GENERATE = Path(__file__).resolve().parents[2] / "docs" / "generate.py"


def test_generated_pages_are_current() -> None:
    pages = runpy.run_path(str(GENERATE))["pages"]()
    assert len(pages) >= 5
    stale = [path.name for path, text in pages.items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run: make docs"
