"""Match a source with its model, plan its output, and find the first error that needs no
computation.

`plan` and `quantize` both call this, so that they refuse the same, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quantkit.calibration.budget import (
    LEAST_LENGTH,
    RATE,
    affordable_tokens,
    solving_work,
    split_documents,
)
from quantkit.calibration.loop import check_sequences, units_of, written_order
from quantkit.calibration.probe import BEGINS, is_worth_a_probe, probe as probe_run
from quantkit.checkpoint.origin import resolve
from quantkit.checkpoint.reader import CONFIG, Checkpoint
from quantkit.checkpoint.report import heading
from quantkit.checkpoint.writer import require_same
from quantkit.core.formats import dtype_name
from quantkit.core.memory_limits import uncollected
from quantkit.core.quantized_tensor import Goal, Scheme, label
from quantkit.core.ranks import ranks
from quantkit.core.units import counted, format_range
from quantkit.engines.joined import changes
from quantkit.engines.tables import TARGETS, UNTRIED
from quantkit.errors import (
    CheckpointError,
    Command,
    LayoutError,
    Option,
    QuantkitError,
    RecipeError,
    Setting,
    Words,
)
from quantkit.inference.load import NotTried, refusal_by_transformers
from quantkit.io.json_files import shown
from quantkit.io.staging import check_staging, is_complete
from quantkit.layouts import LAYOUTS
from quantkit.layouts.recast import GROUP_SIZES, fitting
from quantkit.layouts.schemes import is_head
from quantkit.models.block_runner import BlockRunner
from quantkit.models.meta_model import float32_states, generation_config_of
from quantkit.models.modules import input_embeddings
from quantkit.planning.needs import disk_peak
from quantkit.planning.output import schemes_of
from quantkit.planning.plan import Plan, find_gpu, plan_quantize, serving
from quantkit.planning.verdict import model_remarks
from quantkit.recipes.identity import date_of, difference, identity
from quantkit.recipes.options import AUTO, DENSE, Calib, RunOptions
from quantkit.recipes.recipe import (
    KEYED,
    Recipe,
    goals_of,
    require_effect,
    skip_pattern,
    without_paths,
)
from quantkit.text.sequences import Calibration, draw_calibration
from quantkit.text.tokenizer import (
    has_corrected_pattern,
    load_tokenizer,
    require_readable_tokenizer,
)

#: The layouts to take in this order where the usual one opens in no program. vLLM was asked to open
#: AWQ folders of the families that transformers does not open (docs/models.md).
OTHERS = ("awq", "gptq", "humming", *LAYOUTS)


#: Is told of a step that takes long.
Announce = Callable[[str], object]


class Job(NamedTuple):
    """A source, its model, the recipe fitted to it, the goal of each linear (None: left dense), the
    plan and, once drawn, the calibration text.
    """

    src: Checkpoint
    model: BlockRunner
    recipe: Recipe
    goals: dict[str, Goal | None]
    plan: Plan
    text: Calibration = Calibration([], {})

    def report(self) -> dict[str, Any]:
        """Collect the report's entries that are known before the work."""
        recipe, outside = without_paths(self.recipe), self.model.outside
        dense = (module for module, goal in self.goals.items() if goal is None)
        return {
            "recipe": recipe.to_mapping(),
            "recipe_sha256": recipe.sha256(),
            "device": self.model.device_name,
            "compute_dtype": dtype_name(self.model.dtype),
            "layout": self.plan.layout,
            "scheme": self.plan.scheme,
            "dense": [*dense, *outside.modules],
            **outside.counted(),
            "notices": list(self.plan.verdict.remarks),
            "layout_notices": list(self.plan.verdict.layout_remarks),
            "readers": list(self.plan.output.readers),
            "calibration": self.text.facts,
        }


