"""The goal of a linear: codes of a scheme, or a dense 2:4 weight. Linears that engines join can be
treated alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from quantkit.core.quantized_tensor import Scheme
from quantkit.engines.joined import fused_groups

#: The result for a linear: codes of a scheme, or a dense 2:4 weight.
Goal = Scheme | Literal["2:4"]


def label(goal: Goal) -> str:
    """Return the short name of a goal: `int4:g128`, `2:4`."""
    return goal.label if isinstance(goal, Scheme) else goal


def is_sparse(goal: Goal) -> bool:
    """Return True if a goal is 2:4, with codes or without."""
    return not isinstance(goal, Scheme) or goal.sparsity is not None


def treat_alike(goals: Mapping[str, Goal | None]) -> dict[str, Goal | None]:
    """Give all linears of a joined group its widest goal: dense (None) if one is, else the scheme
    with most bits.

    Among schemes with equal bits, more scales win, then zero points, then the first.
    """
    alike = dict(goals)
    for members in fused_groups(goals).values():
        alike |= dict.fromkeys(members, max((goals[member] for member in members), key=_width))
    return alike


def changes(before: Mapping[str, Goal | None], after: Mapping[str, Goal | None]) -> list[str]:
    """Say in one line for each kind of change how many linears got another goal."""
    found: dict[str, list[str]] = {}
    for module, goal in after.items():
        if (was := before[module]) != goal:
            found.setdefault(f"{_name(goal)} instead of {_name(was)}", []).append(module)
    return [
        f"{len(modules)} linears are {change}, like the widest linear that engines join them with "
        f"(first {modules[0]})"
        for change, modules in found.items()
    ]


def _width(goal: Goal | None) -> tuple[float, ...]:
    if not isinstance(goal, Scheme):
        return (float("inf"),)
    return (
        goal.format.bits,
        goal.sparsity is None,
        1 / goal.group_size if goal.group_size else 0,
        not goal.symmetric,
    )


def _name(goal: Goal | None) -> str:
    return "dense" if goal is None else label(goal)
