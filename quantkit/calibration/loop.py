"""The loop over blocks that quantizes with activations, and the continuation of a stopped run.

Each stage of the recipe works before the groups of a block, at each group, and after them. Solved
weights replace the original ones before the next group is calibrated (ALGORITHMS 2 and 12), so the
finished block turns the stored activations into the inputs of the next. Several ranks divide
documents and solving, and all put back the same weights.

Activations are saved before the commit of a block, on a GPU after every eighth block (RELIABILITY
1.2, 1.3). A run that continues behind its last finished block gives the same bits. Blocks that were
committed later than the activations run again with their solved weights, which are in the files of
the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from torch import Tensor

from quantkit.calibration.activations import Activations
from quantkit.calibration.budget import SAVED_BLOCKS
from quantkit.calibration.run import Run, Stream, embedded
from quantkit.calibration.stages import row_sums, stages_of
from quantkit.calibration.stages.base import LoadedBlock, Stage, tasks
from quantkit.calibration.uncalibrated import solve_uncalibrated
from quantkit.checkpoint.writer import Commit, Item, committed_files
from quantkit.core.memory_limits import release_heap
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, RecipeError, Setting, Words, about
from quantkit.io import files
from quantkit.io.safetensors_files import read_header
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
        stream = resume(run, finished, done)
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
    saved, late = save(run, stream, index)
    form = run.model.forms.get(index)
    _print_warnings(run)
    phases, count = run.clock.take(), run.ranks.count
    return Commit(
        {"block": index, "phases": phases, "activations": saved, "form": form, "ranks": count}, late
    )


def _print_warnings(run: Run) -> None:
    """Let the first rank print the notes of the other ranks since the last call."""
    said = run.progress.take() if isinstance(run.progress, Recorder) else []
    of_ranks = run.ranks.exchange(said)
    for rank, warnings in enumerate(of_ranks) if run.ranks.first else ():
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


def save(
    run: Run, stream: Stream, block: int
) -> tuple[list[dict[str, Any]] | None, Callable[[], dict[str, Any]] | None]:
    """Save the activations after a block, if a snapshot is due and the block is not the last.

    Two snapshots alternate, so that the last commit's stays while another is written. The result
    has the facts of each rank's part, or the function that saves a copy.
    """
    model = run.model
    every = SAVED_BLOCKS[model.device.type]
    if block + 1 == len(model.blocks) or (block + 1) % every:
        return None, None
    parity = _parity(run, block)
    with run.clock.phase("save"):
        copied = (
            stream.activations.copied(model.device) if run.beside and run.ranks.count == 1 else None
        )
        if copied is not None:
            return None, lambda: {"activations": [copied.save(parity)]}
        facts = stream.activations.save(parity)
    with run.exchanging():
        return run.ranks.exchange(facts), None


def resume(
    run: Run, finished: Sequence[Mapping[str, Any]], done: Sequence[Mapping[str, Any]]
) -> Stream:
    """Make the stream that enters the first unfinished block. `finished` has the facts of the
    finished blocks.

    It comes from the last saved activations, through the blocks that finished after them. Without
    any, it comes from the text.
    """
    first, stream = _load_saved(run, finished)
    if stream is None:
        stream = embedded(run)
    for block in range(first, len(finished)):
        with run.clock.phase("load"):
            run.model.load_block(block)
            for linear, value in committed(run, run.model.targets(block), done):
                run.put_back(linear, value)
        stream.forward(block)
        run.model.unload_block(block)
    return stream


def _load_saved(run: Run, finished: Sequence[Mapping[str, Any]]) -> tuple[int, Stream | None]:
    """Load the last saved activations, and the number of the block that they enter; 0 and None if
    there are none.
    """
    number = max(
        (block for block, facts in enumerate(finished) if facts["activations"] is not None),
        default=-1,
    )
    if number < 0:
        return 0, None
    problem, loaded = None, None
    try:
        parts, parity = finished[number]["activations"], _parity(run, number)
        mine = range(run.first, run.first + len(run.sequences))
        loaded = Activations.load(
            run.work, run.act_budget, parity, parts, mine, run.model.device, run.ranks.rank
        )
    except CheckpointError as error:
        problem = error.typed
    problem = next((each for each in run.ranks.exchange(problem) if each is not None), None)
    if problem is not None or loaded is None:
        if run.ranks.first:
            again = f"the activations of {len(finished)} finished blocks are computed again"
            run.progress.warn(Words(problem, ":", again))
        return 0, None
    run.model.forms[number] = finished[number]["form"]
    with run.clock.phase("load"):
        run.model.prepare(embeddings=False)
    return number + 1, Stream(run, loaded)


def _parity(run: Run, block: int) -> int:
    """Number the snapshot after a block, 0 or 1."""
    return block // SAVED_BLOCKS[run.model.device.type] % 2


def committed(
    run: Run, linears: Iterable[str], done: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, QuantizedTensor | Tensor]]:
    """Yield those of `linears` that were solved, read back from the journal's files."""
    layout = run.recipe.output_layout
    paths = [run.work / name for name in committed_files(done)]
    where = {name: (path, info) for path in paths for name, info in read_header(path)[0].items()}
    for linear, goal in run.goals(linears).items():
        parts: dict[str, Tensor] = {}
        for suffix in layout.TENSORS if layout else ("weight",):
            if f"{linear}.{suffix}" in where:
                path, info = where[f"{linear}.{suffix}"]
                with files.open_regular(path) as file:
                    data = files.read_exactly(file, info.start, info.end - info.start, path)
                parts[suffix] = data.view(info.dtype).reshape(info.shape)
        with about(linear):
            if layout is not None and isinstance(goal, Scheme):
                yield linear, layout.unpack(parts, goal)
            else:
                yield linear, parts["weight"]