def plan(
    model: str | Path,
    recipe: Recipe,
    run: RunOptions = RunOptions(),
    *,
    out: str | Path | None = None,
    gpu_memory: int | None = None,
    target: str | None = None,
    gpu: str | None = None,
    probe: bool = False,
    evaluated: int = 0,
    announce: Announce = lambda text: None,
) -> Plan:
    """Plan the output of `quantize` from config, headers and calibration text.

    If `quantize` would refuse the run, the plan has its error. The error is raised only if no plan
    can be made. Values of weights and hashes of files are not checked. `gpu_memory` are the bytes
    of a GPU that is not here. `target` and `gpu` name a program and a GPU; the plan then lists
    their kernels, or has the error that the program does not open the output. With `probe`, a part
    of a long run is measured to estimate its duration; the run also measures on `evaluated` tokens.
    """
    served_on = find_gpu(target, gpu)
    job = survey(dense_source(model, run, recipe), recipe, out, run, gpu_memory)
    made, folder = job.plan, job.plan.output.folder
    if target is not None and served_on is not None and folder is not None:
        found = serving(made.output.rows, folder, target, *served_on)
        limit = TARGETS[target].signed.get(made.layout) if job.recipe.signed else None
        told = [Words(f"{target}:", limit)] if limit else []
        made = replace(made, serving=found, verdict=made.verdict.with_remarks(*told))
        job = job._replace(plan=made)
    try:
        job = require_runnable(job, None if out is None else Path(out), run)
        if made.serving is not None and made.serving.refusal is not None:
            raise made.serving.refusal
    except QuantkitError as error:
        return replace(made, verdict=replace(made.verdict, refusal=error))
    made, facts, remarks = job.plan, job.text.facts, list(job.text.notices)
    if probe and gpu_memory is None:
        duration, why = estimate_duration(job, run, announce, evaluated)
        remarks += why
        if duration is not None:
            made = replace(made, needs=replace(made.needs, duration=duration))
    return replace(made, calibration=facts, verdict=made.verdict.with_remarks(*remarks))


def estimate_duration(
    job: Job, run: RunOptions, announce: Announce, evaluated: int = 0
) -> tuple[tuple[float, float] | None, list[str]]:
    """Estimate the least and the most seconds of a run by a probe, if it is long; else, or if the
    probe fails, None and the reason.

    `announce` is told before the probe. The run also measures on `evaluated` tokens.
    """
    sequences, device = job.text.sequences, job.model.device.type
    if not is_worth_a_probe(job.recipe, job.plan.output.weights, sequences, device):
        return None, []
    if job.recipe.calibrated:
        announce(BEGINS)
    try:
        found = probe_run(
            job.model,
            job.recipe,
            job.goals,
            sequences,
            progress=run.progress,
            evaluated=evaluated,
        )
    except QuantkitError as error:
        return None, [Words("the duration is not known, a probe of one block failed:", error.typed)]
    return found, []


def dense_source(model: str | Path, run: RunOptions, recipe: Recipe | None = None) -> Checkpoint:
    """Open a model that is not quantized, or whose weights are dequantized on reading."""
    folder = resolve(str(model), run.revision, run.trust_remote_code)
    src = Checkpoint(folder, run.trust_remote_code, dequantize=True)
    if recipe is not None and recipe.dense_dtype is not None:
        src.written_dtype = getattr(torch, recipe.dense_dtype)
    if src.layout is not None:
        src.require_quantized(src.layout.NAME, CONFIG)
        raise CheckpointError(
            f"is quantized already ({src.layout.NAME})",
            Words("for another layout use", Command("pack"), "or convert"),
            "give the unquantized model",
            subject=model,
        )
    return src


