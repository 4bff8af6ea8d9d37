"""The verdict on a run: refusals, with ways out, and remarks.

An option is offered only after the layouts' own `check` has accepted it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from typing import Any

import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.formats import dtype_name
from quantkit.core.quantized_tensor import Goal, Scheme, is_sparse, label
from quantkit.core.sparsity import quads
from quantkit.core.threads import grouped
from quantkit.engines import readers
from quantkit.engines.joined import is_expert
from quantkit.errors import (
    CheckpointError,
    Command,
    LayoutError,
    Option,
    QuantkitError,
    Setting,
    Words,
    in_python,
)
from quantkit.inference.swap_linears import swap
from quantkit.keys import keys_of
from quantkit.layouts import LAYOUTS, Layout
from quantkit.layouts.recast import GROUP_SIZES, broken_rule, nearest, padded_shape, target
from quantkit.layouts.schemes import is_embedding
from quantkit.models.block_runner import BlockRunner
from quantkit.models.meta_model import ContradictoryConfigError, skeleton
from quantkit.models.outline import Outline
from quantkit.models.outside import Outside, drafts_by_name
from quantkit.names import KERNELS, Json
from quantkit.planning.output import Output
from quantkit.recipes.recipe import Recipe, skip_pattern

#: The remark for 2:4 without training (ALGORITHMS 9).
ONE_SHOT = Words(
    "2:4 without training costs quality: published 7B and 8B models about double their perplexity "
    "by sparsegpt or wanda, lose far more by magnitude, and recover by fine-tuning with the mask "
    "held; late layers are the sensitive ones:",
    Setting("skip"),
    "them first",
)
#: The remark for MXFP4 (docs/results.md; docs/layouts.md 10 on vLLM).
COARSE = Words(
    "MXFP4 lost more than integers of as many bits in all models that were measured, and vLLM "
    "0.33.0 rounds its activations too on an H100 or H200: unless an engine asks for it, use",
    Setting("format", "int4"),
    Setting("group_size", 64),
)
#: The remark for rows with one scale whose sums no text measured (docs/layouts.md 9b).
UNMEASURED = Words(
    "vLLM's Humming kernels add up a row in float16 before its scale is applied, and no text "
    "measures these sums, which give NaN beyond 65504: check the folder with",
    Command("verify", Words("OUT"), Option("engine", "vllm")),
)
TIED = "a linear tied to the embeddings has no weight of its own, theirs serves both"
FILLED = "to fill it up with zeros"
#: The most ways out that a message names.
MOST_OPTIONS = 2
#: Group sizes to suggest, in this order; one scale per row (None) fits every k.
SUGGESTED = (*GROUP_SIZES, None)


@dataclass(frozen=True)
class Verdict:
    """Refusals and remarks of a run.

    `ways_out` has a line for each rule that a misfit breaks, with the options that help. `problems`
    are other reasons to refuse, and `refusal` is the error that `quantize` would raise before any
    computing. `remarks` are about this model in any layout, `layout_remarks` about the readers of
    this layout.
    """

    misfits: tuple[Misfit, ...] = ()
    ways_out: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    layout_remarks: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    refusal: QuantkitError | None = None

    def require(self) -> None:
        """Raise one LayoutError with a line for each broken rule and problem, if there are any."""
        lines = [*self.ways_out, *self.problems]
        if lines:
            raise LayoutError(Words(*[part for line in lines for part in ("\n", line)][1:]))

    def with_remarks(self, *more: str) -> Verdict:
        """Append remarks."""
        return replace(self, remarks=(*self.remarks, *more))

    def to_python(self) -> Verdict:
        """Spell options as keywords of the API."""
        if self.refusal is not None:
            self.refusal.to_python()
        return replace(
            self,
            ways_out=tuple(map(in_python, self.ways_out)),
            remarks=tuple(map(in_python, self.remarks)),
            layout_remarks=tuple(map(in_python, self.layout_remarks)),
            problems=tuple(map(in_python, self.problems)),
        )

    def to_dict(self) -> Json:
        """Return the verdict as `plan --json` prints it."""
        error = self.refusal
        return {
            "misfits": [misfit.to_dict() for misfit in self.misfits],
            "ways_out": list(self.ways_out),
            "problems": list(self.problems),
            "refusal": None
            if error is None
            else {"exit_code": error.exit_code, "message": str(error)},
        }


@dataclass(frozen=True)
class Misfit:
    """A linear, or embeddings, that cannot be quantized as asked, and the rule that is broken."""

    module: str
    shape: tuple[int, int]
    goal: Goal
    rule: str

    @property
    def scheme(self) -> Scheme:
        """The scheme that was asked for."""
        assert isinstance(self.goal, Scheme)  # a pruning recipe has no layout to change
        return self.goal

    def to_dict(self) -> Json:
        """Return the misfit as `plan --json` prints it."""
        return {
            "module": self.module,
            "shape": self.shape,
            "scheme": label(self.goal),
            "rule": self.rule,
        }


def ways_out(
    misfits: list[Misfit],
    schemes: Mapping[str, Goal | None],
    layout: Layout | None,
    recipe: Recipe | None,
    source: Layout | None,
) -> Iterator[str]:
    """Yield a line for each broken rule: its weights by shape, and the options that help.

    `schemes` has the goal of every linear, misfit or not. `layout` is None if weights stay dense,
    `recipe` is None for a conversion, `source` is the layout of its source.
    """
    rules = grouped((misfit.rule, misfit) for misfit in misfits)
    everything = len(misfits) == sum(scheme is not None for scheme in schemes.values())
    joint: list[str] = []
    if layout is not None:
        unfit = [misfit for group in rules.values() if not _fits(group, layout) for misfit in group]
        if unfit:
            joint = _one_change(unfit, layout, recipe, source) or _two_changes(unfit, recipe)
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
        key = recipe and recipe.key_of(misfit.module for misfit in group)
        if key is not None:
            options.append(Words("drop", Setting(key)))
        elif recipe is not None and is_embedding(group[0].module):
            options.append(Words("leave out the", Setting("override"), "of embeddings"))
        elif recipe is not None and not everything:
            pattern = skip_pattern([misfit.module for misfit in group], schemes)
            options.append(Words("leave them dense with", Setting("skip", pattern)))
        last = (
            "quantize the original model in another way"
            if recipe is None
            else "download or convert the model again"
        )
        weights = ", ".join(
            f"{modules[0]} is "
            f"{list(shape)}{f' (and {len(modules) - 1} more)' if len(modules) > 1 else ''}"
            for shape, modules in grouped((misfit.shape, misfit.module) for misfit in group).items()
        )
        yield LayoutError(f"{rule}: {weights}", *(options[:MOST_OPTIONS] or [last])).typed


def _one_change(
    group: list[Misfit], layout: Layout, recipe: Recipe | None, source: Layout | None
) -> list[str]:
    """List the options that make all weights of a group fit; none if the source, not the layout, is
    at fault.
    """
    options = [] if recipe is not None else _for_conversion(group, layout)
    if recipe is not None:
        size = next((g for g in SUGGESTED if _fits(group, layout, group_size=g)), ...)
        key = recipe.key_of(misfit.module for misfit in group)
        if key is not None and size is not ...:
            return [Words("use", Setting(key, replace(group[0].scheme, group_size=size).label))]
        options += [] if size is ... else [Words("use", Setting("group_size", size or "channel"))]
        asymmetric = any(not misfit.scheme.symmetric for misfit in group)
        if asymmetric and _fits(group, layout, symmetric=True):
            options.append(Words("drop", Setting("asym", True)))
        integers = all(s.scheme.symmetric and not s.scheme.format.is_float for s in group)
        dense = all(misfit.scheme.sparsity is None for misfit in group)
        if integers and dense and _fits(group, layout, sparsity="2:4"):
            options.append(Words("add", Setting("prune", "2:4")))
    others = [
        name for name, other in LAYOUTS.items() if other is not source and _fits(group, other)
    ]
    return options + _instead(layout, others, group[0].scheme)


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
            place_rule(layout, misfit.module) is None
            and find(layout, misfit.scheme, *misfit.shape, pad=pad)
            for misfit in group
        ):
            return [Words("add", flag, "to round again (lossy)" if find is nearest else FILLED)]
    return []


def _padding_helps(group: list[Misfit], layout: Layout) -> bool:
    """Return True if the layout refuses the weights of a group, but would hold them in larger
    shapes.
    """
    return all(
        broken_rule(layout, misfit.scheme, *misfit.shape) == misfit.rule
        and padded_shape(layout, misfit.scheme, *misfit.shape) is not None
        for misfit in group
    )


def _two_changes(misfits: list[Misfit], recipe: Recipe | None) -> list[str]:
    """Suggest a layout and a group size that together hold all misfits, if one change does not
    help.
    """
    if recipe is None:
        return []
    both = (
        (name, g)
        for name, layout in LAYOUTS.items()
        for g in SUGGESTED
        if _fits(misfits, layout, group_size=g)
    )
    return [
        Words("use", Setting("layout", name), Setting("group_size", g or "channel"))
        for name, g in islice(both, 1)
    ]


def _fits(misfits: list[Misfit], layout: Layout, **change: Any) -> bool:
    if any(place_rule(layout, misfit.module) for misfit in misfits):
        return False
    size = change.get("group_size", ...)
    if size is not ... and not all(misfit.scheme.format.takes(size) for misfit in misfits):
        return False
    asked = {(replace(misfit.scheme, **change), *misfit.shape) for misfit in misfits}
    return all(broken_rule(layout, scheme, n, k) is None for scheme, n, k in asked)


def place_rule(layout: Layout | None, module: str) -> str | None:
    """Return the rule by which a layout has no place for a weight that is embeddings; None for
    others, and if it has.
    """
    if not is_embedding(module):
        return None
    if layout is None:
        return "embeddings are not pruned"
    return None if layout.GATHERS else f"{layout.TITLE} has no place for embeddings"


def layout_rule(layout: Layout | None, goal: Goal, n: int, k: int) -> str | None:
    """Return the rule that a weight breaks in a layout or, if it stays dense, as a 2:4 weight."""
    if layout is not None and isinstance(goal, Scheme):
        return broken_rule(layout, goal, n, k)
    try:
        goal.groups(k) if isinstance(goal, Scheme) else quads(k)
    except LayoutError as error:
        return error.rule
    return None


def layout_remarks(output: Output, measured: str | None) -> tuple[str, ...]:
    """List the limits of the layout's readers that concern this output (LAYOUTS 3.1, 3.5, 9 and
    10). `measured`: the layout for which a text measures the sums of rows, None without a text.
    """
    folder, layout = output.folder, output.layout
    if folder is None or layout is None:
        return ()
    found = readers.refusals(folder)
    limits = (say(folder) for layouts, say in readers.CAUTIONS if folder.layout in layouts)
    found += filter(None, limits)
    forms = {(scheme, *shape, is_expert(m)) for m, (scheme, shape) in folder.linears.items()}
    known = {form for form in forms if measured and readers.sums_in_float16(measured, *form)}
    if any(readers.sums_in_float16(folder.layout, *form) for form in forms - known):
        found.append(UNMEASURED)
    if layout.ZEROS_NOTICE is not None and not all(scheme.symmetric for scheme in folder.schemes):
        found.append(layout.ZEROS_NOTICE)
    padded = [row for row in output.quantized if row.padded]
    if padded:
        first = padded[0]
        found.append(
            f"{len(padded)} weights are padded with zeros (first {first.module} "
            f"{list(first.shape)} to {list(first.stored)}): only quantkit reads their true shapes, "
            "and this folder right"
        )
    return tuple(found)


def model_remarks(
    recipe: Recipe, model: BlockRunner, goals: Mapping[str, Goal | None]
) -> list[str]:
    """List linears that stay dense by default, and recipe settings without effect on this model."""
    sparse = any(goal is not None and is_sparse(goal) for goal in goals.values())
    src, found = model.src, [*([ONE_SHOT] if sparse else []), *model.notices]
    formats = {goal.format.name for goal in goals.values() if isinstance(goal, Scheme)}
    if "mxfp4" in formats and src.low_bit is None:
        found.append(COARSE)
    written = {name: src.form_written(name)[0] for name in src.names()}
    single = [name for name, dtype in written.items() if dtype == torch.float32]
    if recipe.dense_dtype is not None and src.written_dtype != torch.float32 and single:
        found.append(
            f"{len(single)} tensors stay float32, because transformers keeps them so: first "
            f"{single[0]}"
        )
    wide = [name for name, dtype in written.items() if dtype.itemsize > 2]
    dense = sum(
        src.nbytes(name) for name in wide if goals.get(name.removesuffix(".weight")) is None
    )
    is_wide = src.dtype_of_model.itemsize != 2 and not recipe.dense_dtype
    if dense and is_wide and not recipe.only_prunes:
        found.append(
            Words(
                f"dense tensors stay {dtype_name(src.dtype_of_model)} like the source "
                f"({dense / 1e9:.3g} GB);",
                "for 16 bits use",
                Setting("dense_dtype", "bfloat16"),
            )
        )
    reasons = grouped(
        (reason, name) for name, reason in model.kept_dense.items() if goals[name] is None
    )
    found += [
        f"{names[0]}: left dense, {reason} ({len(names)} in all)"
        for reason, names in reasons.items()
    ]
    return [*found, *(_of_text(recipe, model) if recipe.calibrated else _idle(recipe))]


def _of_text(recipe: Recipe, model: BlockRunner) -> Iterator[str]:
    """Note the part of a model that is calibrated, and the limit of its sequences."""
    asked = recipe.calibration.max_length
    if model.text_path:
        yield (
            f"calibrated through {model.text_path}, on text alone: {type(model.module).__name__} "
            "asks for other inputs"
        )
    if asked > model.max_length:
        ends = f"calibration sequences end at the model's {model.max_length} positions,"
        yield Words(ends, Setting("max_length"), f"is {asked}")


def _idle(recipe: Recipe) -> list[str]:
    """Name the keys of a recipe without text that have no effect, and another value than usual."""
    idle = [
        key
        for key in keys_of(type(recipe))
        if key.path[0] in ("calibration", "gptq")
        and key.default
        and key.default is not ...
        and reduce(getattr, key.path, recipe) != key.default
    ]
    named = [part for key in idle for part in (",", Setting(key.keyword))][1:]
    return [Words("rounding reads no text: no weight depends on", *named)] if idle else []


def require_complete_source(src: Checkpoint) -> tuple[Outside, Outline | None]:
    """Raise CheckpointError unless a source has the tensors of its model and others that it
    declares, before any work.

    Returns the tensors that the model does not have, and the model. One that transformers cannot
    build here is None and not checked, and draft layers are found by their names.
    """
    try:
        module = skeleton(src, src.dtype_of_model)
    except CheckpointError as error:
        # Nobody knows whether the model needs what is absent.
        if src.absent or isinstance(error, ContradictoryConfigError):
            raise
        return Outside.of(src, drafts_by_name(src)), None
    outline = Outline(src, module, as_matrices=False)
    swap(outline)
    return outline.outside, outline
