"""The whole job: plan, one of two loops, one writer.

`streamed` needs no activations and walks the shards, one tensor in memory; `calibrated` (in
`calibration.loop`) walks the blocks. Both yield items; `publish.write` packs and stores them,
commits to the journal and collects the report.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import reduce
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from quantkit.calibration.budget import BESIDE, gradient_documents, split_documents
from quantkit.calibration.loop import calibrated
from quantkit.calibration.preflight import check_sequences, new_run
from quantkit.calibration.probe import Duration, is_worth_a_probe, probe as probe_run
from quantkit.calibration.self_generated import Text, draw_text, expected_text, load_text, save_text
from quantkit.calibration.uncalibrated import solve_uncalibrated
from quantkit.checkpoint.origin import name_of, origin, resolve
from quantkit.checkpoint.provenance import source_hashes
from quantkit.checkpoint.reader import CONFIG, Checkpoint
from quantkit.checkpoint.report import heading
from quantkit.checkpoint.writer import CheckpointWriter, Commit, Item, require_same
from quantkit.core.ranks import Ranks, ranks
from quantkit.core.scheme import Scheme
from quantkit.core.tensors import dtype_name
from quantkit.core.threads import WorkQueue
from quantkit.engines.tables import TARGETS
from quantkit.errors import (
    CheckpointError,
    Command,
    Option,
    QuantkitError,
    RecipeError,
    Setting,
    Words,
)
from quantkit.io.staging import WRITTEN, check_staging, is_complete, staging
from quantkit.keys import keys_of
from quantkit.layouts.schemes import Schemes
from quantkit.models.block_runner import BlockRunner
from quantkit.models.devices import device_of
from quantkit.models.state_names import kept_in_float32, require_tied
from quantkit.pipeline.publish import Measure, finish, publish_complete, write
from quantkit.planning.group_sizes import with_group_size
from quantkit.planning.memory import GRADIENTS
from quantkit.planning.output_files import disk_peak, output_files, planned_config, report_bytes
from quantkit.planning.plan import Plan, disk_problem, plan_quantize
from quantkit.planning.serving import find_gpu, serving
from quantkit.planning.verdict import require_right_weights
from quantkit.progress import Clock, Progress, Recorder
from quantkit.recipes.calibration_options import Calib
from quantkit.recipes.goals import Goal, changes, label
from quantkit.recipes.identity import difference, identity
from quantkit.recipes.patterns import require_effect
from quantkit.recipes.recipe import Recipe, goals_of, without_paths
from quantkit.recipes.run_options import RunKeywords, RunOptions
from quantkit.text.sequences import Calibration, draw_calibration
from quantkit.text.tokenizer import load_tokenizer

#: Streamed work is committed to the journal in steps of about this many source bytes.
COMMIT_BYTES = 2 * 2**30
#: Files of the source that are hashed at a time: one on a CPU, where the same cores compute.
READERS = {"cpu": 1, "cuda": 8}


class _Led(NamedTuple):
    """Hold the values that the first rank of a calibrated run sends to the others."""

    recipe: Recipe
    sequences: Sequence[Tensor]
    partial: Path
    done: Sequence[Mapping[str, Any]]


class Job(NamedTuple):
    """Hold a source, its model, the recipe as it fits them, the goal of each linear (None: left
    dense), the plan.
    """

    src: Checkpoint
    model: BlockRunner
    recipe: Recipe
    chosen: dict[str, Goal | None]
    plan: Plan


def plan(
    model: str | Path,
    recipe: Recipe,
    *,
    out: str | Path | None = None,
    gpu_memory: int | None = None,
    target: str | None = None,
    gpu: str | None = None,
    probe: bool = False,
    **options: Unpack[RunKeywords],
) -> Plan:
    """Plan the output of `quantize` from config, headers and calibration text.

    If `quantize` would refuse the run, the plan has its error. The error is raised only if no plan
    can be made. Values of weights and hashes of files are not checked. `gpu_memory` are the bytes
    of a GPU that is not here. `target` and `gpu` name a program and a GPU; the plan then lists
    their kernels. With `probe`, a part of a long run is measured to estimate its duration.
    """
    run = RunOptions(**options)
    served_on = find_gpu(target, gpu)
    job = survey(dense_source(model, run, recipe), recipe, out, run, gpu_memory)
    if target is not None and served_on is not None and job.plan.folder is not None:
        found = serving(job.plan.rows, job.plan.folder, target, *served_on)
        limit = TARGETS[target].signed.get(job.plan.layout) if job.recipe.signed else None
        remarks = (*job.plan.remarks, *([Words(f"{target}:", limit)] if limit else []))
        job = job._replace(plan=replace(job.plan, serving=found, remarks=remarks))
    try:
        job, text = require_runnable(job, None if out is None else Path(out), run, is_plan=True)
    except QuantkitError as error:
        return replace(job.plan, refusal=error)
    facts, bounded = text.facts, []
    if job.recipe.calibrated and job.recipe.calibration.is_written:
        bounded = [
            "the model writes its calibration text in the run: its tokens are counted as if all "
            "were the longest, and "
            "no duration is known"
        ]
        facts = {key: value for key, value in facts.items() if key not in ("sha256", "sources")}
    measured = probe and gpu_memory is None and not bounded
    duration, why = _duration(job, text, run) if measured else (None, [])
    return replace(
        job.plan,
        calibration=facts,
        remarks=(*job.plan.remarks, *text.notices, *bounded, *why),
        duration=None if duration is None else (duration.low, duration.high),
    )


def _duration(job: Job, text: Calibration, run: RunOptions) -> tuple[Duration | None, list[str]]:
    """Estimate the duration of a run by a probe, if it is long; else, or if the probe fails, None
    and the reason.
    """
    weights = sum(prod(row.shape) for row in job.plan.quantized)
    if job.recipe.calibrated and not text.sequences:  # only the last step is left
        return None, []
    if not is_worth_a_probe(job.recipe, weights, text.sequences, job.model.device.type):
        return None, []
    try:
        found = probe_run(
            job.model,
            job.recipe,
            job.chosen,
            text.sequences,
            progress=run.progress or Progress(quiet=True),
        )
    except QuantkitError as error:
        return None, [Words("the duration is not known, a probe of one block failed:", error.typed)]
    return found, []


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
    device = run.device if gpu_memory is None else "cpu"
    skeleton = BlockRunner(src, device=device, trust_remote_code=run.trust_remote_code)
    skeleton.require_complete()
    if src.written_dtype is not None:
        src.never_cast = kept_in_float32(skeleton.module, skeleton.states.stored, src.written_dtype)
    if recipe.layout is None and skeleton.sliced:
        way = Words("use", Command("quantize", Setting("prune", "2:4")))
        raise CheckpointError(
            f"{skeleton.sliced[0]} holds all experts of a layer, and prune would write one tensor "
            "for each, "
            "which no reader of dense models takes"
            if recipe.only_prunes
            else f"{skeleton.sliced[0]} holds all experts of a layer, "
            f"and no layout stores {label(recipe.scheme)}",
            way if recipe.only_prunes else "compare other schemes",
            subject=src.path,
        )
    return job_of(src, skeleton, recipe, out, run, gpu_memory)


def job_of(
    src: Checkpoint,
    skeleton: BlockRunner,
    recipe: Recipe,
    out: str | Path | None,
    run: RunOptions,
    gpu_memory: int | None = None,
) -> Job:
    """Plan the output of a source whose model is known already."""
    recipe, sized = with_group_size(
        recipe, skeleton.linears, lambda each: goals_of(each, skeleton.paths, skeleton.kept_dense)
    )
    chosen = goals_of(recipe, skeleton.paths, skeleton.kept_dense)
    names = {name for linear, path in skeleton.paths.items() for name in (linear, path)}
    unused = require_effect(recipe, sorted(names), skeleton.kept_dense)
    planned = plan_quantize(
        src,
        skeleton.linears,
        recipe,
        goals=chosen,
        tied=skeleton.tied,
        inside={name for block in range(len(skeleton.blocks)) for name in skeleton.stored(block)},
        out=None if out is None else Path(out),
        device=skeleton.device.type if gpu_memory is None else "cuda",
        act_budget=run.act_budget,
        gpu_memory=gpu_memory,
    )
    planned = replace(
        planned, remarks=(*sized, *planned.remarks, *_remarks(recipe, skeleton, chosen), *unused)
    )
    if recipe.fused_alike:
        asked = goals_of(replace(recipe, fused_alike=False), skeleton.paths, skeleton.kept_dense)
        planned = replace(planned, remarks=(*planned.remarks, *changes(asked, chosen)))
    job = Job(src, skeleton, recipe, chosen, planned)
    return job if planned.misfits else job._replace(plan=_with_files(job))


def _with_files(job: Job) -> Plan:
    """Return the plan with the files of the output. A config can be made only if the layout holds
    all weights.
    """
    recipe = job.recipe
    output = output_files(
        job.src, job.plan, recipe.output_layout, _schemes(job), recipe, _units(job)
    )
    planned = replace(
        job.plan, files=output.files, before_last=output.before_last, joined=output.joined
    )
    return replace(planned, report_bytes=report_bytes(job.src, planned))


def _units(job: Job) -> Iterator[list[str]]:
    """Yield the tensors of the source in the units that the run commits."""
    if not job.recipe.calibrated:
        yield from _streamed_units(job.src, job.src.names())
        return
    for block in range(len(job.model.blocks)):
        yield job.model.stored(block)
    yield job.model.stored(None)


def require_runnable(
    job: Job,
    out: Path | None,
    run: RunOptions,
    is_plan: bool = False,
    text: Calibration | None = None,
    more: int = 0,
) -> tuple[Job, Calibration]:
    """Raise the first error that needs no computation; return the job and the calibration
    sequences.

    `plan` and `quantize` both call this, so that they refuse the same. It writes nothing. Text that
    the model writes itself is only bounded in a plan. Without `text` it is drawn, with up to `more`
    sequences that do not calibrate.
    """
    recipe = job.recipe
    job.plan.require()
    if run.progress is not None:
        run.progress.note(*job.plan.notices)
    if not any(job.chosen.values()):
        what = "prune" if recipe.only_prunes else "quantize"
        raise RecipeError(
            "every linear is skipped", Words(f"nothing to {what}, loosen", Setting("skip"))
        )
    job.plan.require_share(run.min_share)
    if recipe.calibrated:
        job.model.require_runnable()
    count = ranks().count
    if count > 1 and not recipe.calibrated:
        raise RecipeError(
            f"{count} processes were started, and this recipe uses no activations",
            "start one, without torchrun or accelerate launch",
        )
    # This comes before anything that takes memory, and before a text is downloaded.
    job.plan.memory.of_sequences(0, run.act_budget).require()
    layout = recipe.output_layout
    if layout is not None:
        config = planned_config(job.src, job.plan, layout, _schemes(job), recipe)[
            "quantization_config"
        ]
        require_right_weights(job.model, layout, config, job.plan, run.trust_remote_code)
    before = None
    if out is not None:
        before = check_staging(out, resume=run.resume, overwrite=run.overwrite, source=job.src.home)
    if before is not None and run.resume and is_complete(before):
        return job, Calibration([], {})  # only the last step is left
    if text is None and (recipe.calibrated or more):
        saved = before / WRITTEN if before is not None and run.resume else None
        text = calibration_text(
            recipe.calibration,
            job.src,
            job.model,
            run.progress,
            run.trust_remote_code,
            saved,
            is_plan,
            more,
        )
    text = text or Calibration([], {})
    if recipe.calibrated:
        check_sequences(recipe, job.model, text.sequences)
    lengths = [len(sequence) for sequence in text.sequences]
    tokens = sum(lengths)
    of_rank = max(sum(lengths[part.start : part.stop]) for part in split_documents(lengths, count))
    memory = job.plan.memory.of_sequences(of_rank, run.act_budget).of_processes(ranks().local)
    memory.require()
    job = job._replace(plan=replace(job.plan, memory=memory))
    if before is not None and run.resume:
        require_same(before, _known_identity(job, text.facts), difference)
    if out is not None:
        activations = job.plan.memory.token_bytes * tokens
        of_gradients = lengths[: gradient_documents(lengths)] if recipe.output_aware else []
        gradients = job.plan.memory.token_bytes * sum(of_gradients)
        stores = (activations, activations if recipe.tune else 0, gradients)
        mapped = sum(
            size for size in stores if run.act_budget is not None and size > count * run.act_budget
        )
        there = sum(path.stat().st_size for path in before.iterdir()) if before is not None else 0
        sums = count * job.plan.memory.sum_bytes if of_gradients else 0
        parts = disk_peak(job.plan, activations, len(job.model.blocks), mapped, gradients, sums)
        largest = max(parts, key=lambda part: parts[part])
        most = sum(parts.values()) - there
        problem = disk_problem(job.plan, out, most, parts[GRADIENTS] if largest == GRADIENTS else 0)
        if problem is not None:
            raise CheckpointError(problem)
    return job, text


def quantize(
    model: str | Path,
    out: str | Path,
    recipe: Recipe,
    measure: Measure | None = None,
    text: Calibration | None = None,
    **options: Unpack[RunKeywords],
) -> dict[str, Any]:
    """Quantize or prune (ALGORITHMS 9) a causal LM (folder or hub id) into a new folder `out`;
    return its report.

    QuantkitError is raised for anything that cannot be done. An interrupted run leaves
    `out.partial-*`, which `resume` continues. `measure` evaluates the finished folder before it is
    published. `text` is the recipe's, if it is drawn. If the caller has joined a process group, its
    ranks share a calibrated run. All of them call this alike, and the first one reads, writes and
    prints. All return the same report or raise the same error.
    """
    run, here = RunOptions(**options), ranks()
    progress = run.progress or Progress(quiet=True)
    progress = progress if here.first else Recorder(progress)
    run = replace(run, progress=progress, device=here.device_name(run.device))
    with here.together(progress), _on(run.device, here):
        if not here.first:
            _assist(model, run, here)
            return here.broadcast(None)
        return here.broadcast(_quantize(model, Path(out), recipe, measure, text, run))


def _on(device: str, here: Ranks) -> AbstractContextManager[object]:
    """Return a context that makes the rank's GPU torch's current one, so that no rank allocates on
    another's.
    """
    if here.count == 1 or device_of(device).type == "cpu":
        return nullcontext()
    return torch.cuda.device(device)


def _assist(model: str | Path, run: RunOptions, here: Ranks) -> None:
    """Compute this rank's part of a run that the first rank leads."""
    assert run.progress is not None
    src = dense_source(model, run)
    runner = BlockRunner(src, device=run.device, trust_remote_code=run.trust_remote_code)
    require_devices(runner.device, here)
    led: _Led | None = here.broadcast(None)
    if led is not None:
        begun = new_run(
            src,
            led.recipe,
            runner,
            led.sequences,
            led.partial,
            progress=run.progress,
            act_budget=run.act_budget,
            ranks=here,
        )
        for _ in calibrated(begun, led.done):
            pass  # the first rank stores it


