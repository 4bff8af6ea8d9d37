"""Choose a scheme for each linear: least loss within a number of bytes, by an integer programme
(ALGORITHMS 17).

Linears that engines join, and all experts of a layer, decide as one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from types import MappingProxyType

import numpy as np
import torch

from quantkit.algorithms import rtn
from quantkit.core.formats import FORMATS
from quantkit.core.quantized_tensor import Goal, Scheme
from quantkit.core.threads import grouped
from quantkit.engines.joined import joined_name, treat_alike
from quantkit.errors import Option, RecipeError, Setting, Words
from quantkit.layouts.base import Layout
from quantkit.layouts.recast import GROUP_SIZES, fitting
from quantkit.layouts.schemes import key_of
from quantkit.names import Clip, Json
from quantkit.planning.output import bytes_of
from quantkit.recipes.options import AUTO, DENSE
from quantkit.recipes.recipe import KEYED, Recipe, from_mapping, matches, written

#: The loss increase of a group in a scheme, by its label.
LossIncrease = Callable[["Group", str], float]
#: The label of the scheme of each group, by the group's name.
Choice = dict[str, str]
#: Sizes of mixes in the curve, between the least and the largest.
POINTS = 9


@dataclass(frozen=True)
class Group:
    """Linears that get the same scheme, their weights, and their bytes in each scheme, by its
    label.

    A group `is_fixed` to a single scheme if the recipe pins it, or if its loss increase was not
    measured. Embeddings or a head whose scheme is chosen are a group that `is_outside` the blocks.
    """

    name: str
    linears: tuple[str, ...]
    weights: int
    bytes: Mapping[str, int]
    is_fixed: bool = False
    is_outside: bool = False

    @property
    def is_dense(self) -> bool:
        """Whether a pin leaves it dense."""
        return self.is_fixed and DENSE in self.bytes


@dataclass(frozen=True)
class Space:
    """The choices in a layout. `overhead` are the approximate bytes of a folder without the
    linears.
    """

    layout: str
    groups: Sequence[Group]
    overhead: int = 0

    @property
    def uniform(self) -> dict[str, Choice]:
        """The choice of each scheme that all groups can take, by its label; fixed groups keep their
        own.
        """
        free = [set(g.bytes) for g in self.groups if not (g.is_fixed or g.is_outside)]
        return {
            each: {g.name: each if each in g.bytes else next(iter(g.bytes)) for g in self.groups}
            for each in sorted(set.intersection(*free) - {DENSE} if free else ())
        }

    def size(self, choice: Choice) -> int:
        """Add up the bytes of all linears."""
        return sum(group.bytes[choice[group.name]] for group in self.groups)

    def increase(self, choice: Choice, increase: LossIncrease) -> float:
        """Add up the loss increases of all groups."""
        return sum(increase(group, choice[group.name]) for group in self.groups)

    @cached_property
    def weights(self) -> int:
        """The weights in the mean of bits: all weights except those of pinned dense linears."""
        return max(1, sum(group.weights for group in self.groups if not group.is_dense))

    def budget(self, bits: float) -> int:
        """Return the bytes of all linears at a mean of `bits`, to three decimals."""
        return self._dense + int((bits + 0.0005) * self.weights / 8)

    def bits(self, size: int) -> float:
        """Return the mean bits of a weight if the linears take `size` bytes; inverse of
        `budget`.
        """
        return round(8 * (size - self._dense) / self.weights, 3)

    @cached_property
    def _dense(self) -> int:
        return sum(group.bytes[DENSE] for group in self.groups if group.is_dense)

    def choose(self, increase: LossIncrease, budget: int, most_dense: float = 0.0) -> Choice | None:
        """Choose a scheme for each group: least loss, linears in at most `budget` bytes; None if
        there is no choice.

        At most `most_dense` weights stay dense by choice. The result is the same each time. Its
        loss may be above the least by a part of 1e-4.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp  # slow to import

        found = [(group, label) for group in self.groups for label in sorted(group.bytes)]
        costs = np.array([increase(*each) for each in found])
        limits = [
            [group.bytes[label] / max(1, budget) for group, label in found],
            [
                group.weights
                / max(1.0, most_dense)
                * (label == DENSE and not (group.is_fixed or group.is_outside))
                for group, label in found
            ],
        ]
        solved = milp(
            costs / max(costs.max(initial=0.0), 1e-300),
            integrality=np.ones(len(found)),
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(
                    [[float(one is group) for one, _ in found] for group in self.groups], 1, 1
                ),
                LinearConstraint(limits, -np.inf, [1, most_dense >= 1]),
            ],
            options={"mip_rel_gap": 1e-4},
        )
        if solved.x is None:
            return None
        return {
            group.name: label
            for (group, label), taken in zip(found, solved.x, strict=True)
            if taken > 0.5
        }

    def curve(self, increase: LossIncrease, mixes: bool) -> list[Json]:
        """List bytes, bits and loss of each uniform scheme and, if asked, of mixes between them."""
        rows = [(label, choice) for label, choice in self.uniform.items()]
        sizes = [self.size(choice) for _, choice in rows]
        for point in range(POINTS if mixes and rows else 0):
            choice = self.choose(
                increase, min(sizes) + point * (max(sizes) - min(sizes)) // (POINTS - 1)
            )
            rows += [] if choice is None or choice in self.uniform.values() else [("mixed", choice)]
        return [
            {
                "scheme": name,
                "layout": self.layout,
                "bytes": self.overhead + self.size(choice),
                "bits": self.bits(self.size(choice)),
                "harm": self.increase(choice, increase),
            }
            for name, choice in rows
        ]

    def with_fixed(self, known: Collection[str], choice: Choice) -> Space:
        """Fix the groups whose loss increase is not `known` to their scheme in `choice`, or to
        their widest one.
        """
        found = []
        for group in self.groups:
            if group.name not in known:
                chosen = max(
                    group.bytes,
                    key=lambda label: (label == choice[group.name], group.bytes[label], label),
                )
                group = replace(group, bytes={chosen: group.bytes[chosen]}, is_fixed=True)
            found.append(group)
        return replace(self, groups=found)


