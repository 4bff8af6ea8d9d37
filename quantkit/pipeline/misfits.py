"""Weights that a layout cannot hold as asked, the rule that each breaks, and what to type instead.

Only a way out that was tried on the layouts' own `check` is offered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from quantkit.core.scheme import Scheme
from quantkit.layouts import LAYOUTS
from quantkit.layouts.base import Layout
from quantkit.layouts.recast import broken_rule, nearest, padded_shape, target
from quantkit.pipeline.recipe import Goal, Pruning, Recipe

FILLED = "to fill it up with zeros"
#: What a way out offers, the finest last but one scale per row, which every k allows.
GROUP_SIZES = (128, 64, 32, None)


@dataclass(frozen=True)
class Misfit:
    """A linear that cannot be done as asked, and the rule that it breaks."""

    module: str
    shape: tuple[int, int]
    scheme: str
    rule: str


def ways_out(
    misfits: list[Misfit],
    schemes: Mapping[str, Goal | None],
    layout: Layout | None,
    recipe: Recipe | Pruning | None,
    source: Layout | None,
) -> tuple[str, ...]:
    """Return a line for each broken rule: the weights by shape, and what to type; only what was tried is offered.

    `layout` is None where weights stay dense; then, and for a linear that is nowhere at home, --skip is the way.
    """
    rules: dict[str, list[Misfit]] = {}
    for misfit in misfits:
        rules.setdefault(misfit.rule, []).append(misfit)
    everything = len(misfits) == sum(scheme is not None for scheme in schemes.values())
    lines = []
    for rule, group in rules.items():
        shapes: dict[tuple[int, int], list[str]] = {}
        for misfit in group:
            shapes.setdefault(misfit.shape, []).append(misfit.module)
        which = ", ".join(
            f"{modules[0]} is {list(shape)}{f' (and {len(modules) - 1} more)' if len(modules) > 1 else ''}"
            for shape, modules in shapes.items()
        )
        ways = []
        if layout is not None and not isinstance(recipe, Pruning):
            ways = _other_ways(group, layout, recipe, source) or _two_changes(misfits, recipe)
            ways += [f"add --pad {FILLED}"] if recipe is not None and _padding_helps(group, layout) else []
        if recipe is not None and not everything:
            ways.append(f"leave them dense with --skip '{_skip_pattern(group, schemes)}'")
        last = "quantize the original model in another way" if recipe is None else "download or convert the model again"
        lines.append(f"{rule}: {which}: {', or '.join(ways) or last}")
    return tuple(lines)


def _other_ways(group: list[Misfit], layout: Layout, recipe: Recipe | None, source: Layout | None) -> list[str]:
    """Return the options with which a layout would hold all weights of a group; of a source at fault there are none."""
    if _fits(group, layout):
        return []
    ways = [] if recipe is not None else _of_conversions(group, layout)
    if recipe is not None:
        size_ = next((g for g in GROUP_SIZES if _fits(group, layout, group_size=g)), ...)
        ways += [] if size_ is ... else [f"use --group-size {size_ or 'channel'}"]
        asymmetric = any(not Scheme.parse(misfit.scheme).symmetric for misfit in group)
        ways += ["drop --asym"] if asymmetric and _fits(group, layout, symmetric=True) else []
        ways += ["add --prune 2:4"] if _dense_integers(group) and _fits(group, layout, sparsity="2:4") else []
    other = next((name for name, other in LAYOUTS.items() if other is not source and _fits(group, other)), None)
    return ways + ([f"use --layout {other}"] if other else [])


def _of_conversions(group: list[Misfit], layout: Layout) -> list[str]:
    """Return the options of `pack` with which the layout would hold all weights of a group."""
    flags = ((" --pad", target, True), (" --requantize", nearest, False), (" --pad --requantize", nearest, True))
    for flag, find, pad in flags:
        if all(find(layout, Scheme.parse(misfit.scheme), *misfit.shape, pad=pad) for misfit in group):
            return [f"add{flag} {'to round again (lossy)' if find is nearest else FILLED}"]
    return []


def _padding_helps(group: list[Misfit], layout: Layout) -> bool:
    """Return whether it is the layout that refuses the weights of a group, and would hold them in larger shapes."""
    asked = [(misfit.rule, Scheme.parse(misfit.scheme), *misfit.shape) for misfit in group]
    return all(
        broken_rule(layout, scheme, n, k) == rule and padded_shape(layout, scheme, n, k) is not None
        for rule, scheme, n, k in asked
    )


def _two_changes(misfits: list[Misfit], recipe: Recipe | None) -> list[str]:
    """Return a layout and a group size that together hold all misfits, where one change does not help."""
    if recipe is None or _fits(misfits, LAYOUTS[recipe.layout]):
        return []
    both = ((name, g) for name, layout in LAYOUTS.items() for g in GROUP_SIZES if _fits(misfits, layout, group_size=g))
    return [f"use --layout {name} --group-size {g or 'channel'}" for name, g in islice(both, 1)]


def _fits(misfits: list[Misfit], layout: Layout, **change: Any) -> bool:
    asked = {(replace(Scheme.parse(misfit.scheme), **change), *misfit.shape) for misfit in misfits}
    return all(broken_rule(layout, scheme, n, k) is None for scheme, n, k in asked)


def _dense_integers(group: list[Misfit]) -> bool:
    """Return whether all weights of a group are of schemes that could be 2:4 and are not."""
    schemes = [Scheme.parse(misfit.scheme) for misfit in group]
    return all(s.symmetric and not s.format.is_float and s.sparsity is None for s in schemes)


def _skip_pattern(group: list[Misfit], schemes: Mapping[str, Goal | None]) -> str:
    """Return a --skip pattern for exactly this group: by the names' ends where that meets no other linear."""
    modules = {misfit.module for misfit in group}
    leaves = sorted({module.rpartition(".")[2] for module in modules})
    same = {m for m, scheme in schemes.items() if scheme is not None and m.rpartition(".")[2] in leaves}
    return "|".join(re.escape(name) for name in (leaves if same == modules else sorted(modules)))