def require_devices(device: torch.device, here: Ranks) -> None:
    """Let each rank have its own GPU; RecipeError if two share one."""
    if here.count == 1:
        return
    here.device = device
    used: dict[tuple[str, str], int] = {}
    for rank, (machine, kind, name) in enumerate(
        here.exchange((platform.node(), device.type, str(device)))
    ):
        first = used.setdefault((machine, name), rank)
        if kind == "cuda" and first != rank:
            raise RecipeError(
                f"ranks {first} and {rank} would share {name}",
                Words("use", Option("device", "cuda"), ", and a GPU for each"),
            )


def _quantize(
    model: str | Path,
    out: Path,
    recipe: Recipe,
    measure: Measure | None,
    text: Calibration | None,
    run: RunOptions,
) -> dict[str, Any]:
    clock, here, progress = (
        Clock(torch.device("cpu")),
        ranks(),
        run.progress or Progress(quiet=True),
    )
    command = "prune" if recipe.only_prunes else "quantize"
    with clock.phase("prepare"):
        job = survey(dense_source(model, run, recipe), recipe, out, run)
        asked = job.recipe
        layout = f", in the layout {asked.layout}" if asked.layout else ""
        progress.note(f"{label(asked.scheme)} by {asked.method}{layout}")
        job, text = require_runnable(job, out, run, text=text)
        recipe = job.recipe
        require_tied(job.model.module, job.src, job.model.states.stored)
        require_devices(job.model.device, here)
    # On a GPU the first block soon says how much is left, and a probe would take a tenth of the
    # run.
    if not progress.quiet and not run.resume and here.count == 1 and job.model.device.type == "cpu":
        with clock.phase("probe"):
            duration, why = _duration(job, text, run)
        progress.note(*([f"{duration}, by a probe of one block"] if duration else why))
    src = job.src
    # The commit of a snapshot in the hub's cache is more precise than a branch.
    revision = src.path.name if src.path.parent.name == "snapshots" else run.revision
    base, unread = origin(src, model, revision)
    # of the source's card, what the file system cannot do, and files edited since they were
    # recorded
    lacking = unread
    with staging(
        out, resume=run.resume, overwrite=run.overwrite, source=src.home, notice=lacking.append
    ) as partial:
        if is_complete(partial):
            here.broadcast(None)
            return publish_complete(partial, out, without_paths(asked), src, run.overwrite)
        if recipe.calibrated and recipe.calibration.is_written:
            save_text(partial / WRITTEN, text)
        writer = CheckpointWriter(partial, like=src, layout=recipe.output_layout)
        report = {
            **heading(command, name_of(model), revision, {}, base),
            **_known(job),
            "calibration": text.facts,
        }
        if src.low_bit is not None:
            report["source"]["weights"] = f"{src.low_bit}, dequantized"
        report["notices"] += [*text.notices, *lacking]
        progress.note(*lacking)
        # A NaN in the last block would cost the whole run.
        finite = recipe.calibrated and not writer.done
        kind = job.model.device.type if recipe.calibrated else "cpu"

        def begin() -> None:
            hashes, edited = source_hashes(src, READERS[kind], finite, progress.check)
            report["source"]["files"] = hashes
            report["notices"] += edited
            progress.note(*edited)
            writer.identify(identity(report), difference)

        # A run that is resumed must first know that it is the same run.
        beside = BESIDE[kind]
        hashes_beside = finite and beside
        if not hashes_beside:
            with progress.loop(), clock.phase("hash"):
                begin()
        if run.resume and not writer.done:
            progress.note("there is nothing to resume: the run begins at its start")
        items: Iterable[Item | Commit]
        if recipe.calibrated:
            here.broadcast(_Led(recipe, text.sequences, partial, writer.done))
            begun = new_run(
                src,
                recipe,
                job.model,
                text.sequences,
                partial,
                progress=progress,
                act_budget=run.act_budget,
                beside=beside,
                ranks=here,
            )
            items = calibrated(begun, writer.done)
        else:
            items = clock.around(
                "solve", streamed(src, recipe, job.chosen, writer.items_done(), progress)
            )
        queue = WorkQueue(job.model.device, beside)
        # A signal that raised while this thread waits for the other could leave a lock taken.
        with progress.loop() if queue.beside else nullcontext():
            report["layers"] = write(
                items, writer, report, clock, queue, begin if hashes_beside else None
            )
        report |= _ranks_of(writer.done)
        kept = None if recipe.layout is None else without_paths(recipe)
        rest = clock, run.overwrite, kept, run.trust_remote_code, measure
        return finish(writer, out, _schemes(job), report, job.plan.share, *rest)


