"""The loop over blocks that quantizes with activations.

Each stage of the recipe works before the groups of a block, at each group, and after them. Solved
weights replace the original ones before the next group is calibrated (ALGORITHMS 2 and 12), so the
finished block turns the stored activations into the inputs of the next. Several ranks divide
documents and solving, and all put back the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from quantkit.calibration import resume
from quantkit.calibration.groups import tasks
from quantkit.calibration.run import Run, Stream
from quantkit.calibration.stages import row_sums, stages_of
from quantkit.calibration.stages.base import LoadedBlock, Stage
from quantkit.calibration.uncalibrated import solve_uncalibrated
from quantkit.checkpoint.writer import Commit, Item
from quantkit.core.memory_limits import release_heap
from quantkit.errors import RecipeError, Setting, Words
from quantkit.kernels import gptq
from quantkit.progress import Recorder

#: The `block` of the commit for the tensors outside the blocks.
REST = "rest"


def calibrated(
    run: Run, done: Sequence[Mapping[str, Any]], before_solving: Stage | None = None
) -> Iterator[Item | Commit]:
    """Yield every tensor of a dense checkpoint once, its linears quantized or pruned.

    Each block is followed by a Commit; the tensors outside the blocks come last. `done` has the
    journal lines of an interrupted run to continue. The stages add the facts of an item; the facts
    of a commit are block, phases, activations, form and ranks. If a background thread writes, the
    activations of a commit may follow later.

    Each of several ranks computes a part, and only the first one yields tensors.

    RecipeError for a tied linear that is not skipped. NumericError for unusable activations,
    Hessians or weights. CheckpointError for a model that cannot run block by block.
    """
    for linear in run.goals(sorted(run.model.tied)):
        rule = f"{linear} shares its weight with the embeddings, which stay dense"
        raise RecipeError(rule, Words("add", Setting("skip", linear)))
    facts = [line["facts"] for line in done if "block" in line.get("facts", {})]
    finished = [f for f in facts if f["block"] != REST]
    last = len(run.model.blocks)
    if len(finished) < last:
        gptq.load_beside(run.model.device)
        stages = stages_of(run.recipe, before_solving)
        for stage in stages:
            stage.start(run, len(finished))
        stream = resume.resume(run, finished, done)
        with closing(stream.waiting):
            for block in run.progress.bar(
                range(len(finished), last), "calibrate", last - len(finished), "block"
            ):
                yield from _block(run, stream, stages, block)
                yield _commit(run, stream, block)
    if len(facts) == len(finished):
        yield from _rest(run)
        yield Commit({"block": REST, "phases": run.clock.take()})


def _block(run: Run, stream: Stream, stages: Sequence[Stage], index: int) -> Iterator[Item]:
    """Quantize one block and yield its tensors in source order; `stream` becomes the input of the
    next.
    """
    model = run.model
    if model.device.type == "cpu":
        # memory freed by the last block is fragmented, and would add to this block's peak
        release_heap()
    with run.clock.phase("load"):
        model.load_block(index)
    if model.device.type == "cuda" and index + 1 < len(model.blocks):
        model.weights.read_ahead(index + 1)
    goals = run.goals(model.targets(index))
    uncalled = {name: why for name in goals if (why := model.why_uncalled(name)) is not None}
    block = LoadedBlock(run, stream, index, goals, uncalled)
    for stage in stages:
        stage.enter(block)
    _work(block, stages)
    for stage in stages:
        stage.leave(block)
    with row_sums.measured(block) as wanted:
        if wanted:
            stream.waiting.close()
        if wanted or index + 1 < len(model.blocks):
            stream.forward(index)
    stream.waiting.close()
    model.unload_block(index)
    for name in model.stored(index) if run.ranks.first else ():
        yield block.solved.pop(name) if name in block.solved else Item(name, run.src.get(name))


def _work(block: LoadedBlock, stages: Sequence[Stage]) -> None:
    """Let the stages work on the groups of a block; the last Hessians are freed with the names in
    here.
    """
    for some in tasks(block):
        for stage in stages:
            stage.work(block, some)


def _commit(run: Run, stream: Stream, index: int) -> Commit:
    """Save the activations after a block, print the notes of other ranks, and make the commit of
    the block.
    """
    saved, late = resume.save(run, stream, index)
    form = run.model.forms.get(index)
    _print_warnings(run)
    phases, count = run.clock.take(), run.ranks.count
    return Commit(
        {"block": index, "phases": phases, "activations": saved, "form": form, "ranks": count}, late
    )


def _print_warnings(run: Run) -> None:
    """Let the first rank print the notes of the other ranks since the last call."""
    said = run.progress.take() if isinstance(run.progress, Recorder) else []
    told = run.ranks.exchange(said)
    for rank, warnings in enumerate(told) if run.ranks.first else ():
        for text in warnings:
            run.progress.warn(f"rank {rank}: {text}")


def _rest(run: Run) -> Iterator[Item]:
    """Yield the tensors outside the blocks; a linear there that is not skipped is solved without a
    Hessian.
    """
    outside = run.model.stored(None) if run.ranks.first else []
    goals = run.goals(linear for linear in run.model.linears if f"{linear}.weight" in outside)
    for name in outside:
        run.progress.check()
        tensor = run.src.get(name)
        linear = name.removesuffix(".weight")
        goal = goals.get(linear)
        if linear == name or goal is None:
            yield Item(name, tensor)
            continue
        with run.clock.phase("solve"):
            item = solve_uncalibrated(
                linear, tensor.to(run.model.device), goal, run.recipe, "it is outside the blocks"
            )
        yield item
