"""Which kernel will multiply each linear of a planned output, in one program on one GPU.

Engines join linears (`engines.joined`), and choose a kernel for the joined one. The tables of
`engines` answer for engines, the registry in `kernels` for quantkit. A case that neither covers is
unknown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from quantkit.core.quantized_tensor import Scheme, label
from quantkit.core.threads import grouped
from quantkit.engines.joined import is_expert, joined_name
from quantkit.engines.readers import Folder, engine_kernel, has_own_linears, refusal
from quantkit.engines.tables import GPUS, TARGETS, Engine
from quantkit.errors import KernelError, Option, RecipeError, Words, require_known
from quantkit.kernels import LAUNCHERS, preferred
from quantkit.kernels.loader import arch_name
from quantkit.layouts import LAYOUTS
from quantkit.layouts.recast import target
from quantkit.layouts.schemes import is_embedding
from quantkit.planning.output import Row


@dataclass(frozen=True)
class Kind:
    """The linears of one kind, from all blocks.

    `name` has N in place of the numbers, `members` are the last name parts of the linears that an
    engine joins. `shape` is `[n, k]` of the joined linear, of one expert if they are `experts`.
    `kernel` is None if there is none, or if it is not known; `why` says more.
    """

    name: str
    members: tuple[str, ...]
    count: int
    shape: tuple[int, int]
    scheme: str | None
    kernel: str | None
    why: str | None
    source: str | None


@dataclass(frozen=True)
class Serving:
    """The kernels of a planned output in one program on a GPU of a compute capability,
    named `gpu`; `refusal` is the error if the program does not open the output.
    """

    target: str
    gpu: str
    capability: tuple[int, int]
    kinds: tuple[Kind, ...]
    refusal: RecipeError | None = None

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data."""
        major, minor = self.capability
        return {
            "target": self.target,
            "gpu": self.gpu,
            "capability": f"{major}.{minor}",
            "kinds": [asdict(kind) for kind in self.kinds],
        }


def find_gpu(program: str | None, gpu: str | None) -> tuple[str, tuple[int, int]] | None:
    """Find name and compute capability of the GPU asked about, None if no program is; RecipeError
    if there is none.

    `gpu` is a name of `GPUS`, or None for the GPU that is here.
    """
    if program is None:
        if gpu is not None:
            raise RecipeError(
                Words(Option("gpu"), "says where a program runs, and none is named"),
                Words("add", Option("target")),
            )
        return None
    require_known("program", program, TARGETS)
    if gpu is not None:
        require_known("GPU", gpu, GPUS)
        return gpu, GPUS[gpu]
    if not torch.cuda.is_available():
        raise RecipeError(
            Words(Option("target"), "has kernels for a GPU, and none is here"),
            Words("name one with", Option("gpu"), ", like", Option("gpu", "h100")),
        )
    return torch.cuda.get_device_name(), torch.cuda.get_device_capability()


def serving(
    planned: Sequence[Row], folder: Folder, program: str, gpu: str, capability: tuple[int, int]
) -> Serving:
    """Find the kernels that serve a planned output, with the facts `folder`, in one of
    `TARGETS`.
    """
    engine = TARGETS[program]
    joined = grouped(
        ((joined_name(row.module) if engine.joins else None) or row.module, row) for row in planned
    )
    groups = grouped((_likeness(name, rows), rows) for name, rows in joined.items())
    why, way_out = refusal(folder, engine) or (None, None)
    kinds = [_kind(key[0], alike, folder, engine, capability, why) for key, alike in groups.items()]
    error = RecipeError(why, way_out, subject=program) if why and way_out else None
    return Serving(program, gpu, capability, tuple(kinds), error)


def _likeness(name: str, rows: Sequence[Row]) -> tuple[Any, ...]:
    """Give the key that joined linears of one kind share: name, schemes and shapes."""
    labels = sorted({str(row.scheme) for row in rows})
    shapes = tuple(dict.fromkeys(row.stored for row in rows))
    return (re.sub(r"(?<=\.)\d+(?=\.|$)", "N", name), *labels, shapes)


def _kind(
    name: str,
    alike: list[list[Row]],
    folder: Folder,
    engine: Engine,
    capability: tuple[int, int],
    refused: str | None,
) -> Kind:
    rows = alike[0]
    experts = is_expert(rows[0].module)
    members = tuple(dict.fromkeys(row.module.rpartition(".")[2] for row in rows))
    n, k = (
        (max(row.stored[0] for row in rows) if experts else sum(row.stored[0] for row in rows)),
        rows[0].stored[1],
    )
    goals = {row.goal for row in rows}
    goal = rows[0].goal if len(goals) == 1 else None
    kernel, why, source = None, None, None
    if refused is not None:
        why = refused
    elif len(goals) > 1:
        why = "its members are treated differently"
    elif not isinstance(goal, Scheme):
        why = "dense"
    elif is_embedding(rows[0].module):
        why = "its rows are gathered and decoded"
    elif has_own_linears(folder, engine):
        kernel, why = _own_kernel(folder.layout, goal, n, k, capability)
    else:
        kernel, why, source = engine_kernel(engine, folder.layout, goal, n, k, capability, experts)
    scheme = None if goal is None else label(goal)
    return Kind(name, members, len(alike), (n, k), scheme, kernel, why, source)


def _own_kernel(
    layout: str, scheme: Scheme, n: int, k: int, capability: tuple[int, int]
) -> tuple[str | None, str | None]:
    """Find the source of quantkit's kernel for a weight; the second text says how the weight gets
    there, or why not.
    """
    try:
        hopper = arch_name(*capability) == "sm_90a"
    except KernelError as error:
        return None, error.rule
    for name in (layout, *preferred()):
        place = (
            target(LAYOUTS[name], scheme, n, k, pad=name != layout) if name in LAUNCHERS else None
        )
        # `load` also tries changes that few weights allow: one of a dense weight into 2:4 is not
        # promised here.
        if place is None or (
            place[0] != scheme and (name == layout or place[0].sparsity != scheme.sparsity)
        ):
            continue
        kernels = LAUNCHERS[name].kernels(place[0], *place[1])
        source = (
            kernels.hopper.source
            if hopper and kernels.hopper is not None
            else kernels.portable.source
        )
        if name == layout:
            return source, None
        condition = (
            ""
            if place[0].symmetric == scheme.symmetric
            else ", if its codes fit around zero points of 8"
        )
        return source, f"after load has recast it to {name}{condition}"
    return None, f"no kernel takes {scheme.label} of [{n}, {k}]: each call decodes the weight"