def schemes_of(allowed: str | None, recipe: Recipe) -> list[Scheme | None]:
    """List the schemes to choose from; None stands for dense linears.

    `allowed` names formats or schemes, None for all but NVFP4 and MXFP4. The recipe decides on zero
    points and, if it states one, on the group size. RecipeError for an unknown name.
    """
    assert isinstance(recipe.scheme, Scheme)
    sizes = [recipe.scheme.group_size] if recipe.size_stated else [*GROUP_SIZES, None]
    found: list[Scheme | None] = []
    usual = [name for name, number in FORMATS.items() if not number.is_microscaled]
    for name in [*usual, DENSE] if allowed is None else map(str.strip, allowed.split(",")):
        if name in FORMATS:
            number = FORMATS[name]
            symmetric = number.is_float or recipe.scheme.symmetric
            own = [number.group_size] if number.is_float else sizes
            found += [Scheme(number, size, symmetric) for size in own]
        else:
            found.append(None if name == DENSE else Scheme.parse(name))
    return list(dict.fromkeys(found))


def groups_of(
    linears: Mapping[str, tuple[int, int]],
    goals: Mapping[str, Goal | None],
    dense_bytes: Callable[[str], int],
    schemes: Sequence[Scheme | None],
    layout: Layout,
    recipe: Recipe,
    outside: Mapping[str, Sequence[Scheme | None]] = MappingProxyType({}),
) -> list[Group]:
    """Group the `linears` (name -> `(n, k)`) that get the same scheme, with their bytes in each of
    `schemes`.

    `goals` are the recipe's goals, whose overrides and skips are pins: a group takes its widest
    pin. A scheme that does not hold all linears of a group is left out; RecipeError if none is
    left. `outside` has the schemes of embeddings and heads that are chosen.
    """
    found = []
    for name, members in grouped((joined_name(name) or name, name) for name in linears).items():
        pins = treat_alike(
            {
                m: goals[m]
                for m in members
                if m not in outside and (goals[m] is None or _is_pinned(recipe, m))
            }
        )
        sizes: dict[str, int] = {}
        for goal in list(pins.values())[:1] or outside.get(name, schemes):
            shapes = (
                [fitting(layout, goal, *linears[m], pad=recipe.pad) for m in members]
                if isinstance(goal, Scheme)
                else []
            )
            if not isinstance(goal, Scheme):
                sizes[DENSE] = sum(map(dense_bytes, members))
            elif None not in shapes:
                sizes[goal.label] = sum(
                    bytes_of(layout.stored(goal, *shape)) for shape in shapes if shape
                )
        if not sizes:
            raise RecipeError(
                f"{layout.NAME} holds {members[0]} {list(linears[members[0]])} in no scheme that "
                "is allowed",
                Words("allow others with", Option("allowed")),
                Words("leave it dense with", Setting("skip", re.escape(members[0]))),
            )
        weights, is_outside = sum(prod(linears[m]) for m in members), name in outside
        is_fixed = bool(pins) or (is_outside and [*sizes] == [DENSE])
        found.append(Group(name, tuple(members), weights, sizes, is_fixed, is_outside))
    return found