@uncollected()
def survey(
    src: Checkpoint,
    recipe: Recipe,
    out: str | Path | None,
    run: RunOptions,
    gpu_memory: int | None = None,
) -> Job:
    """Match a dense source with its model, and plan its output; raises if no plan can be made."""
    if gpu_memory is not None and run.device == "cpu":
        raise RecipeError(
            Words(
                Option("gpu_memory"), "is about a GPU, and", Option("device", "cpu"), "uses none"
            ),
            "drop one of them",
        )
    # The GPU of `gpu_memory` is not here, and a plan computes nothing on it.
    model = BlockRunner(src, device=run.device if gpu_memory is None else "cpu")
    model.require_complete()
    if src.written_dtype is not None:
        wide = float32_states(model.module, src.written_dtype)
        src.never_cast = {name for state, name in model.states.stored.items() if wide.search(state)}
    if recipe.layout is None and model.sliced:
        raise CheckpointError(
            f"{model.sliced[0]} holds all experts of a layer, and prune would write one tensor "
            "for each, which no reader of dense models takes"
            if recipe.only_prunes
            else f"{model.sliced[0]} holds all experts of a layer, "
            f"and no layout stores {label(recipe.scheme)}",
            Words("use", Command("quantize", Setting("prune", "2:4")))
            if recipe.only_prunes
            else "compare other schemes",
            subject=src.path,
        )
    job = job_of(src, model, recipe, out, run, gpu_memory)
    try:  # before transformers opens the output, in threads that would wait for memory forever
        job.plan.needs.memory.of_sequences(0, run.act_budget).require()
    except QuantkitError as error:
        return _with_verdict(job, refusal=error)
    refused = refusal(job)
    if refused is None or recipe.layout is None:
        return _with_verdict(job, refusal=refused)
    opened: list[Job] = []
    for pad in dict.fromkeys((recipe.pad, True)):  # only without another way
        plans = (replace(recipe, layout=name, pad=pad) for name in OTHERS if name != recipe.layout)
        others = (job_of(src, model, each, out, run, gpu_memory) for each in plans)
        opened = opened or [other for other in others if refusal(other) is None]
    opened.sort(key=lambda other: not _asked(other))  # equal ones stay in order
    padded = bool(opened) and opened[0].recipe.pad and not recipe.pad
    microscaled = isinstance(recipe.scheme, Scheme) and recipe.scheme.format.is_microscaled
    if not opened or recipe.layout_stated or padded:
        if opened and not isinstance(refused, LayoutError):  # else its ways out are known to help
            more = [Setting("pad", True)] if padded else []
            refused.ways_out = (Words("use", Setting("layout", opened[0].plan.layout), *more),)
        elif not opened and isinstance(refused, CheckpointError) and microscaled:
            refused.ways_out = (Words("use", Setting("format", "int4")),)
        return _with_verdict(job, refusal=refused)
    taken = opened[0]
    reader = [*_asked(taken), *taken.plan.output.readers][0]
    misfits = job.plan.verdict.misfits
    now, usual = Setting("layout", taken.plan.layout), Setting("layout", recipe.layout)
    rule = f"{misfits[0].module}: {misfits[0].rule}" if misfits else refused.rule
    why = Words(now, f"is taken, which {reader} opens, and not", usual, ":", rule)
    here = taken.plan.verdict
    way = f": {Words('use', usual)}"
    limits = (line.replace(way, "") if way in line else line for line in here.layout_remarks)
    return _with_verdict(taken, layout_remarks=tuple(limits), remarks=(why, *here.remarks))


def refusal(job: Job) -> QuantkitError | None:
    """Find why the output of a job would open in no program: weights that its layout does not hold,
    or weights that transformers would fill by itself.
    """
    output, stated = job.plan.output, job.plan.output.config.get("quantization_config")
    try:
        job.plan.verdict.require()
        if output.schemes is not None:
            with suppress(NotTried):
                refusal_by_transformers(job.model, job.src, stated, dict(output.forms))
    except QuantkitError as error:
        return error
    return None


def _asked(job: Job) -> list[str]:
    """Name the programs besides quantkit that open the output of a job, and were asked to."""
    *others, _ours = job.plan.output.readers
    return [reader for reader in others if not reader.endswith(UNTRIED)]


def _with_verdict(job: Job, **changes: Any) -> Job:
    return job._replace(plan=replace(job.plan, verdict=replace(job.plan.verdict, **changes)))


