"""The whole job: survey, one of two loops, one writer.

`streamed` needs no activations and walks the shards, some weights ahead; `calibrated` walks the
blocks. Both yield items; `publish.write` packs and stores them, commits to the journal and collects
the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.calibration.budget import BESIDE, READERS
from quantkit.calibration.loop import (
    calibrated,
    new_run,
    on_own_device,
    require_devices,
    streamed,
    written_order,
)
from quantkit.calibration.scales import ScaleTuning
from quantkit.calibration.stages.tune import tuned_facts
from quantkit.checkpoint.origin import SourceHashes, source_hashes
from quantkit.checkpoint.writer import CheckpointWriter, Item
from quantkit.core.ranks import Ranks, ranks
from quantkit.core.threads import WorkQueue
from quantkit.core.units import format_range
from quantkit.errors import CheckpointError, NumericError, reason
from quantkit.io.staging import is_complete, staging
from quantkit.models.block_runner import BlockRunner
from quantkit.pipeline.publish import (
    Measure,
    begin_report,
    copy_dense,
    finish,
    identify,
    publish_complete,
    record_source,
    write,
)
from quantkit.planning.survey import (
    Job,
    dense_source,
    estimate_duration,
    require_runnable,
    survey,
)
from quantkit.progress import Clock, Progress, Recorder
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import Recipe, without_paths
from quantkit.text.sequences import Calibration


def quantize(
    model: str | Path,
    out: str | Path,
    recipe: Recipe,
    run: RunOptions = RunOptions(),
    measure: Measure | None = None,
    text: Calibration | None = None,
    estimated: bool = True,
) -> dict[str, Any]:
    """Quantize or prune (ALGORITHMS 9) a causal LM (folder or hub id) into a new folder `out`;
    return its report.

    QuantkitError is raised for anything that cannot be done. An interrupted run leaves
    `out.partial-*`, which `resume` continues. `measure` evaluates the finished folder before it is
    published. `text` is the recipe's, if it is drawn. The duration is noted if it is `estimated`.
    If the caller has joined a process group, its
    ranks share a calibrated run. All of them call this alike, and the first one reads, writes and
    prints. All return the same report or raise the same error.
    """
    here = ranks()
    progress = run.progress if here.first else Recorder(run.progress)
    run = replace(run, progress=progress, device=here.device_name(run.device))
    with here.together(progress), on_own_device(run.device, here):
        if not here.first:
            _assist(model, run, here)
            return here.broadcast(None)
        return here.broadcast(
            _lead(model, Path(out), recipe, measure, text, run, here, progress, estimated)
        )


def _assist(model: str | Path, run: RunOptions, here: Ranks) -> None:
    """Compute this rank's part of a run that the first rank leads."""
    runner = BlockRunner(dense_source(model, run), device=run.device)
    require_devices(runner.device, here)
    shared: Any = here.broadcast(None)
    if shared is not None:
        recipe, sequences, held_out, work, done = shared
        begun = new_run(
            recipe,
            runner,
            sequences,
            work,
            progress=run.progress,
            act_budget=run.act_budget,
            ranks=here,
            held_out=held_out,
        )
        for _ in calibrated(begun, done):
            pass  # the first rank stores it