def recipe_of(recipe: Recipe, space: Space, choice: Choice) -> Recipe:
    """Make the recipe of a choice: the scheme of most weights, overrides for others, and skips for
    dense linears.

    Keys at the default of the recipe's schemes get the default of the new schemes.
    """
    weights = Counter[str]()
    inside = [group for group in space.groups if not group.is_outside]
    for group in inside:
        weights[choice[group.name]] += group.weights if choice[group.name] != DENSE else 0
    usual = min(weights, key=lambda label: (-weights[label], label))
    if not weights[usual]:
        raise RecipeError(
            "every linear would stay dense", Words("allow more with", Option("allowed"))
        )
    mapping = recipe.to_mapping()
    overrides, skip = dict(mapping["overrides"]), list(recipe.skip)
    for label in sorted({*choice.values()} - {usual}):
        named = [
            m
            for g in inside
            if choice[g.name] == label
            for m in g.linears
            if not _says(recipe, m, label)
        ]
        if label == DENSE:
            skip += patterns(named)
        else:
            overrides |= dict.fromkeys(patterns(named), label)
    stated = {key: mapping[key] for key in ("scheme", "method", "overrides")}
    before = from_mapping(stated).to_mapping()
    kept: Json = {key: value for key, value in mapping.items() if before.get(key) != value}
    kept["gptq"] = {
        key: value for key, value in mapping["gptq"].items() if before["gptq"][key] != value
    }
    now = {"scheme": written(Scheme.parse(usual)), "method": recipe.method, "layout": space.layout}
    now |= {"calibration": mapping["calibration"]}  # stated, so that no machine changes it
    ends = {key_of(group.name): choice[group.name] for group in space.groups if group.is_outside}
    now |= {key: ends.get(key, DENSE) for key in KEYED if getattr(recipe, key) == AUTO}
    return from_mapping({**kept, **now, "skip": skip, "overrides": overrides})


def _is_pinned(recipe: Recipe, name: str) -> bool:
    return any(matches(pattern, name) for pattern, _ in recipe.overrides)


def _says(recipe: Recipe, name: str, label: str) -> bool:
    """Return True if an override or a skip of the recipe itself gives a linear this goal."""
    goal = recipe.scheme_of(name)
    return (
        goal is None if label == DENSE else _is_pinned(recipe, name) and goal == Scheme.parse(label)
    )


def patterns(names: Iterable[str]) -> list[str]:
    """Write few patterns for names: numbers of layers, then linears; an expert stands for all of
    its layer.

    >>> patterns(["model.layers.0.mlp.up_proj", "model.layers.2.mlp.up_proj"])
    ['model\\\\.layers\\\\.(0|2)\\\\.mlp\\\\.up_proj']
    """
    layers: dict[tuple[str, str], dict[int, None]] = {}
    found: list[str] = []
    for name in names:
        match = re.fullmatch(r"(.*?)\.(\d+)\.(.*)", name)
        if match is None:
            found.append(re.escape(name))
        else:
            end = re.sub(r"(?<=experts\\\.)\d+(?=\\\.)", r"\\d+", re.escape(match[3]))
            layers.setdefault((re.escape(match[1]), end), {})[int(match[2])] = None
    alike = grouped(((head, tuple(numbers)), end) for (head, end), numbers in layers.items())
    return [
        f"{head}\\.{_any(map(str, numbers))}\\.{_any(ends)}"
        for (head, numbers), ends in alike.items()
    ] + found


def _any(options: Iterable[str]) -> str:
    listed = list(options)
    return listed[0] if len(listed) == 1 else f"({'|'.join(listed)})"


def expected_increase(recipe: Recipe, group: Group, label: str) -> float:
    """Compute the loss in a plan: the squared error of normally distributed weights, times their
    number.
    """
    if label == DENSE:
        return 0.0
    scheme = Scheme.parse(label)
    solving = recipe.solving(scheme)
    return group.weights * _normal_error(scheme, solving.clip, solving.signed)


@cache
def _normal_error(scheme: Scheme, clip: Clip, signed: bool) -> float:
    weight = torch.randn(16, 4096, generator=torch.Generator().manual_seed(0))
    return (
        rtn.relative_error(weight, rtn.quantize(weight, scheme, clip=clip, signed=signed)[0]) ** 2
    )
