"""Plan a run from config.json and safetensors headers: its output, its needs, and the verdict.

All misfits are found at once, before any work. Byte counts are exact, because each layout lists its
stored tensors, and the writer its files. Memory is an estimate, with its parts listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from quantkit.calibration.budget import rounding_bytes
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import Goal, Scheme
from quantkit.core.threads import AHEAD
from quantkit.errors import QuantkitError, in_python
from quantkit.layouts.base import Layout
from quantkit.layouts.recast import (
    Target,
    broken_rule,
    candidates,
    fitting,
    nearest,
    target,
)
from quantkit.models.families import BLOCK
from quantkit.models.outline import decoder_weights
from quantkit.models.outside import Outside
from quantkit.planning import verdict as verdicts
from quantkit.planning.needs import Needs, calibrated_memory, free_disk, streamed_memory
from quantkit.planning.output import Output, Row, converted_schemes
from quantkit.planning.serving import Serving
from quantkit.planning.verdict import Misfit, Verdict
from quantkit.recipes.recipe import Recipe, stored_shape
from quantkit.reporting.summary import ShortRepr

NOTHING = Outside([], [])


@dataclass(frozen=True, repr=False)
class Plan(ShortRepr):
    """The output, the needs and the verdict of a run of `quantize` or `pack`.

    `output` has the linears, tensors and files, `needs` the memory, the disk and the duration, and
    `verdict` the weights that do not fit, ways out, remarks and the refusal. `calibration` are the
    facts of the sequences. `serving` has the kernels of the program that was asked about. `fit` has
    the sizes of the schemes that a run with a target size chooses from. `for_python` spells the
    options in notices and errors as keywords.
    """

    output: Output
    needs: Needs
    verdict: Verdict
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

    def to_dict(self) -> dict[str, Any]:
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

    def _shown(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "scheme": self.scheme,
            "linears": len(self.output.quantized),
            "bytes": self.output.bytes,
            "source_bytes": self.output.source_bytes,
            "bits_per_weight": self.bits_per_weight,
            "share": self.share,
            "memory": self.needs.memory.to_dict(),
            "misfits": len(self.verdict.misfits),
            "refusal": None if self.refusal is None else str(self.refusal),
            "notices": self.notices,
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
    (None: by their numbers). Free disk space is measured at `out`. `device` is where the run would
    compute (None: a GPU if there is one); `gpu_memory` are the bytes of a GPU that is not here.
    """
    layout = recipe.output_layout
    goals = {module: recipe.scheme_of(module) for module in linears} if goals is None else goals
    forms = {name: src.form_written(name) for name in src.names()}
    rows, misfits = list[Row](), list[Misfit]()
    for module, shape in linears.items():
        goal, rule = goals[module], None
        stored = shape if goal is None else stored_shape(recipe, goal, *shape)
        if goal is not None:
            own = f"{module}.weight" in forms and module not in tied
            rule = verdicts.source_rule(src, module, shape, own)
            rule = rule or verdicts.place_rule(layout, module)
            rule = rule or verdicts.layout_rule(layout, goal, *stored)
        if goal is not None and rule is not None:
            misfits.append(Misfit(module, shape, goal, rule))
            goal = None
        if layout is not None and isinstance(goal, Scheme):
            rows.append(Row.packed(layout, module, shape, goal, stored))
        else:
            rows.append(Row.dense(forms, module, shape, goal))
    output = Output.of(src, layout, rows, forms, recipe.scheme, decoder_weights(src, inside))
    if recipe.calibrated:
        solved = (row for row in rows if row.goal is not None or BLOCK.match(row.module))
        shapes = {row.module: row.stored for row in solved}
        memory = calibrated_memory(src, shapes, recipe, device, act_budget, gpu_memory)
    else:
        each = rounding_bytes((row.goal for row in rows), src.dtype_of_model)
        rounded = [row.stored for row in output.quantized]
        memory = streamed_memory(src, rounded, each, AHEAD * torch.get_num_threads() + 1)
    memory = replace(memory, gpu_memory=gpu_memory)
    ways = verdicts.ways_out(misfits, goals, layout, recipe, None)
    found = Verdict(tuple(misfits), ways, tuple(src.notices), verdicts.layout_remarks(output))
    return Plan(output, Needs(memory, disk_free=free_disk(out)), found)


def plan_pack(
    src: Checkpoint,
    layout: Layout,
    *,
    out: Path | None = None,
    pad: bool = False,
    requantize: bool = False,
    outside: Outside = NOTHING,
) -> Plan:
    """Plan to rewrite a quantized checkpoint in another layout, without reading its values.

    If the layout does not hold a weight's scheme, the weight is recast to one with the same values.
    If there is none, `requantize` takes the nearest scheme. `pad` enlarges a shape that does not
    fit (LAYOUTS 11). `outside` are the tensors that the model does not have.
    """
    rows, misfits = list[Row](), list[Misfit]()
    schemes: dict[str, Goal | None] = {module: src.scheme(module) for module in src.modules()}
    became: Counter[str] = Counter()
    for module in schemes:
        scheme, shape = src.scheme(module), src.true_size(module)
        found = _destination(src, module, layout, pad, requantize)
        rule = verdicts.place_rule(layout, module)
        if found is None or rule is not None:
            rule = rule or broken_rule(layout, scheme, *shape) or f"{layout.NAME} does not hold it"
            misfits.append(Misfit(module, shape, scheme, rule))
            decoded = {f"{module}.weight": (src.dtype_of_model, shape)}
            rows.append(Row(module, shape, None, shape, decoded))
            continue
        now, stored = found
        became.update([] if now == scheme else [_change(scheme, now)])
        rows.append(Row.packed(layout, module, shape, now, stored))
    assert src.schemes is not None
    forms = {name: src.form_written(name) for name in src.names()}
    usual, decoder = src.schemes.default, decoder_weights(src)
    output = Output.of(src, layout, rows, forms, usual, decoder)
    if not misfits:
        output = replace(output, schemes=converted_schemes(src, rows, outside))
    memory = streamed_memory(src, [src.size(module) for module in schemes])
    needs = Needs(memory, {"output": output.bytes}, free_disk(out))
    problem = needs.disk_problem(out)
    recast = (f"{count} of {len(rows)} linears: {change}" for change, count in became.items())
    verdict = Verdict(
        tuple(misfits),
        verdicts.ways_out(misfits, schemes, layout, None, src.layout),
        (*src.notices, *recast),
        verdicts.layout_remarks(output),
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
