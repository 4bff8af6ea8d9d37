"""Every recipe in configs/ gives the layout and scheme of its name.

tests/promises/test_outputs.py runs them, but for those that tune."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.api import build_recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.recipes.files import shipped_recipes
from tests.command_line import call

#: Part of a recipe's name -> layout and scheme, the longest match first.
SAYS = {
    "int4-marlin24": ("marlin24", "int4:g128:24"),
    "int4-marlin": ("marlin", "int4:g128"),
    "int4-quick": ("quick", "int4:g128:asym"),
    "int4-awq": ("awq", "int4:g128:asym"),
    "int4": ("compressed-tensors", "int4:g128"),
    "int3": ("compressed-tensors", "int3:g64"),
    "marlin-paper": ("marlin", "int4:g128"),
    "fp6-humming": ("humming", "fp6:channel"),
    "fp6-tcfpx": ("tcfpx", "fp6:channel"),
    "fp5-tcfpx": ("tcfpx", "fp5:channel"),
}


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_does_what_its_name_says(name: str, small_llama: Path, calib: Path, tmp_path: Path) -> None:
    out, recipe = tmp_path / "out", build_recipe(name)
    expected = next(said for start, said in SAYS.items() if name.startswith(start))
    assert (recipe.layout, recipe.scheme.label) == expected
    if name in ("int4-marlin24", "int3-best"):  # that tune masks, and scales
        steps = ("--set", "tune=2", *(("--set", "tune_scales=2") if recipe.tune_scales else ()))
        text = ("--calib", calib, "--samples", 8, "--max-length", 32, *steps)
        call("quantize", small_llama, "-o", out, "--recipe", name, *text, "-q")
        found = Checkpoint(out)
        assert len(found.modules()) == 14 and found.scheme(found.modules()[0]).label == expected[1]
        call("verify", out, "-q")
