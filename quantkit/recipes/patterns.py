"""Refuse patterns of a recipe that have no effect on a model, with the nearest names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches

from quantkit.errors import RecipeError
from quantkit.recipes.goals import Goal
from quantkit.recipes.recipe import Recipe, matches

#: The most names that a message gives.
SHOWN = 3


def require_effect(recipe: Recipe, linears: Collection[str], dense: Collection[str]) -> list[str]:
    """Raise RecipeError with a line for each skip or override that changes nothing.

    `linears` names all linears, and `dense` the other dense matrices, which a skip may name too.
    The default skip may match nothing, as not every model has such a linear: a remark for each such
    pattern is returned.
    """
    lines, remarks = [], []
    for pattern in recipe.skip:
        if not any(matches(pattern, name) for name in (*linears, *dense)):
            what = f"skip {pattern!r} matches no linear"
            if pattern in Recipe.skip:
                remarks.append(what)
            else:
                lines.append(f"{what}: {_meant(pattern, linears)}")
    quantized = [
        name for name in linears if not any(matches(pattern, name) for pattern in recipe.skip)
    ]
    for pattern, scheme in recipe.overrides:
        if not any(matches(pattern, name) for name in quantized):
            what = f"override {pattern!r} to {scheme.label} matches"
            if any(matches(pattern, name) for name in linears):
                lines.append(
                    f"{what} only linears that are skipped: drop the override, or the skip"
                )
            else:
                lines.append(f"{what} no linear: {_meant(pattern, linears)}")
    if lines:
        raise RecipeError("\n".join(lines))
    return remarks


def nearest_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Find names similar to a regular expression, or their last parts if the pattern has fewer
    parts.
    """
    plain = re.sub(r"\\(?=\W)", "", re.sub(r"\.[*+?]|[\^$()\[\]{}|*+?]", "", pattern)).strip(".")
    depth = plain.count(".") + 1
    ends = dict.fromkeys(".".join(name.split(".")[-depth:]) for name in names)
    return get_close_matches(plain, ends, SHOWN, cutoff=0.5) or list(ends)[:SHOWN]


def _meant(pattern: str, linears: Iterable[str]) -> str:
    return (
        f"the nearest names are {', '.join(nearest_names(pattern, linears))}: correct the pattern, "
        "or drop it"
    )


def skip_pattern(modules: Collection[str], schemes: Mapping[str, Goal | None]) -> str:
    """Make a --skip pattern for exactly these linears. It uses the last parts of their names if no
    other linear has these.
    """
    leaves = sorted({module.rpartition(".")[2] for module in modules})
    same = {
        m for m, scheme in schemes.items() if scheme is not None and m.rpartition(".")[2] in leaves
    }
    return "|".join(
        re.escape(name) for name in (leaves if same == set(modules) else sorted(modules))
    )