def _ranks_of(done: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the report's `ranks` of a run that used several: their number, or a list if it changed
    on the way.
    """
    counts = [line["facts"]["ranks"] for line in done if "ranks" in line.get("facts", {})]
    found = [count for count, _ in groupby(counts)]
    return {} if found in ([], [1]) else {"ranks": found[0] if len(found) == 1 else found}


def streamed(
    src: Checkpoint,
    recipe: Recipe,
    chosen: Mapping[str, Goal | None],
    done: set[str],
    progress: Progress,
) -> Iterator[Item | Commit]:
    """Yield every tensor of a dense checkpoint once, its linears rounded or pruned; one weight in
    memory at a time.
    """
    names = [name for name in src.names() if name not in done]
    last = {unit[-1] for unit in _streamed_units(src, names)}
    for name in progress.bar(names, "prune" if recipe.only_prunes else "quantize", len(names)):
        module = name.removesuffix(".weight")
        scheme = chosen.get(module) if module != name else None
        # The weight has no name here, so that its memory is free when the next one is read.
        yield (
            Item(name, src.get(name))
            if scheme is None
            else solve_uncalibrated(module, src.get(name), scheme, recipe)
        )
        if name in last:
            yield Commit({})


def _streamed_units(src: Checkpoint, names: Iterable[str]) -> Iterator[list[str]]:
    """Yield tensors in the units that streamed work commits."""
    unit: list[str] = []
    size = 0
    for name in names:
        unit.append(name)
        size += src.nbytes(name)
        if size >= COMMIT_BYTES:
            yield unit
            unit, size = [], 0
    if unit:
        yield unit


def dense_source(model: str | Path, run: RunOptions, recipe: Recipe | None = None) -> Checkpoint:
    src = Checkpoint(resolve(str(model), run.revision), run.trust_remote_code, dequantize=True)
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


def _remarks(recipe: Recipe, model: BlockRunner, chosen: Mapping[str, Goal | None]) -> list[str]:
    """List linears that stay dense by default, and recipe settings without effect on this model."""
    found = list(model.notices)
    wide = [name for name in model.src.names() if model.src.written(name) == torch.float32]
    if recipe.dense_dtype is not None and model.src.written_dtype != torch.float32 and wide:
        found.append(
            f"{len(wide)} tensors stay float32, because transformers keeps them so: first {wide[0]}"
        )
    wide = [name for name in model.src.names() if model.src.written(name).itemsize > 2]
    if (
        not isinstance(recipe.scheme, Scheme)
        or model.src.dtype_of_model.itemsize == 2
        or recipe.dense_dtype
    ):
        wide = []
    dense = sum(
        model.src.nbytes(name) for name in wide if chosen.get(name.removesuffix(".weight")) is None
    )
    if dense:
        found.append(
            Words(
                f"dense tensors stay {dtype_name(model.src.dtype_of_model)} like the source "
                f"({dense / 1e9:.3g} GB);",
                "for 16 bits use",
                Setting("dense_dtype", "bfloat16"),
            )
        )
    reasons: dict[str, list[str]] = {}
    for name, reason in model.kept_dense.items():
        if chosen[name] is None:
            reasons.setdefault(reason, []).append(name)
    found += [
        f"{names[0]}: left dense, {reason} ({len(names)} in all)"
        for reason, names in reasons.items()
    ]
    if not recipe.calibrated:
        keys = [
            key
            for key in keys_of(type(recipe))
            if key.path[0] in ("calibration", "gptq") and key.default
        ]
        idle = [
            key
            for key in keys
            if key.default is not ... and reduce(getattr, key.path, recipe) != key.default
        ]
        if idle:
            named = [part for key in idle for part in (",", Setting(key.keyword))][1:]
            found.append(Words("no text is read, and so nothing depends on", *named))
    if recipe.calibrated and model.text_path:
        found.append(
            f"calibrated through {model.text_path}, on text alone: {type(model.module).__name__} "
            "asks for other inputs"
        )
    if recipe.calibrated and recipe.calibration.max_length > model.max_length:
        asked = recipe.calibration.max_length
        found.append(
            Words(
                f"calibration sequences end at the model's {model.max_length} positions,",
                Setting("max_length"),
                f"is {asked}",
            )
        )
    return found


def _schemes(job: Job) -> Schemes | None:
    """State the checkpoint's schemes, with every exception under its exact name; None if weights
    stay dense.

    In a few families a linear has another name in the model than in the checkpoint. Public readers
    go by the model's.
    """
    usual = job.recipe.scheme
    if not isinstance(usual, Scheme) or job.recipe.layout is None:
        return None
    paths = job.model.paths
    named = [
        (name, scheme)
        for m, scheme in job.chosen.items()
        for name in dict.fromkeys((m, paths.get(m, m)))
    ]
    overrides = tuple(
        (re.escape(name), s) for name, s in named if isinstance(s, Scheme) and s != usual
    )
    dense = [*(name for name, s in named if s is None), *job.model.outside.dense_entries(job.src)]
    return Schemes(usual, overrides, ignore=tuple(dense))


def calibration_text(
    calib: Calib,
    src: Checkpoint,
    model: BlockRunner,
    progress: Progress | None,
    trust_remote_code: bool = False,
    saved: Path | None = None,
    is_plan: bool = False,
    more: int = 0,
) -> Calibration:
    """Draw the calibration sequences for a model by the tokenizer of `src`, with notes for the
    user.

    Without `progress` nothing is said: a plan lists it. Text of the model's own is read from
    `saved`, if that is there. Otherwise the model writes it, except for a plan.
    """

    def write(count: int) -> Text:
        if saved is not None and saved.exists():
            return load_text(saved)
        if is_plan:
            return expected_text(model, calib, count)
        return draw_text(model, calib, count, progress or Progress(quiet=True), trust_remote_code)

    text = draw_calibration(
        calib.data,
        load_tokenizer(src.path),
        samples=calib.samples,
        max_length=min(calib.max_length, model.max_length),
        seed=calib.seed,
        lengths=calib.lengths,
        text_column=calib.text_column,
        split=calib.split,
        template_args=calib.template_args,
        skip_bad_records=calib.skip_bad_records,
        write=write,
        more=more,
    )
    if progress is not None:
        progress.note(*text.notices)
    return text


def _known(job: Job) -> dict[str, Any]:
    """Collect the report's entries that are known before the work."""
    recipe = job.recipe
    return {
        "recipe": without_paths(recipe).to_mapping(),
        "recipe_sha256": without_paths(recipe).sha256(),
        "device": job.model.device_name,
        "compute_dtype": dtype_name(job.model.dtype),
        "layout": job.plan.layout,
        "scheme": job.plan.scheme,
        "dense": [
            *(module for module, goal in job.chosen.items() if goal is None),
            *job.model.outside.modules,
        ],
        **job.model.outside.counted(),
        "notices": list(job.plan.remarks),
        "layout_notices": list(job.plan.layout_remarks),
        "readers": list(job.plan.readers),
    }


def _known_identity(job: Job, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the part of a run's identity that needs no weights."""
    report = {**heading("", "", None, {}), **_known(job), "calibration": facts}
    return {key: value for key, value in identity(report).items() if key != "source"}
