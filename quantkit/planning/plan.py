"""Plan a run from config.json and safetensors headers: its output, its memory, and everything that
it must refuse.

All misfits are found at once, before any work. Byte counts are exact, because each layout states
the tensors that it stores, and the writer the files that it makes of them. Memory is an estimate,
with its parts listed.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.scheme import Scheme
from quantkit.core.sparsity import quads
from quantkit.core.tensors import FLOATS, dtype_name
from quantkit.core.units import format_bytes
from quantkit.engines import readers
from quantkit.engines.joined import joined_name
from quantkit.engines.readers import Folder
from quantkit.errors import (
    CheckpointError,
    LayoutError,
    Option,
    QuantkitError,
    Setting,
    ThresholdError,
    Words,
    in_python,
)
from quantkit.kernels import MATMULS
from quantkit.layouts.base import Layout
from quantkit.layouts.recast import Target, broken_rule, candidates, nearest, target
from quantkit.models.outline import decoder_weights, largest_others, share_of
from quantkit.planning.memory import Memory, calibrated_memory, streamed_memory
from quantkit.planning.misfits import Misfit, ways_out
from quantkit.planning.rows import Row
from quantkit.planning.serving import Serving
from quantkit.recipes.goals import Goal, is_sparse, label
from quantkit.recipes.recipe import Recipe, stored_shape
from quantkit.reporting.short_repr import ShortRepr

#: The remark for 2:4 without training (ALGORITHMS 9).
ONE_SHOT = Words(
    "2:4 without training costs quality: published 7B and 8B models about double their perplexity, "
    "and "
    "recover by fine-tuning with the mask held; late layers are the sensitive ones:",
    Setting("skip"),
    "them first",
)
#: The layout name of a pruned model that is not quantized.
DENSE = "dense"


@dataclass(frozen=True, repr=False)
class Plan(ShortRepr):
    """Describe the output of `quantize` or `pack`; `bytes` counts exactly the output's tensors.

    A misfit is counted as if left dense. `ways_out` has one line for each broken rule, with the
    options that help. `problems` are other reasons to refuse. `remarks` are about this model in any
    layout, `layout_remarks` about the readers of this layout. `readers` are the programs that open
    the output. `decoder` has the elements of each matrix in the decoder's blocks.

    Of `quantize` alone: `files` has the exact bytes of every file but report and model card, which
    together take at most `report_bytes`; it is empty if there are misfits. `before_last` are the
    bytes of tensors written before the last block, and `joined` those of a file that is made of
    smaller ones. `calibration` are the facts of the sequences. `refusal` is the error with which
    `quantize` would end before it computes anything. `folder` has the facts on which readers
    depend, and `serving` the kernels of the program that was asked about. `duration` are the least
    and the most seconds by a measured probe; the most is None if they are only known to be more.
    `fit` has the sizes of the schemes that a run with a target size chooses from. `for_python`
    spells the options in notices and errors as keywords.
    """

    layout: str
    scheme: str
    rows: tuple[Row, ...]
    bytes: int
    source_bytes: int
    memory: Memory
    misfits: tuple[Misfit, ...] = ()
    ways_out: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    layout_remarks: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    disk_free: int | None = None
    decoder: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    report_bytes: int = 0
    before_last: int = 0
    joined: int = 0
    calibration: Mapping[str, Any] = field(default_factory=dict)
    refusal: QuantkitError | None = None
    folder: Folder | None = None
    serving: Serving | None = None
    duration: tuple[float, float | None] | None = None
    fit: Mapping[str, Any] | None = None
    for_python: bool = False

    @property
    def total(self) -> int:
        """The bytes of all files, with upper bounds for report and model card."""
        return sum(self.files.values()) + self.report_bytes

    @property
    def notices(self) -> list[str]:
        """All remarks, and a warning for each kind of memory that may not suffice."""
        lines = [*self.layout_remarks, *self.remarks, *self.memory.notices()]
        return [in_python(line) for line in lines] if self.for_python else lines

    @property
    def quantized(self) -> list[Row]:
        """The rows that do not stay dense."""
        return [row for row in self.rows if row.scheme is not None]

    @property
    def packed_bytes(self) -> int:
        """The bytes of all rows that do not stay dense."""
        return sum(row.bytes for row in self.quantized)

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits per quantized weight, scales and zero points included; None if
        there is none.
        """
        weights = sum(prod(row.shape) for row in self.quantized)
        return 8 * self.packed_bytes / weights if weights else None

    @property
    def share(self) -> float | None:
        """The share of the decoder's weights that do not stay dense; None if no blocks
        are found.
        """
        return share_of(self.decoder, [row.module for row in self.quantized])

    def require_share(self, least: float) -> None:
        """Raise ThresholdError, naming the largest weights that stay dense, if the share is below
        `least`.
        """
        if self.share is None or self.share >= least:
            return
        done = "pruned" if self.layout == DENSE else "quantized"
        linears = {f"{row.module}.weight": "skipped" for row in self.rows}
        others = [
            f"{name} and its like in other blocks ({100 * share:.1f} %, "
            f"{linears.get(name, 'no linear')})"
            for name, share in largest_others(self.decoder, [row.module for row in self.quantized])
        ]
        more = f" and {len(others) - 3} more kinds" if len(others) > 3 else ""
        share, asked = (
            f"{100 * self.share:.1f} % of the decoder's weights would be {done},",
            Option("min_share"),
        )
        rule = Words(
            share, asked, f"asks for {100 * least:g} %: {', '.join(others[:3])}{more} stay dense"
        )
        error = ThresholdError(rule, "skip fewer linears", Words("lower", asked))
        error.for_python = self.for_python
        raise error

    def require(self) -> None:
        """Raise one LayoutError with a line for each broken rule and problem, if there are any."""
        lines = [*self.ways_out, *self.problems]
        if lines:
            raise LayoutError(Words(*[part for line in lines for part in ("\n", line)][1:]))

    def _shown(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "scheme": self.scheme,
            "linears": len(self.quantized),
            "bytes": self.bytes,
            "source_bytes": self.source_bytes,
            "bits_per_weight": self.bits_per_weight,
            "share": self.share,
            "memory": self.memory.to_dict(),
            "misfits": len(self.misfits),
            "refusal": None if self.refusal is None else str(self.refusal),
            "notices": self.notices,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, as `plan --json` prints it."""
        return {
            "layout": self.layout,
            "scheme": self.scheme,
            "bytes": self.bytes,
            "packed_bytes": self.packed_bytes,
            "dense_bytes": self.bytes - self.packed_bytes,
            "source_bytes": self.source_bytes,
            "files": None
            if not self.files
            else {
                "total": self.total,
                "exact": sum(self.files.values()),
                "report_and_card": self.report_bytes,
                "each": [{"name": name, "bytes": size} for name, size in self.files.items()],
            },
            "bits_per_weight": self.bits_per_weight,
            "share": self.share,
            "peak_memory": self.memory.to_dict(),
            "disk_free": self.disk_free,
            "readers": ", ".join(self.readers),
            "kernel": self.layout if self.layout in MATMULS else None,
            "misfits": [asdict(misfit) for misfit in self.misfits],
            "ways_out": list(self.ways_out),
            "problems": list(self.problems),
            "refusal": None
            if self.refusal is None
            else {"exit_code": self.refusal.exit_code, "message": str(self.refusal)},
            "calibration": dict(self.calibration) or None,
            "serving": None if self.serving is None else self.serving.to_dict(),
            "duration": None
            if self.duration is None
            else {"low": self.duration[0], "high": self.duration[1]},
            "fit": None if self.fit is None else dict(self.fit),
            "notices": self.notices,
            "linears": [asdict(row) for row in self.rows],
        }


def plan_quantize(
    src: Checkpoint,
    linears: Mapping[str, tuple[int, int]],
    recipe: Recipe,
    *,
    goals: Mapping[str, Goal | None] | None = None,
    tied: Collection[str] = (),
    inside: Collection[str] | None = None,
    out: Path | None = None,
    device: str | None = None,
    act_budget: int | None = None,
    gpu_memory: int | None = None,
) -> Plan:
    """Plan to quantize or prune the `linears` (name -> `(n, k)`) of a dense checkpoint.

    `goals` has the goal of each linear (None: by name in the recipe). `tied` are the linears that
    share their weight with the embeddings. `inside` names the tensors of the decoder's blocks
    (None: by their numbers). The free disk space is that at `out`. `device` is where the run would
    compute (None: a GPU if there is one); `gpu_memory` are the bytes of a GPU that is not here.
    """
    layout = recipe.output_layout
    goals = {module: recipe.scheme_of(module) for module in linears} if goals is None else goals
    stored = set(src.names())
    rows, misfits = [], []
    for module, shape in linears.items():
        goal, in_source = goals[module], f"{module}.weight" in stored
        if goal is not None:
            own_weight = in_source and module not in tied
            rule = _source_rule(src, module, shape, own_weight) or _misfit_rule(
                layout, goal, *stored_shape(recipe, goal, *shape)
            )
            if rule is not None:
                misfits.append(Misfit(module, shape, label(goal), rule))
                goal = None
        rows.append(_row(src, recipe, module, shape, goal, in_source))
    sizes = {row.module: row.stored for row in rows}
    quantized = {row.module: row.stored for row in rows if row.scheme is not None}
    if recipe.calibrated:
        memory = calibrated_memory(src, sizes, recipe, device, act_budget, gpu_memory)
    else:
        memory = streamed_memory(src, quantized)
    memory = replace(memory, gpu_memory=gpu_memory)
    plan = replace(
        _assemble(src, layout, recipe.scheme, rows, misfits, memory, out),
        decoder=decoder_weights(src, inside),
    )
    remarks = (
        [ONE_SHOT] if any(goal is not None and is_sparse(goal) for goal in goals.values()) else []
    )
    lines = ways_out(misfits, goals, layout, recipe, None)
    return replace(plan, ways_out=lines, remarks=(*plan.remarks, *remarks))


def plan_pack(
    src: Checkpoint,
    layout: Layout,
    *,
    out: Path | None = None,
    pad: bool = False,
    requantize: bool = False,
) -> Plan:
    """Plan to rewrite a quantized checkpoint in another layout, without reading its values.

    If the layout does not hold a weight's scheme, the weight is recast to one with the same values.
    If there is none, `requantize` takes the nearest scheme. `pad` enlarges a shape that does not
    fit (LAYOUTS 11).
    """
    rows, misfits = [], []
    changes: Counter[str] = Counter()
    sizes = {module: src.size(module) for module in src.modules()}
    schemes: dict[str, Scheme | None] = {module: src.scheme(module) for module in sizes}
    for module in sizes:
        scheme, (n, k) = src.scheme(module), src.true_size(module)
        found = _destination(src, module, layout, pad, requantize)
        if found is None:
            rule = broken_rule(layout, scheme, n, k) or f"{layout.NAME} does not hold it"
            misfits.append(Misfit(module, (n, k), scheme.label, rule))
            rows.append(Row(module, (n, k), None, n * k * src.dtype_of_model.itemsize))
            continue
        now, shape = found
        if now != scheme:
            changes[_change(scheme, now)] += 1
        padded = None if shape == (n, k) else shape
        rows.append(Row(module, (n, k), now.label, stored_bytes(layout, now, *shape), padded))
    assert src.schemes is not None
    plan = replace(
        _assemble(
            src,
            layout,
            src.schemes.default,
            rows,
            misfits,
            streamed_memory(src, sizes),
            out,
        ),
        decoder=decoder_weights(src),
    )
    remarks = (f"{count} of {len(rows)} linears: {change}" for change, count in changes.items())
    lines = ways_out(misfits, schemes, layout, None, src.layout)
    problem = disk_problem(plan, out, plan.bytes)
    problems = () if problem is None else (problem,)
    return replace(plan, ways_out=lines, remarks=(*plan.remarks, *remarks), problems=problems)


def _row(
    src: Checkpoint,
    recipe: Recipe,
    module: str,
    shape: tuple[int, int],
    goal: Goal | None,
    in_source: bool,
) -> Row:
    """Return the row of a linear with its goal, or of one that stays dense (None)."""
    dense = src.bytes_written(f"{module}.weight") if in_source else 0
    if goal is None:
        return Row(module, shape, None, dense)
    stored = stored_shape(recipe, goal, *shape)
    padded = None if stored == shape else stored
    layout = recipe.output_layout
    if layout is None or not isinstance(goal, Scheme):
        return Row(module, shape, label(goal), dense, padded)
    return Row(module, shape, goal.label, stored_bytes(layout, goal, *stored), padded)


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
    found = (find(layout, scheme, *shape, pad=padding) for find, shape, padding in asked)
    return next((result for result in found if result is not None), None)


def _change(scheme: Scheme, now: Scheme) -> str:
    """Describe the change of a weight's scheme, and the condition on its data."""
    if now not in candidates(scheme):
        return f"{scheme.label} is rounded again to {now.label}, which is lossy"
    needs = [] if scheme.symmetric == now.symmetric else ["codes fit around zero points of 8"]
    needs += [] if scheme.sparsity == now.sparsity else ["the weight is 2:4"]
    return f"{scheme.label} restated as {now.label}, the same values" + (
        f", if {' and '.join(needs)}" if needs else ""
    )


def stored_bytes(layout: Layout, scheme: Scheme, n: int, k: int) -> int:
    """Return the bytes of all tensors that a layout stores for an `[n, k]` weight."""
    return sum(
        dtype.itemsize * prod(shape) for dtype, shape in layout.stored(scheme, n, k).values()
    )


def _misfit_rule(layout: Layout | None, goal: Goal, n: int, k: int) -> str | None:
    """Return the rule that a weight breaks in a layout or, if it stays dense, as a 2:4 weight."""
    if layout is not None and isinstance(goal, Scheme):
        return broken_rule(layout, goal, n, k)
    try:
        goal.groups(k) if isinstance(goal, Scheme) else quads(k)
    except LayoutError as error:
        return error.rule
    return None


def _assemble(
    src: Checkpoint,
    layout: Layout | None,
    default: Goal,
    rows: list[Row],
    misfits: list[Misfit],
    memory: Memory,
    out: Path | None,
) -> Plan:
    """Add the other tensors of the output, the remarks and the free disk space. `default` is for no
    linear at all.
    """
    labels = Counter(row.scheme for row in rows if row.scheme is not None)
    linears = {row.module + ".weight" for row in rows} | {
        name for m in src.modules() for name in src.parts(m).values()
    }
    others = sum(src.bytes_written(name) for name in src.names() if name not in linears)
    total = others + sum(row.bytes for row in rows)
    free = _free_disk(out)
    folder = _folder(src, layout, rows) if layout else None
    return Plan(
        layout=layout.NAME if layout else DENSE,
        scheme=labels.most_common(1)[0][0] if labels else label(default),
        rows=tuple(rows),
        bytes=total,
        source_bytes=src.file_bytes,
        memory=memory,
        misfits=tuple(misfits),
        remarks=tuple(src.notices),
        layout_remarks=tuple(_layout_remarks(layout, rows, folder)) if layout and folder else (),
        readers=tuple(readers.opened_by(folder)) if folder else (),
        folder=folder,
        disk_free=free,
    )


def _source_rule(
    src: Checkpoint, module: str, shape: tuple[int, int], own_weight: bool
) -> str | None:
    """Return the rule, independent of the layout, by which a weight cannot be quantized."""
    name = f"{module}.weight"
    if not own_weight:
        return "a linear tied to the embeddings has no weight of its own, and those stay dense"
    if src.dtype(name) not in FLOATS:
        return (
            f"weights stored as {dtype_name(src.dtype(name))} are not quantized, only "
            f"{', '.join(map(dtype_name, FLOATS))} are"
        )
    if src.shape(name) != shape:
        return f"config.json says {list(shape)}, the checkpoint has {list(src.shape(name))}"
    return None


def _folder(src: Checkpoint, layout: Layout, rows: list[Row]) -> Folder:
    """Collect the facts of the output on which its readers depend; of a packed source, dense
    linears are known by name.

    A source's config may leave out dense linears, so the other members of each fused group are
    looked up in its files.
    """
    linears = {
        row.module: (Scheme.parse(row.scheme), row.stored) for row in rows if row.scheme is not None
    }
    dense = dict.fromkeys(row.module for row in rows if row.scheme is None)
    if src.schemes is not None:
        stored = (name.removesuffix(".weight") for name in src.names() if name.endswith(".weight"))
        dense |= dict.fromkeys(src.schemes.ignore)
        dense |= dict.fromkeys(name for name in stored if joined_name(name) and name not in linears)
    is_half = (src.written_dtype or src.dtype_of_model) == torch.float16
    return Folder(
        layout.NAME, linears, tuple(dense), any(row.padded for row in rows), src.config, is_half
    )


def _layout_remarks(layout: Layout, rows: list[Row], folder: Folder) -> list[str]:
    """Return the limits of the layout's readers that concern this output (LAYOUTS 3.1, 3.5, 9 and
    10).
    """
    found = [*readers.refusals(folder), *readers.cautions(folder)]
    if layout.ZEROS_NOTICE is not None and not all(scheme.symmetric for scheme in folder.schemes):
        found.append(layout.ZEROS_NOTICE)
    padded = [row for row in rows if row.scheme is not None and row.padded]
    if padded:
        found.append(
            f"{len(padded)} weights are padded with zeros (first {padded[0].module} "
            f"{list(padded[0].shape)} to "
            f"{list(padded[0].stored)}): only quantkit reads their true shapes, and this folder "
            "right"
        )
    return found


def disk_problem(planned: Plan, out: Path | None, needed: int, gradients: int = 0) -> str | None:
    """Say that the disk of `out` is too small for `needed` bytes; None if it is not.

    `gradients` are the bytes of gradients, if they are the largest part.
    """
    if planned.disk_free is None or needed <= planned.disk_free:
        return None
    also = Words(
        "use", Setting("output_aware", False), f": {format_bytes(gradients)} are for gradients"
    )
    return CheckpointError(
        f"the run takes {format_bytes(needed)} of disk and {format_bytes(planned.disk_free)} are "
        "free",
        Words("free some or use another", Option("out")),
        *([also] if gradients else []),
        subject=out,
    ).typed


def _free_disk(out: Path | None) -> int | None:
    if out is None:
        return None
    existing = next((folder for folder in out.absolute().parents if folder.is_dir()), None)
    return shutil.disk_usage(existing).free if existing else None