def job_of(
    src: Checkpoint,
    model: BlockRunner,
    recipe: Recipe,
    out: str | Path | None,
    run: RunOptions,
    gpu_memory: int | None = None,
) -> Job:
    """Plan the output of a source whose model is known already."""
    for path in filter(is_head, model.tied if recipe.head != DENSE else ()):
        raise RecipeError(
            Words(
                Setting("head", recipe.head), f"asks for {path}, which has the embeddings' weight"
            ),
            Words("drop it, and pack both with", Setting("embeddings", recipe.head)),
            subject=src.path,
        )
    recipe, sized = with_group_size(recipe, model.linears, model.paths, model.kept_dense)
    goals = goals_of(recipe, model.paths, model.kept_dense, model.tables)
    tables = [name for name in model.tables if name in goals]
    on_cpu = model.device.type == "cpu" and gpu_memory is None
    recipe, drawn = with_affordable_text(
        recipe, [shape for name, shape in model.linears.items() if goals[name] is not None], on_cpu
    )
    names = {name for pair in (*model.paths.items(), *model.tables.items()) for name in pair}
    unused = require_effect(recipe, sorted(names), model.kept_dense)
    made = plan_quantize(
        src,
        model.linears | {name: model.sizes[name] for name in tables},
        recipe,
        goals=goals,
        tied=model.tied,
        inside={name for block in range(len(model.blocks)) for name in model.stored(block)},
        out=None if out is None else Path(out),
        device=model.device.type if gpu_memory is None else "cuda",
        act_budget=run.act_budget,
        gpu_memory=gpu_memory,
    )
    auto = [Setting(key, AUTO) for key in KEYED if getattr(recipe, key) == AUTO]
    idle = [Words(*auto, "chooses for a target size alone: they stay dense")] if auto else []
    more = [*model_remarks(recipe, model, goals), *unused, *idle]
    if recipe.fused_alike:
        apart = replace(recipe, fused_alike=False)
        more += changes(goals_of(apart, model.paths, model.kept_dense, model.tables), goals)
    verdict = made.verdict
    verdict = replace(
        verdict,
        layout_remarks=(*sized, *verdict.layout_remarks),
        remarks=(*drawn, *verdict.remarks, *more),
    )
    made = replace(made, verdict=verdict)
    if not made.verdict.misfits:  # else a config cannot be made
        dense = [*model.outside.dense_entries(src), *model.dense_embeddings(tables)]
        schemes = schemes_of(recipe, goals, model.paths | model.tables, dense)
        by_block = map(model.stored, written_order(model, goals))
        units = by_block if recipe.calibrated else units_of(src, src.names())
        output = made.output.with_files(src, schemes, recipe, units, made.notices)
        made = replace(made, output=output)
    return Job(src, model, recipe, goals, made)


def with_group_size(
    recipe: Recipe,
    linears: Mapping[str, tuple[int, int]],
    paths: Mapping[str, str],
    kept_dense: Mapping[str, str],
) -> tuple[Recipe, list[str]]:
    """Return the recipe with the widest of 128, 64 and 32 that fits every linear, and a notice if
    it is not the usual.

    A linear that none of them fits gets one scale a row by an override. A stated group size stays
    unchanged. `linears` are name -> `(n, k)`; `paths` and `kept_dense` as in the model.
    """
    layout, scheme = recipe.output_layout, recipe.scheme
    if (
        recipe.size_stated
        or layout is None
        or not isinstance(scheme, Scheme)
        or scheme.group_size is None
        or scheme.format.is_microscaled
    ):
        return recipe, []
    goals = goals_of(recipe, paths, kept_dense)
    mine = {module: shape for module, shape in linears.items() if goals.get(module) == scheme}
    sizes = {
        module: [
            size
            for size in (*GROUP_SIZES, None)
            if fitting(layout, replace(scheme, group_size=size), *shape, pad=recipe.pad)
        ]
        for module, shape in mine.items()
    }
    grouped = [found for found in sizes.values() if any(found)]
    size = next(
        (each for each in GROUP_SIZES if all(each in found for found in grouped)), scheme.group_size
    )
    by_row = [module for module, found in sizes.items() if found == [None]]
    now = replace(recipe, size_stated=True, scheme=replace(scheme, group_size=size))
    notices: list[str] = []
    if size != scheme.group_size:
        first = next(
            module
            for module, found in sizes.items()
            if any(found) and scheme.group_size not in found
        )
        notices.append(
            Words(
                Setting("group_size", size),
                "is the widest of 128, 64 and 32 that fits:",
                f"{scheme.group_size} does not divide the {mine[first][1]} inputs of {first}",
            )
        )
    if by_row:
        rows = replace(scheme, group_size=None)
        now = replace(now, overrides=((skip_pattern(by_row, goals), rows), *now.overrides))
        notices.append(
            f"one scale a row for {counted(len(by_row), 'linear')}: neither 128 nor 64 nor 32 "
            f"divides the {mine[by_row[0]][1]} inputs of {by_row[0]}"
        )
    return now, notices


