"""Plan a run from config.json and safetensors headers: its output, its needs, the verdict, and the
kernels that will serve it in one program on one GPU.

All misfits are found at once, before any work. Byte counts are exact, because each layout lists its
stored tensors, and the writer its files. Memory is an estimate, with its parts listed. Engines join
linears (`engines.joined`), and choose a kernel for the joined one. The tables of `engines` answer
for engines, the registry in `kernels` for quantkit. A case that neither covers is unknown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from quantkit.calibration.budget import launchers, rounders, rounding_bytes
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import load as load_report
from quantkit.core.quantized_tensor import Goal, Scheme, label
from quantkit.core.threads import AHEAD, grouped
from quantkit.engines.joined import is_expert, joined_name
from quantkit.engines.readers import Folder, engine_kernel, readers_of, refusal
from quantkit.engines.tables import GPUS, TARGETS, Engine
from quantkit.errors import (
    KernelError,
    Option,
    QuantkitError,
    RecipeError,
    Words,
    in_python,
)
from quantkit.kernels import LAUNCHERS, preferred
from quantkit.kernels.loader import arch_name
from quantkit.layouts import LAYOUTS, Layout
from quantkit.layouts.recast import (
    Target,
    broken_rule,
    candidates,
    fitting,
    nearest,
    target,
)
from quantkit.layouts.schemes import is_embedding
from quantkit.models.families import BLOCK
from quantkit.models.outline import decoder_weights
from quantkit.models.outside import Outside
from quantkit.names import Json
from quantkit.planning import verdict as verdicts
from quantkit.planning.needs import Needs, calibrated_memory, free_disk, streamed_memory
from quantkit.planning.output import Output, Row, converted_schemes
from quantkit.recipes.recipe import Recipe, stored_shape
from quantkit.reporting.summary import short_repr


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

    def to_dict(self) -> Json:
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

    `program` is a name of `TARGETS`, `gpu` one of `GPUS`, or None for the GPU that is here.
    """
    if program is None:
        if gpu is not None:
            raise RecipeError(
                Words(Option("gpu"), "says where a program runs, and none is named"),
                Words("add", Option("target")),
            )
        return None
    if gpu is not None:
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
    elif any(reader.is_own for reader, _ in readers_of(folder, [engine])):
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


@dataclass(frozen=True, repr=False)
class Plan:
    """The output, the needs and the verdict of a run of `quantize` or `pack`.

    `output` has the linears, tensors and files, `needs` the memory, the disk and the duration, and
    `verdict` the weights that do not fit, ways out, remarks and the refusal. `calibration` are the
    facts of the sequences. `serving` has the kernels of the program that was asked about. `fit` has
    the sizes of the schemes that a run with a target size chooses from. `for_python` spells the
    options in notices and errors as keywords.
    """

    output: Output
    needs: Needs
    verdict: verdicts.Verdict
    calibration: Mapping[str, Any] = field(default_factory=dict)
    serving: Serving | None = None
    fit: Mapping[str, Any] | None = None
    for_python: bool = False

    @property
    def layout(self) -> str:
        """The layout that would be written; "dense" for a pruned model."""
        return self.output.layout_name

    @property
    def scheme(self) -> str:
        """The scheme of most linears, such as int4:g128."""
        return self.output.scheme

    @property
    def total(self) -> int:
        """The bytes of all files, with upper bounds for report and model card; 0 if a linear does
        not fit.
        """
        return 0 if self.output.files is None else self.output.files.total

    @property
    def files(self) -> Mapping[str, int]:
        """The exact bytes of every file except report and model card; empty if a linear does not
        fit.
        """
        return {} if self.output.files is None else self.output.files.sizes

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits per quantized weight, scales and zero points included; None without any."""
        return self.output.bits_per_weight

    @property
    def share(self) -> float | None:
        """The share of the decoder's weights that do not stay dense; None without any blocks."""
        return self.output.share

    @property
    def refusal(self) -> QuantkitError | None:
        """The error that `quantize` would raise before any computing."""
        return self.verdict.refusal

    @property
    def notices(self) -> list[str]:
        """All remarks, and a warning for each kind of memory that may not suffice."""
        return self._spelled(
            [*self.verdict.layout_remarks, *self.verdict.remarks, *self.needs.memory.notices()]
        )

    @property
    def size_notes(self) -> list[str]:
        """The notes on the output's size that the closing table of a run has too."""
        return self._spelled(self.output.size_notes)

    def _spelled(self, lines: Iterable[str]) -> list[str]:
        return [in_python(line) for line in lines] if self.for_python else [*lines]

    def require(self) -> None:
        """Raise one LayoutError with a line for each broken rule and problem, if there are any."""
        self.verdict.require()

    def require_share(self, least: float) -> None:
        """Raise ThresholdError, naming the largest weights that stay dense, if the share is below
        `least`.
        """
        if (error := self.output.share_error(least)) is not None:
            error.for_python = self.for_python
            raise error

    def to_python(self) -> Plan:
        """Spell options as keywords of the API."""
        return replace(self, verdict=self.verdict.to_python(), for_python=True)

    def to_dict(self) -> Json:
        """Return the plan as plain data, as `plan --json` prints it."""
        return {
            **self.output.to_dict(),
            **self.needs.to_dict(),
            **self.verdict.to_dict(),
            "calibration": dict(self.calibration) or None,
            "serving": None if self.serving is None else self.serving.to_dict(),
            "fit": None if self.fit is None else dict(self.fit),
            "notices": [*self.size_notes, *self.notices],
        }

    def __repr__(self) -> str:
        return short_repr(
            self,
            layout=self.layout,
            scheme=self.scheme,
            linears=len(self.output.quantized),
            bytes=self.output.bytes,
            source_bytes=self.output.source_bytes,
            bits_per_weight=self.bits_per_weight,
            share=self.share,
            memory=self.needs.memory.to_dict(),
            misfits=len(self.verdict.misfits),
            refusal=None if self.refusal is None else str(self.refusal),
            notices=self.notices,
        )


