"""Linears that engines join into one: the members of a group must have one scheme, or all be dense.

Engines look a joined linear up in the public config under its own name. Names and members were asked of vLLM 0.26.0
on 2026-11-23: of its model classes (`packed_modules_mapping`), and of its loader by folders that it took or refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace

from quantkit.core.scheme import Scheme
from quantkit.layouts.expressions import literal
from quantkit.layouts.schemes import Schemes

#: The name of the joined linear, and its members.
JOINED = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("gate_up_proj", ("c_fc_0", "c_fc_1")),
    ("w13", ("w1", "w3")),
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
)
#: A linear that is joined in the checkpoint already -> the name by which some engines ask for it (towers of GLM-4V).
ALIASES = {"qkv": "qkv_proj"}
#: Names under which engines ask for the experts of a layer, whatever their linears are called in the checkpoint.
EXPERTS = ("", ".0.gate_proj", ".0.up_proj", ".0.down_proj")
_JOINED_BY_LEAF = {leaf: joined for joined, leaves in JOINED for leaf in leaves}
_EXPERT = re.compile(r"(.*\.experts)\.\d+\..+")


def joined_name(module: str) -> str | None:
    """Give the name of the linear that engines join `module` into, None if they leave it by itself."""
    if (expert := _EXPERT.fullmatch(module)) is not None:
        return expert[1]
    parent, dot, leaf = module.rpartition(".")
    return f"{parent}{dot}{_JOINED_BY_LEAF[leaf]}" if leaf in _JOINED_BY_LEAF else None


def is_expert(module: str) -> bool:
    """Return True for a linear of one of several experts."""
    return _EXPERT.fullmatch(module) is not None


def fused_groups(modules: Iterable[str]) -> dict[str, list[str]]:
    """Group `modules` by the linear that engines join them into; groups of one are left out."""
    groups: dict[str, list[str]] = {}
    for module in modules:
        if (joined := joined_name(module)) is not None:
            groups.setdefault(joined, []).append(module)
    return {joined: members for joined, members in groups.items() if len(members) > 1}


def with_joined_names(schemes: Schemes, modules: Collection[str]) -> Schemes:
    """State the scheme of each joined linear too, if its members share one that its own name does not get.

    `modules` are the quantized linears. A config of exact names does not reach the joined ones. The same holds for a
    group that is dense as a whole, and for a dense linear that engines ask for by an alias.
    """
    exact = (literal(pattern) for pattern, _ in schemes.overrides)  # a linear's other names are there too
    named: list[tuple[str, Scheme]] = []
    for joined, members in fused_groups(dict.fromkeys([*modules, *filter(None, exact)])).items():
        found = {schemes.of(member) for member in members}
        if len(found) == 1:
            scheme = found.pop()
            asked = [name for name in _asked_names(joined, members) if schemes.of(name) != scheme]
            named += [(re.escape(name), scheme) for name in asked]
    ignore, packed = dict.fromkeys(schemes.ignore), set(map(joined_name, modules))
    for joined, members in fused_groups(schemes.ignore).items():
        if joined not in packed:
            ignore |= dict.fromkeys(_asked_names(joined, members))
    for module in schemes.ignore:
        parent, dot, leaf = module.rpartition(".")
        if leaf in ALIASES:
            ignore[f"{parent}{dot}{ALIASES[leaf]}"] = None
    return replace(schemes, overrides=(*named, *schemes.overrides), ignore=tuple(ignore))


def _asked_names(joined: str, members: list[str]) -> list[str]:
    if not is_expert(members[0]):
        return [joined]
    return [name for ending in EXPERTS if (name := joined + ending) not in members]