def with_affordable_text(
    recipe: Recipe, shapes: Sequence[tuple[int, int]], on_cpu: bool
) -> tuple[Recipe, list[str]]:
    """Return the recipe with the text that a machine without a GPU calibrates on in about ten
    minutes, and a notice, unless the recipe states the number of samples.

    `shapes` are those `(n, k)` of all linears with a goal.
    """
    calib, free = recipe.calibration, recipe.unstated
    recipe = replace(recipe, unstated=frozenset())
    if not (on_cpu and recipe.calibrated and "samples" in free):
        return recipe, []
    tokens = calib.tokens or affordable_tokens(shapes)
    if tokens >= calib.samples * calib.max_length:
        return recipe, []
    length = min(calib.max_length, max(LEAST_LENGTH, tokens // calib.samples))
    length = length if "max_length" in free else calib.max_length
    limited = replace(calib, tokens=tokens, max_length=length)
    if calib.tokens is not None:
        return replace(recipe, calibration=limited), []
    each = sum(n * k for n, k in shapes) / RATE["cpu"]
    whole, more = solving_work(shapes) / RATE["cpu"] + each * tokens, each * tokens
    notice = Words(
        f"without a GPU at most {tokens} tokens calibrate, on two cores in "
        f"{format_range(whole, whole)}; twice as many lose less and take "
        f"{format_range(more, more)} more:",
        Setting("calib_tokens", 2 * tokens),
    )
    return replace(recipe, calibration=limited), [notice]


def require_runnable(
    job: Job,
    out: Path | None,
    run: RunOptions,
    text: Calibration | None = None,
    more: int = 0,
    date: str | None = None,
) -> Job:
    """Raise the first error that needs no computation; return the job with the calibration text.

    It writes nothing. Without `text` it is drawn, with up to `more` sequences that do not
    calibrate. Chat templates write `date`, or that of the resumed run, or the present date.
    """
    recipe, made, count = job.recipe, job.plan, ranks().count
    made.verdict.require()
    run.progress.note(*made.notices)
    if not any(job.goals.values()):
        what = "prune" if recipe.only_prunes else "quantize"
        kept = {name: why for name, why in job.model.kept_dense.items() if name in job.goals}
        if len(kept) + 1 >= len(job.goals) and kept:  # all but a head
            first, why = next(iter(kept.items()))
            raise RecipeError(
                f"nothing to {what}: every linear stays dense, {first} for {why}",
                "take a larger model of this family",
                subject=job.src.path,
            )
        raise RecipeError(
            "every linear is skipped", Words(f"nothing to {what}, loosen", Setting("skip"))
        )
    made.require_share(run.min_share)
    if recipe.calibrated:
        job.model.require_runnable()
    if count > 1 and not recipe.calibrated:
        raise RecipeError(
            f"{count} processes were started, and this recipe uses no activations",
            "start one, without torchrun or accelerate launch",
        )
    # This comes before anything that takes memory, and before a text is downloaded.
    made.needs.memory.of_sequences(0, run.act_budget).require()
    if job.src.home == job.src.path:  # a GGUF file has none of these files
        lines = [*_unknown_tokens(job)]
        made = replace(made, verdict=made.verdict.with_remarks(*lines))
        run.progress.note(*lines)
    if made.verdict.refusal is not None:
        raise made.verdict.refusal
    before = (
        None
        if out is None
        else check_staging(out, resume=run.resume, overwrite=run.overwrite, source=job.src.home)
    )
    resumed = before if run.resume else None
    if resumed is not None and is_complete(resumed):
        return job  # only the last step is left
    if text is None and (recipe.calibrated or more):
        date = date or (None if resumed is None else date_of(resumed))
        text = calibration_text(job, recipe.calibration, run, more, date)
    job = job._replace(text=text or job.text)
    if recipe.calibrated:
        check_sequences(recipe, job.model, job.text.sequences)
    lengths = [len(sequence) for sequence in job.text.every]
    calibrating = lengths[: len(job.text.sequences)]
    parts = split_documents(calibrating, count, len(lengths) - len(calibrating))
    of_rank = max(sum(lengths[part.start : part.stop]) for part in parts)
    memory = made.needs.memory.of_sequences(of_rank, run.act_budget).of_processes(ranks().local)
    memory.require()
    needs = replace(made.needs, memory=memory.of_text(job.text.characters))
    if resumed is not None:
        known = identity({**heading("", "", None, {}), **job.report()})
        known.pop("source")
        require_same(resumed, known, difference)
    if out is not None and made.output.files is not None:
        blocks, files = len(job.model.blocks), made.output.files
        disk = disk_peak(files, memory, recipe, lengths, blocks, run.act_budget)
        needs = replace(needs, disk=disk)
        there = 0 if before is None else sum(path.stat().st_size for path in before.iterdir())
        if (problem := needs.disk_problem(out, there)) is not None:
            raise CheckpointError(problem)
    return job._replace(plan=replace(made, needs=needs))


def _unknown_tokens(job: Job) -> Iterator[str]:
    """Note a source whose tokenizer is missing, cannot be read here or splits text by a pattern
    that was corrected, and tokens for which the model has no embedding: files beside tokenizer.json
    add tokens too.
    """
    require_readable_tokenizer(job.src.path)
    tokens: dict[str, int] = {}
    try:
        tokenizer = load_tokenizer(job.src.path, job.src.trusted)
        tokens = tokenizer.get_vocab()
        if has_corrected_pattern(tokenizer, job.src.path):
            yield (
                "the tokenizer splits text by a pattern that Mistral has corrected: put "
                '"fix_mistral_regex": true into its tokenizer_config.json'
            )
    except CheckpointError as error:
        if job.recipe.calibrated:
            raise
        error.subject = "the source"
        yield error.typed
    table = input_embeddings(job.model.text)
    rows = inf if table is None else len(table.get_parameter("weight"))
    beyond = sorted((at, token) for token, at in tokens.items() if at >= rows)
    for _, token in beyond[:1]:
        yield (
            f"the tokenizer has tokens that the model's {rows} embeddings lack, the first is "
            f"{shown(token)} ({len(beyond)} in all): a text with one stops an engine"
        )
    ends = generation_config_of(job.src).eos_token_id
    for end in ends if isinstance(ends, list) else [ends]:
        if end is not None and not 0 <= end < rows:
            yield f"eos_token_id {end} is none of {rows} embeddings: it ends no text"


def calibration_text(
    job: Job,
    calib: Calib,
    run: RunOptions,
    more: int = 0,
    date: str | None = None,
) -> Calibration:
    """Draw the calibration sequences for a model by the tokenizer of its source, with notes for the
    user.
    """
    text = draw_calibration(
        calib.data,
        load_tokenizer(job.src.path, job.src.trusted),
        samples=calib.samples,
        max_length=min(calib.max_length, job.model.max_length),
        seed=calib.seed,
        lengths=calib.lengths,
        text_column=calib.text_column,
        split=calib.split,
        template_args=calib.template_args,
        skip_bad_records=calib.skip_bad_records,
        more=more,
        date=date,
        most_tokens=calib.tokens or inf,
    )
    run.progress.note(*text.notices)
    return text