def plan_quantize(
    src: Checkpoint,
    linears: Mapping[str, tuple[int, int]],
    recipe: Recipe,
    *,
    goals: Mapping[str, Goal | None] | None = None,
    tied: Collection[str] = (),
    inside: Collection[str] | None = None,
    out: Path | None = None,
    device: str = "cpu",
    act_budget: int | None = None,
    gpu_memory: int | None = None,
) -> Plan:
    """Plan to quantize or prune the `linears` (name -> `(n, k)`) of a dense checkpoint.

    `goals` has the goal of each linear (None: by name in the recipe). `tied` are the linears that
    share their weight with the embeddings. `inside` names the tensors of the decoder's blocks
    (None: by their numbers). Free disk space is measured at `out`. `device` is where the run would
    compute, cpu or cuda; `gpu_memory` are the bytes of a GPU that is not here.
    """
    layout = recipe.output_layout
    goals = {module: recipe.scheme_of(module) for module in linears} if goals is None else goals
    forms = {name: src.form_written(name) for name in src.names()}
    rows, misfits = list[Row](), list[verdicts.Misfit]()
    for module, shape in linears.items():
        goal, rule = goals[module], None
        stored = shape if goal is None else stored_shape(recipe, goal, *shape)
        if goal is not None:
            is_tied = f"{module}.weight" not in forms or module in tied
            rule = verdicts.place_rule(layout, module) or verdicts.layout_rule(
                layout, goal, *stored
            )
            rule = verdicts.TIED if is_tied else rule
        if goal is not None and rule is not None:
            misfits.append(verdicts.Misfit(module, shape, goal, rule))
            goal = None
        if layout is not None and isinstance(goal, Scheme):
            rows.append(Row.packed(layout, module, shape, goal, stored))
        else:
            rows.append(Row.dense(forms, module, shape, goal))
    output = Output.of(src, layout, rows, forms, recipe.scheme, decoder_weights(src, inside))
    if recipe.calibrated:
        shapes = {r.module: r.stored for r in rows if r.goal is not None or BLOCK.match(r.module)}
        memory = calibrated_memory(src, shapes, recipe, device, act_budget, gpu_memory)
    else:
        rounded = [row.stored for row in output.quantized]
        each = rounding_bytes((row.goal for row in rows), src.dtype_of_model, device)
        there = torch.device(device)
        on_gpu = launchers(there, gpu_memory) if device == "cuda" else 0
        memory = streamed_memory(src, rounded, each, AHEAD * rounders(there) + 1, on_gpu)
    memory = replace(memory, gpu_memory=gpu_memory)
    found = verdicts.Verdict(
        tuple(misfits),
        tuple(verdicts.ways_out(misfits, goals, layout, recipe, None)),
        tuple(src.notices),
        verdicts.layout_remarks(output, layout.NAME if layout and recipe.calibrated else None),
    )
    return Plan(output, Needs(memory, disk_free=free_disk(out)), found)


