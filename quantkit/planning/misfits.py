"""Weights that a layout cannot hold as asked: the rule that each breaks, and the options that would
help.

An option is offered only after the layouts' own `check` has accepted it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from quantkit.core.scheme import Scheme
from quantkit.errors import LayoutError, Option, Setting, Words
from quantkit.layouts import LAYOUTS
from quantkit.layouts.base import Layout
from quantkit.layouts.recast import broken_rule, nearest, padded_shape, target
from quantkit.names import KERNELS
from quantkit.recipes.goals import Goal
from quantkit.recipes.recipe import Recipe

FILLED = "to fill it up with zeros"
#: The most ways out that a message names.
MOST_OPTIONS = 2
#: Group sizes to suggest, in this order; one scale per row (None) fits every k.
GROUP_SIZES = (128, 64, 32, None)


@dataclass(frozen=True)
class Misfit:
    """A linear that cannot be quantized as asked, and the rule that it breaks."""

    module: str
    shape: tuple[int, int]
    scheme: str
    rule: str


def ways_out(
    misfits: list[Misfit],
    schemes: Mapping[str, Goal | None],
    layout: Layout | None,
    recipe: Recipe | None,
    source: Layout | None,
) -> tuple[str, ...]:
    """Write a line for each broken rule: its weights by shape, and the options that help.

    `schemes` has the goal of every linear, misfit or not. `layout` is None if weights stay dense,
    `recipe` is None for a conversion, `source` is the layout of its source.
    """
    rules: dict[str, list[Misfit]] = {}
    for misfit in misfits:
        rules.setdefault(misfit.rule, []).append(misfit)
    everything = len(misfits) == sum(scheme is not None for scheme in schemes.values())
    joint: list[str] = []
    if layout is not None:
        unfit = [misfit for group in rules.values() if not _fits(group, layout) for misfit in group]
        joint = _one_change(unfit, layout, recipe, source) or _two_changes(unfit, recipe)
    lines = []
    for rule, group in rules.items():
        options: list[str] = []
        if layout is not None:
            options = (
                []
                if _fits(group, layout)
                else [*joint] or _one_change(group, layout, recipe, source)
            )
            if recipe is not None and _padding_helps(group, layout):
                options.append(Words("add", Setting("pad", True), FILLED))
        if recipe is not None and not everything:
            pattern = skip_pattern([misfit.module for misfit in group], schemes)
            options.append(Words("leave them dense with", Setting("skip", pattern)))
        last = (
            "quantize the original model in another way"
            if recipe is None
            else "download or convert the model again"
        )
        lines.append(
            LayoutError(f"{rule}: {_by_shape(group)}", *(options[:MOST_OPTIONS] or [last])).typed
        )
    return tuple(lines)


def _by_shape(group: list[Misfit]) -> str:
    """Name the first weight of each shape and count the others."""
    shapes: dict[tuple[int, int], list[str]] = {}
    for misfit in group:
        shapes.setdefault(misfit.shape, []).append(misfit.module)
    return ", ".join(
        f"{modules[0]} is "
        f"{list(shape)}{f' (and {len(modules) - 1} more)' if len(modules) > 1 else ''}"
        for shape, modules in shapes.items()
    )


def _one_change(
    group: list[Misfit], layout: Layout, recipe: Recipe | None, source: Layout | None
) -> list[str]:
    """List the options that make all weights of a group fit; none if the source, not the layout, is
    at fault.
    """
    if _fits(group, layout):
        return []
    options = [] if recipe is not None else _for_conversion(group, layout)
    if recipe is not None:
        size = next((g for g in GROUP_SIZES if _fits(group, layout, group_size=g)), ...)
        options += [] if size is ... else [Words("use", Setting("group_size", size or "channel"))]
        asymmetric = any(not Scheme.parse(misfit.scheme).symmetric for misfit in group)
        if asymmetric and _fits(group, layout, symmetric=True):
            options.append(Words("drop", Setting("asym", True)))
        if _dense_integers(group) and _fits(group, layout, sparsity="2:4"):
            options.append(Words("add", Setting("prune", "2:4")))
    others = [
        name for name, other in LAYOUTS.items() if other is not source and _fits(group, other)
    ]
    return options + _instead(layout, others, Scheme.parse(group[0].scheme))


def _instead(layout: Layout, others: list[str], scheme: Scheme) -> list[str]:
    """Suggest layouts that hold the weights: one with a kernel if this one has a kernel, and the
    default layout.
    """
    kernels = [name for name in KERNELS if name in others and layout.NAME in KERNELS]
    usual = scheme.format.layout
    names = dict.fromkeys([*kernels[:1], *([usual] if usual in others else others[:1])])
    return (
        [Words("use", *[part for name in names for part in ("or", Setting("layout", name))][1:])]
        if names
        else []
    )


def _for_conversion(group: list[Misfit], layout: Layout) -> list[str]:
    """List the options of `pack` that make all weights of a group fit the layout."""
    pad_, again = Option("pad", True), Option("requantize", True)
    flags = ((pad_, target, True), (again, nearest, False), (Words(pad_, again), nearest, True))
    for flag, find, pad in flags:
        if all(
            find(layout, Scheme.parse(misfit.scheme), *misfit.shape, pad=pad) for misfit in group
        ):
            return [Words("add", flag, "to round again (lossy)" if find is nearest else FILLED)]
    return []


def _padding_helps(group: list[Misfit], layout: Layout) -> bool:
    """Return True if the layout refuses the weights of a group, but would hold them in larger
    shapes.
    """
    asked = [(misfit.rule, Scheme.parse(misfit.scheme), *misfit.shape) for misfit in group]
    return all(
        broken_rule(layout, scheme, n, k) == rule and padded_shape(layout, scheme, n, k) is not None
        for rule, scheme, n, k in asked
    )


def _two_changes(misfits: list[Misfit], recipe: Recipe | None) -> list[str]:
    """Suggest a layout and a group size that together hold all misfits, if one change does not
    help.
    """
    if recipe is None or not misfits:
        return []
    both = (
        (name, g)
        for name, layout in LAYOUTS.items()
        for g in GROUP_SIZES
        if _fits(misfits, layout, group_size=g)
    )
    return [
        Words("use", Setting("layout", name), Setting("group_size", g or "channel"))
        for name, g in islice(both, 1)
    ]


def _fits(misfits: list[Misfit], layout: Layout, **change: Any) -> bool:
    asked = {(replace(Scheme.parse(misfit.scheme), **change), *misfit.shape) for misfit in misfits}
    return all(broken_rule(layout, scheme, n, k) is None for scheme, n, k in asked)


def _dense_integers(group: list[Misfit]) -> bool:
    """Return True if all weights of a group have a dense scheme that could be 2:4."""
    schemes = [Scheme.parse(misfit.scheme) for misfit in group]
    return all(s.symmetric and not s.format.is_float and s.sparsity is None for s in schemes)


def skip_pattern(modules: Collection[str], schemes: Mapping[str, Goal | None]) -> str:
    """Make a --skip pattern for exactly these linears: by last name parts if these match no other
    one.
    """
    leaves = sorted({module.rpartition(".")[2] for module in modules})
    same = {
        m for m, scheme in schemes.items() if scheme is not None and m.rpartition(".")[2] in leaves
    }
    return "|".join(
        re.escape(name) for name in (leaves if same == set(modules) else sorted(modules))
    )
