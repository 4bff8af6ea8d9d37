"""Linears that engines join, and the config.json of an output, which names them.

Engines look a joined linear up in the public config under its own name. So the members of a group
must have one scheme, or all be dense. Names and members were asked of vLLM 0.26.0: on 2026-11-23 of
its loader, by folders that it took or refused, and on 2026-11-26 of its model classes
(`packed_modules_mapping`). benchmarks/census/vllm_linears.json has their answers for each family
that vLLM builds, and a test compares.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from quantkit.checkpoint.origin import without_paths
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.formats import dtype_name
from quantkit.core.quantized_tensor import Goal, Scheme, label
from quantkit.core.threads import grouped
from quantkit.layouts import Layout, quantkit_key
from quantkit.layouts.schemes import ANY_HEAD, Schemes, is_head, literal
from quantkit.names import Json
from quantkit.version import __version__

#: The name of the joined linear, and its members. The first row with a member counts. A row may
#: name the parent module.
JOINED = (
    (
        "linear_attn.in_proj_qkvg",
        ("linear_attn.q_proj", "linear_attn.k_proj", "linear_attn.v_proj", "linear_attn.g_proj"),
    ),
    ("qkvr", ("wq_du", "wk_dv", "wv_dv", "wr_du")),
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("gate_up_proj", ("c_fc_0", "c_fc_1")),
    ("w13", ("w1", "w3")),
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
    ("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")),
    ("in_proj_ba", ("in_proj_b", "in_proj_a")),
)


#: Suffix of a stored name -> suffix that some engines use: joined linears of GLM-4V's towers, heads
#: of draft layers.
ALIASES = {"qkv": "qkv_proj", "shared_head.head": "head"}
#: Names that engines use for the experts of a layer; those in the checkpoint may differ.
EXPERTS = ("", ".0.gate_proj", ".0.up_proj", ".0.down_proj")
#: Linears that get the same input tensor, which quantkit multiplies at once; a model may lack some
#: names of a row.
SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
_JOINED_BY_LEAF = {leaf: joined for joined, leaves in JOINED for leaf in leaves}
_EXPERT = re.compile(r"(.*\.experts)\.\d+\..+")


def joined_name(module: str) -> str | None:
    """Give the name of the linear that engines join `module` into, None if they leave
    it by itself.
    """
    if (expert := _EXPERT.fullmatch(module)) is not None:
        return expert[1]
    for parts in (2, 1):
        leaf = ".".join(module.split(".")[-parts:])
        if leaf in _JOINED_BY_LEAF:
            return module.removesuffix(leaf) + _JOINED_BY_LEAF[leaf]
    return None


def is_expert(module: str) -> bool:
    """Return True for a linear of an expert."""
    return _EXPERT.fullmatch(module) is not None


def fused_groups(modules: Iterable[str]) -> dict[str, list[str]]:
    """Group `modules` by the linear that engines join them into. Groups of a single module are left
    out.
    """
    groups = grouped((joined_name(module), module) for module in modules)
    return {name: members for name, members in groups.items() if name and len(members) > 1}


def asked_names(joined: str, members: list[str]) -> list[str]:
    """List further names by which engines look up a joined linear."""
    if not is_expert(members[0]):
        return [joined]
    return [name for ending in EXPERTS if (name := joined + ending) not in members]


def aliases(module: str) -> list[str]:
    """List other names by which engines ask for a dense linear, or for experts that one tensor
    holds.
    """
    if module.endswith(".experts"):
        return [module + ending for ending in EXPERTS if ending]
    ends = {end: name for end, name in ALIASES.items() if f".{module}".endswith(f".{end}")}
    return [module.removesuffix(end) + name for end, name in ends.items()]


def output_config(
    src: Checkpoint,
    layout: Layout | None,
    schemes: Schemes | None,
    true_shapes: Mapping[str, Sequence[int] | None],
    recipe_sha256: str | None,
) -> Json:
    """Make the config.json of an output; `true_shapes` has every changed linear, with its shape if
    it is padded.
    """
    config: Json = without_paths(src.dense_config(), src.path)
    if src.written_dtype is not None:
        for part in (config, *config.values()):  # the parts of an image-text model state theirs too
            if isinstance(part, dict):
                part |= {
                    key: dtype_name(src.written_dtype)
                    for key in ("dtype", "torch_dtype")
                    if key in part
                }
    if layout is not None and schemes is not None:
        schemes = replace(
            schemes,
            padded=tuple(
                (name, (shape[0], shape[1])) for name, shape in true_shapes.items() if shape
            ),
        )
        config["quantization_config"] = quantization_config(
            layout, schemes, list(true_shapes), recipe_sha256
        )
    return config


def quantization_config(
    layout: Layout, schemes: Schemes, modules: Collection[str], recipe_sha256: str | None
) -> Json:
    """Make the public config of a layout and the `quantkit` key; `modules` are the quantized
    linears.
    """
    return {
        **layout.write_config(with_joined_names(schemes, modules)),
        "quantkit": quantkit_key(layout.NAME, schemes, __version__, recipe_sha256),
    }


def with_joined_names(schemes: Schemes, modules: Collection[str]) -> Schemes:
    """State the scheme of each joined linear too, if its members share a scheme that no pattern
    gives to its name.

    `modules` are the quantized linears. A config of exact names does not match joined linears. The
    same holds for a group that is dense as a whole, and for a dense linear that engines ask for by
    an alias. A head is stated by its last name, because engines put prefixes of their own before
    it, and compressed-tensors counts it as no `Linear`.
    """
    exact = (
        literal(pattern) for pattern, _ in schemes.overrides
    )  # a linear's other names are there too
    named: list[tuple[str, Scheme]] = []
    for joined, members in fused_groups(dict.fromkeys([*modules, *filter(None, exact)])).items():
        found = {schemes.of(member) for member in members}
        if len(found) == 1:
            scheme = found.pop()
            asked = [name for name in asked_names(joined, members) if schemes.of(name) != scheme]
            named += [(re.escape(name), scheme) for name in asked]
    heads, stated = {schemes.of(name) for name in filter(is_head, modules)}, schemes.overrides
    if len(heads) == 1:
        others = [each for each in stated if not is_head(literal(each[0]) or "")]
        stated = ((ANY_HEAD, heads.pop()), *others)
    ignore, packed = dict.fromkeys(schemes.ignore), set(map(joined_name, modules))
    for joined, members in fused_groups(schemes.ignore).items():
        if joined not in packed:
            ignore |= dict.fromkeys(asked_names(joined, members))
    ignore |= dict.fromkeys(name for module in schemes.ignore for name in aliases(module))
    return replace(schemes, overrides=(*named, *stated), ignore=tuple(ignore))


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
    found = grouped(
        (f"{_name(goal)} instead of {_name(before[module])}", module)
        for module, goal in after.items()
        if before[module] != goal
    )
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
