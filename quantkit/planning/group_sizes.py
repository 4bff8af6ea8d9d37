"""The group size of a recipe that states none: a default fits the model, or is no default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from quantkit.core.scheme import Scheme
from quantkit.errors import Setting, Words
from quantkit.layouts.recast import GROUP_SIZES, fitting
from quantkit.planning.misfits import skip_pattern
from quantkit.recipes.goals import Goal
from quantkit.recipes.recipe import Recipe


def with_group_size(
    recipe: Recipe,
    linears: Mapping[str, tuple[int, int]],
    goals_of: Callable[[Recipe], Mapping[str, Goal | None]],
) -> tuple[Recipe, list[str]]:
    """Return the recipe with the widest of 128, 64 and 32 that fits every linear, and a notice if
    it is not the usual.

    A linear that none of them fits gets one scale a row by an override. A recipe that states a size
    stays as it is. `linears` are name -> `(n, k)`; `goals_of` gives the goal of each under a
    recipe.
    """
    layout, scheme = recipe.output_layout, recipe.scheme
    if (
        recipe.size_stated
        or layout is None
        or not isinstance(scheme, Scheme)
        or scheme.group_size is None
    ):
        return recipe, []
    goals = goals_of(recipe)
    mine = {module: shape for module, shape in linears.items() if goals.get(module) == scheme}
    sizes = {
        module: [
            size
            for size in (*GROUP_SIZES, None)
            if fitting(layout, replace(scheme, group_size=size), *shape, pad=recipe.pad)
        ]
        for module, shape in mine.items()
    }
    grouped = [found for found in sizes.values() if any(found)]
    size = next(
        (each for each in GROUP_SIZES if all(each in found for found in grouped)), scheme.group_size
    )
    by_row = [module for module, found in sizes.items() if found == [None]]
    now = replace(recipe, size_stated=True, scheme=replace(scheme, group_size=size))
    notices: list[str] = []
    if size != scheme.group_size:
        first = next(
            module
            for module, found in sizes.items()
            if any(found) and scheme.group_size not in found
        )
        widths = f"{scheme.group_size} does not divide the {mine[first][1]} inputs of {first}"
        notices.append(
            Words(
                Setting("group_size", size), f"is the widest of 128, 64 and 32 that fits: {widths}"
            )
        )
    if by_row:
        rows = replace(scheme, group_size=None)
        now = replace(now, overrides=((skip_pattern(by_row, goals), rows), *now.overrides))
        widths = f"neither 128 nor 64 nor 32 divides the {mine[by_row[0]][1]} inputs of {by_row[0]}"
        notices.append(f"{len(by_row)} linears have one scale a row: {widths}")
    return now, notices