def plan_pack(
    src: Checkpoint,
    layout: Layout,
    *,
    out: Path | None = None,
    pad: bool = False,
    requantize: bool = False,
    outside: Outside,
) -> Plan:
    """Plan to rewrite a quantized checkpoint in another layout, without reading its values.

    If the layout does not hold a weight's scheme, the weight is recast to one with the same values.
    If there is none, `requantize` takes the nearest scheme. `pad` enlarges a shape that does not
    fit (LAYOUTS 11). `outside` are the tensors that the model does not have.
    """
    rows, misfits = list[Row](), list[verdicts.Misfit]()
    schemes: dict[str, Goal | None] = {module: src.scheme(module) for module in src.modules()}
    became: Counter[str] = Counter()
    for module in schemes:
        scheme, shape = src.scheme(module), src.true_size(module)
        found = _destination(src, module, layout, pad, requantize)
        rule = verdicts.place_rule(layout, module)
        if found is None or rule is not None:
            rule = rule or broken_rule(layout, scheme, *shape) or f"{layout.NAME} does not hold it"
            misfits.append(verdicts.Misfit(module, shape, scheme, rule))
            decoded = {f"{module}.weight": (src.dtype_of_model, shape)}
            rows.append(Row(module, shape, None, shape, decoded))
            continue
        now, stored = found
        became.update([] if now == scheme else [_change(scheme, now)])
        rows.append(Row.packed(layout, module, shape, now, stored))
    assert src.schemes is not None
    forms = {name: src.form_written(name) for name in src.names()}
    output = Output.of(src, layout, rows, forms, src.schemes.default, decoder_weights(src))
    if not misfits:
        output = replace(output, schemes=converted_schemes(src, rows, outside))
    memory = streamed_memory(src, [src.size(module) for module in schemes])
    needs = Needs(memory, {"output": output.bytes}, free_disk(out))
    problem = needs.disk_problem(out)
    measured = src.layout.NAME if src.layout and load_report(src.path).get("calibration") else None
    recast = (f"{count} of {len(rows)} linears: {change}" for change, count in became.items())
    verdict = verdicts.Verdict(
        tuple(misfits),
        tuple(verdicts.ways_out(misfits, schemes, layout, None, src.layout)),
        (*src.notices, *recast),
        verdicts.layout_remarks(output, measured),
        () if problem is None else (problem,),
    )
    return Plan(output, needs, verdict)


def _destination(
    src: Checkpoint, module: str, layout: Layout, pad: bool, requantize: bool
) -> Target | None:
    """Return the scheme and shape for a packed weight that change it least; None if the layout
    cannot hold it.

    Padding is removed if the last group of columns is complete without it, and the layout does not
    need it.
    """
    scheme, true, stored = src.scheme(module), src.true_size(module), src.size(module)
    shapes = [true, stored] if scheme.padded_k(true[1]) == true[1] else [stored]
    asked = [(target, shape, False) for shape in dict.fromkeys(shapes)]
    asked += [(target, true, True)] if pad else []
    asked += [(nearest, true, False)] if requantize else []
    asked += [(nearest, true, True)] if requantize and pad else []
    results = (find(layout, scheme, *shape, pad=padding) for find, shape, padding in asked)
    found = next((result for result in results if result is not None), None)
    if pad and found is not None and found[0].symmetric != scheme.symmetric:
        shape = fitting(layout, scheme, *true, pad=True)  # holds any zero point
        return found if shape is None else (scheme, shape)
    return found


def _change(scheme: Scheme, now: Scheme) -> str:
    """Describe the change of a weight's scheme, and the condition on its data."""
    if now not in candidates(scheme):
        return f"{scheme.label} is rounded again to {now.label}, which is lossy"
    needs = [] if scheme.symmetric == now.symmetric else ["codes fit around zero points of 8"]
    needs += [] if scheme.sparsity == now.sparsity else ["the weight is 2:4"]
    return f"{scheme.label} restated as {now.label}, the same values" + (
        f", if {' and '.join(needs)}" if needs else ""
    )