def _lead(
    model: str | Path,
    out: Path,
    recipe: Recipe,
    measure: Measure | None,
    text: Calibration | None,
    run: RunOptions,
    here: Ranks,
    progress: Progress,
    estimated: bool,
) -> dict[str, Any]:
    """Prepare, stage and publish a run, and compute this rank's part of it."""
    clock = Clock(torch.device("cpu"))
    with clock.phase("prepare"):
        job = survey(dense_source(model, run, recipe), recipe, out, run)
        progress.note(job.recipe.title)
        job = require_runnable(job, out, run, text=text)
        job.model.require_tied()
        job.model.require_fit({name for name, goal in job.goals.items() if goal})
        require_devices(job.model.device, here)
    # On a GPU the first block soon gives the time that is left, and a probe would take a tenth of
    # the run.
    estimated = estimated and not progress.quiet and not run.resume and here.count == 1
    if estimated and job.model.device.type == "cpu":
        with clock.phase("probe"):
            duration, why = estimate_duration(
                job, run, progress.note, 0 if measure is None else measure.tokens
            )
        found = f"{format_range(*duration)}, by a probe of one block" if duration else None
        progress.note(*(why if found is None else [found]))
    src, recipe = job.src, job.recipe
    report, lacking = begin_report(job, model, run.revision)
    # of the source's card, what the file system cannot do, and files edited since they were
    # recorded
    with (
        staging(
            out, resume=run.resume, overwrite=run.overwrite, source=src.home, notice=lacking.append
        ) as work,
        closing(SourceHashes(src, progress.check)) as source,
    ):
        if is_complete(work):
            here.broadcast(None)
            return publish_complete(work, out, without_paths(recipe), src, run.overwrite)
        writer = CheckpointWriter(work, src, recipe.output_layout, expected=job.plan.output.forms)
        report["notices"] += [*job.text.notices, *lacking]
        progress.note(*lacking)
        # A NaN in the last block would cost the whole run.
        finite = recipe.calibrated and not writer.done
        kind = job.model.device.type if recipe.calibrated else "cpu"
        hashes = (
            partial(source_hashes, src, READERS[kind], finite, progress.check)
            if recipe.calibrated
            else partial(source.first, writer.used)  # the others are hashed when they are read
        )
        begin = partial(identify, writer, report, hashes, progress)
        # A resumed run must first be compared with the stopped run.
        hashes_beside = finite and BESIDE[kind]
        first: list[Callable[[], object]] = [begin] if hashes_beside else []
        if not hashes_beside:
            with progress.loop(), clock.phase("hash"):
                begin()
        if run.resume and not writer.done:
            progress.note("there is nothing to resume: the run begins at its start")
        if recipe.calibrated:
            sequences, held_out = job.text.sequences, job.text.held_out
            here.broadcast((recipe, sequences, held_out, work, writer.done))
            begun = new_run(
                recipe,
                job.model,
                sequences,
                work,
                progress=progress,
                act_budget=run.act_budget,
                goals=job.goals,
                beside=BESIDE[kind],
                ranks=here,
                held_out=held_out,
            )
            outside_first = written_order(job.model, job.goals)[0] is None
            items = calibrated(begun, writer.done, outside=not outside_first)
            queue = WorkQueue(job.model.device, BESIDE[kind])
            if outside_first:
                first.append(partial(copy_dense, writer, job.model.stored(None)))
        else:
            done = writer.items_done()
            device, pack, queue = job.model.device, writer.packed, None
            rounded = streamed(src, recipe, job.goals, done, pack, progress, device, source.of)
            items = clock.around("solve", rounded)
        # A signal that raised while this thread waits for the other could leave a lock taken.
        with progress.loop() if queue is None or queue.beside else nullcontext():
            report["layers"] = write(items, writer, report, clock, queue, first)
            if not recipe.calibrated:
                with clock.phase("hash"):
                    record_source(report, source.all(), progress)
        report |= _ranks_of(writer.done)
        if recipe.tune_scales:
            _tune_scales(job, writer, report, clock, progress)
        return finish(
            writer,
            out,
            job.plan.output.schemes,
            report,
            job.plan.share,
            clock,
            run.overwrite,
            None if recipe.layout is None else without_paths(recipe),
            measure,
        )


def _tune_scales(
    job: Job,
    writer: CheckpointWriter,
    report: dict[str, Any],
    clock: Clock,
    progress: Progress,
) -> None:
    """Tune the scales of the stored weights together (ALGORITHMS 8.3), and write the changed
    tensors, unless a stopped run has done so; add the facts to the report.
    """
    layers = {layer["name"]: layer for layer in report["layers"]}
    if not any("tuned_scales" in line["facts"] for line in writer.done):
        with clock.phase("tune scales"):
            src, packed = job.src, writer.opened({**job.plan.output.config})
            try:
                tuning = ScaleTuning(job.model, packed, job.text.sequences, progress)
                tuned, found = tuning.run(job.recipe.tune_scales, job.recipe.calibration.seed)
            except (CheckpointError, NumericError, torch.OutOfMemoryError) as error:
                tuned, found = {}, {"steps": 0, "reason": reason(error)}  # the weights are good
            changed, facts = dict[str, Tensor](), dict[str, Any]()
            for name, value in tuned.items():
                stored, parts = packed.stored(name), packed.parts(name)
                made = writer.pack(Item(f"{name}.weight", value))
                changed |= {
                    part: made[f"{name}.{suffix}"]
                    for suffix, part in parts.items()
                    if not torch.equal(stored[suffix], made[f"{name}.{suffix}"])
                }
                digest, device = value.digest(), job.model.device
                source, value = src.get(f"{name}.weight").to(device), value.to(device)
                facts[name] = tuned_facts(layers[name], source, value) | {"digest": digest}
        writer.rewrite(changed, {"tuned_scales": found, "tuned": facts, "phases": clock.take()})
    for line in writer.done:
        if "tuned_scales" in line["facts"]:
            report["tuned_scales"] = line["facts"]["tuned_scales"]
            report["layers"] = [line["facts"]["tuned"].get(n, old) for n, old in layers.items()]


def _ranks_of(done: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the report's `ranks` of a run that used several: their number, or a list if it changed
    on the way.
    """
    counts = [line["facts"]["ranks"] for line in done if "ranks" in line.get("facts", {})]
    found = [count for count, _ in groupby(counts)]
    return {} if found in ([], [1]) else {"ranks": found[0] if len(found) == 1 else found}
