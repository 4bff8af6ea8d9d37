"""Recipes by name: a YAML file, a recipe that comes with quantkit, or a scheme with a method."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from quantkit.core.formats import FORMATS
from quantkit.core.scheme import Scheme
from quantkit.errors import RecipeError
from quantkit.names import Method
from quantkit.recipes.recipe import load, written

PACKAGE = Path(__file__).parents[1]


def shipped_recipes() -> dict[str, Path]:
    """Find the recipes that come with quantkit, as name -> file."""
    packaged = PACKAGE / "configs"
    folder = packaged if packaged.is_dir() else PACKAGE.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_named(recipe: str | Path) -> Mapping[str, Any]:
    """Read the mapping of a YAML file or of a recipe that comes with quantkit; RecipeError if it is
    neither.
    """
    shipped = shipped_recipes()
    if not Path(recipe).is_file() and str(recipe) not in shipped:
        raise RecipeError(
            "no such recipe", f"give a YAML file or one of {', '.join(shipped)}", subject=recipe
        )
    return load(Path(recipe) if Path(recipe).is_file() else shipped[str(recipe)])


def load_named_or_scheme(recipe: str) -> Mapping[str, Any]:
    """Read a recipe as `load_named`, or make one of a scheme and a method, such as `fp6:g64:gptq`.

    RecipeError with the nearest names for anything else.
    """
    shipped = shipped_recipes()
    if Path(recipe).is_file() or recipe in shipped:
        return load_named(recipe)
    scheme, _, method = recipe.rpartition(":")
    if method in get_args(Method) and scheme.partition(":")[0] in FORMATS:
        return {"scheme": written(Scheme.parse(scheme)), "method": method}
    near = [*get_close_matches(recipe, shipped, 2, 0.5), "a YAML file"]
    raise RecipeError(
        f"unknown recipe {recipe!r}",
        f"use {', '.join(near)}, or a scheme with a method like int4:g64:gptq",
    )
