"""The two loops of a run: over the tensors of a model that is rounded, and over the blocks of one
that is calibrated. A calibrated run also begins here, and continues.

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

import platform
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from threading import Semaphore
from types import MappingProxyType

import torch
from torch import Tensor

from quantkit.calibration.activations import Activations
from quantkit.calibration.budget import (
    PART,
    SAVED_BLOCKS,
    launchers,
    rounders,
    rounding_bytes,
    split_documents,
)
from quantkit.calibration.run import Run, Stream, embedded
from quantkit.calibration.scales import INSTEAD
from quantkit.calibration.stages import stages_of
from quantkit.calibration.stages.base import Group, LoadedBlock, Stage, Task, tasks
from quantkit.calibration.stages.solve import solve_uncalibrated
from quantkit.calibration.stages.statistics import measured
from quantkit.calibration.stages.tune import require_held_out
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.stored_tensors import StoredTensors
from quantkit.checkpoint.writer import Commit, Item, committed_files
from quantkit.core.memory_limits import release_heap
from quantkit.core.quantized_tensor import Goal, QuantizedTensor, Scheme
from quantkit.core.ranks import ALONE, Ranks
from quantkit.core.threads import MOST_BYTES, ahead, divide, grouped
from quantkit.errors import CheckpointError, Option, RecipeError, Setting, Words, about
from quantkit.kernels import gptq
from quantkit.models.block_runner import BlockRunner
from quantkit.models.weights import device_of
from quantkit.names import Json, JsonView
from quantkit.progress import QUIET, Clock, Progress, Recorder
from quantkit.recipes.recipe import Recipe, goals_of
from quantkit.text.tokenizer import check_tokens

#: The `block` of the commit for the tensors outside the blocks.
REST = "rest"
#: On a CPU weights of fewer bytes are rounded together: handing each over takes as long as packing
#: it.
BATCH = 2**20
#: A turn that needs no waiting.
ALWAYS = nullcontext()
#: Rounded tensors are committed to the journal in steps of this many source bytes, unless one has
#: more.
COMMIT_BYTES = 2**28


def streamed(
    src: Checkpoint,
    recipe: Recipe,
    goals: Mapping[str, Goal | None],
    done: Collection[str],
    pack: Callable[[Item], Item],
    progress: Progress,
    device: torch.device,
    hashes: Callable[[Iterable[str]], dict[str, str]],
) -> Iterator[Item | Commit]:
    """Yield every tensor of a dense checkpoint that is not `done`, its linears rounded or pruned
    on `device`, and packed by `pack`. Threads read and pack several weights at a time, and few of
    them use a GPU at once. A commit records the `hashes` of the source's files that its tensors are
    from.
    """
    names = [name for name in src.names() if name not in done]
    last = {unit[-1]: unit for unit in units_of(src, names)}
    on_gpu = device.type == "cuda"
    turn = Semaphore(launchers(device)) if on_gpu else ALWAYS
    each = rounding_bytes(goals.values(), src.dtype_of_model, device.type)
    made = ahead(
        progress.bar(names, "prune" if recipe.only_prunes else "quantize"),
        lambda some: map(pack, _uncalibrated(src, some, goals, recipe, device, turn=turn)),
        lambda name: each * prod(src.shape(name)),
        workers=rounders(device),
        most=MOST_BYTES,
        batch=each * PART if on_gpu else BATCH,
        check=progress.check,
        device=device,
    )
    with closing(made):
        for item in made:
            yield item
            name = item.name
            del item  # its memory is free while the next one is made
            if name in last:
                yield Commit({}, partial(_used, hashes, last[name]))


def _used(hashes: Callable[[Iterable[str]], dict[str, str]], names: list[str]) -> Json:
    return {"source": hashes(names)}


def _uncalibrated(
    src: Checkpoint,
    names: Sequence[str],
    goals: Mapping[str, Goal | None],
    recipe: Recipe,
    device: torch.device,
    reason: str | None = None,
    turn: AbstractContextManager[object] = ALWAYS,
) -> list[Item]:
    """Read tensors; round or prune on `device` those that are weights of linears with a goal, in
    a `turn`.
    """
    read = {name: src.get(name) for name in names}
    found = {name: Item(name, tensor) for name, tensor in read.items()}
    alike = grouped(
        ((goal, read[name].dtype, read[name].shape[-1:]), name)
        for name in names
        if name.endswith(".weight") and (goal := goals.get(name.removesuffix(".weight")))
    )
    for (goal, *_), some in alike.items():
        weights = {name.removesuffix(".weight"): read[name] for name in some}
        with turn:
            solved = solve_uncalibrated(weights, goal, recipe, reason, device)
        found |= {item.name: item for item in solved}
    return [found[name] for name in names]


def units_of(src: Checkpoint, names: Iterable[str]) -> Iterator[list[str]]:
    """Divide tensors into the units that streamed work commits."""
    return divide(names, src.nbytes, COMMIT_BYTES)


def check_sequences(recipe: Recipe, model: BlockRunner, sequences: Sequence[Tensor]) -> None:
    """Raise an error for calibration sequences that the model or a stage of the recipe cannot run
    on.
    """
    longest = max(map(len, sequences), default=0)
    if not longest:
        rounding = Setting("method", "rtn"), Setting("clip", "none")
        ways = (Setting("method", "magnitude"),) if recipe.layout is None else rounding
        raise RecipeError("no calibration sequences", "give calibration data", Words("use", *ways))
    if longest > model.max_length:
        raise RecipeError(
            f"a calibration sequence has {longest} tokens, the model takes {model.max_length}",
            Words("use", Setting("max_length", model.max_length)),
        )
    embeddings = model.text.get_input_embeddings().get_parameter("weight")
    check_tokens(max(int(s.max()) for s in sequences), len(embeddings))
    for stage in stages_of(recipe):
        stage.check(sequences)
    if recipe.tune_scales:
        if recipe.layout is None:
            raise RecipeError(
                Words(Setting("tune_scales"), "changes stored scales, and no layout stores them"),
                INSTEAD,
            )
        require_held_out("tune_scales", len(sequences), INSTEAD)


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


def on_own_device(device: str, here: Ranks) -> AbstractContextManager[object]:
    """Make the rank's GPU torch's current one, so that no rank allocates on another's."""
    if here.count == 1 or device_of(device).type == "cpu":
        return nullcontext()
    return torch.cuda.device(device)


def new_run(
    recipe: Recipe,
    model: BlockRunner,
    sequences: Sequence[Tensor],
    work: Path,
    *,
    progress: Progress = QUIET,
    act_budget: int | None = None,
    goals: Mapping[str, Goal | None] | None = None,
    beside: bool = False,
    ranks: Ranks = ALONE,
    held_out: Mapping[str, Sequence[Tensor]] = MappingProxyType({}),
) -> Run:
    """Begin a run on this rank's part of all `sequences`, int64 `[t]`; all ranks are given the same
    arguments.

    `work` is the run's folder. Its files hold the activations after the last two blocks and, beyond
    `act_budget` bytes, the current activations. `goals` has the goal of each linear, None by the
    recipe. Sequences that are `held_out`, by source, do not calibrate: they run after all others.
    Raises as `check_sequences` and `split_documents`.
    """
    check_sequences(recipe, model, sequences)
    release_heap()  # of tokenizing, and of an earlier run in this process
    every = [*sequences, *chain.from_iterable(held_out.values())]
    lengths, added = [len(tokens) for tokens in sequences], len(every) - len(sequences)
    mine = split_documents(lengths, ranks.count, added)[ranks.rank]
    # A copy of tokens in each forward would wait for a GPU.
    here = [tokens.to(model.device) for tokens in every[mine.start : mine.stop]]
    goals = (
        goals_of(recipe, model.paths, model.kept_dense, model.tables) if goals is None else goals
    )
    return Run(
        recipe,
        model,
        here,
        work,
        act_budget,
        progress,
        Clock(model.device),
        goals,
        every,
        beside,
        ranks,
        mine.start,
        [source for source, found in held_out.items() for _ in found],
    )


def calibrated(
    run: Run,
    done: Sequence[JsonView],
    before_solving: Stage | None = None,
    outside: bool = True,
) -> Iterator[Item | Commit]:
    """Yield every tensor of a dense checkpoint once, its linears quantized or pruned.

    Each block is followed by a Commit; the tensors `outside` the blocks come last, unless the
    caller writes them first (`written_order`). `done` has the journal lines of an interrupted run
    to continue. The stages add the facts of an item; the facts of a commit are block, phases,
    activations, form and ranks. If a background thread writes, the activations of a commit may
    follow later.

    Each of several ranks computes a part, and only the first one yields tensors.

    NumericError for unusable activations, Hessians or weights. CheckpointError for a model that
    cannot run block by block.
    """
    facts = [line["facts"] for line in done if "block" in line.get("facts", {})]
    finished = [f for f in facts if f["block"] != REST]
    last = len(run.model.blocks)
    if len(facts) > len(finished):
        return
    solved: Mapping[str, Item] = {}
    if len(finished) < last or run.head:
        gptq.load_beside(run.model.device)
        stages = stages_of(run.recipe, before_solving)
        for stage in stages if len(finished) < last else ():
            stage.start(run, len(finished))
        run.read_ahead(len(finished))  # while the embeddings are loaded
        stream = resume(run, finished, done)
        with closing(stream.waiting):
            for block in run.progress.bar(range(len(finished), last), "calibrate", "block"):
                yield from _block(run, stream, stages, block)
                yield _commit(run, stream, block)
            if run.head:
                solved = _head(run, stream, stages)
    if outside:
        yield from _rest(run, solved)
    yield Commit({"block": REST, "phases": run.clock.take()})


def written_order(model: BlockRunner, goals: Mapping[str, Goal | None]) -> list[int | None]:
    """Return the blocks in the order in which a calibrated run writes their tensors, and None where
    it writes those outside the blocks.

    If all of these stay dense, they are written first: they depend on no block.
    """
    outside = (name.removesuffix(".weight") for name in model.stored(None))
    blocks = [*range(len(model.blocks))]
    return [*blocks, None] if any(goals.get(name) for name in outside) else [None, *blocks]


def _block(run: Run, stream: Stream, stages: Sequence[Stage], index: int) -> Iterator[Item]:
    """Quantize one block and yield its tensors in source order; `stream` becomes the input of the
    next.
    """
    model = run.model
    if model.device.type == "cpu":
        # memory freed by the last block is fragmented, and would add to this block's peak
        release_heap()
    run.load(index, index + 1)
    goals = run.goals(model.targets(index))
    uncalled = {name: why for name in goals if (why := model.why_uncalled(name)) is not None}
    block = LoadedBlock(run, stream, index, goals, uncalled)
    for stage in stages:
        stage.enter(block)
    _work(block, stages)
    for stage in stages:
        stage.leave(block)
    with measured(block) as wanted:
        if wanted:
            stream.waiting.close()
        if wanted or index + 1 < len(model.blocks) or run.head:
            stream.forward(index)
    stream.waiting.close()
    model.weights.unload_block(index)
    for name in model.stored(index) if run.ranks.first else ():
        yield block.solved.pop(name) if name in block.solved else Item(name, model.src.get(name))


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
    # The first rank prints the notes of the other ranks since the last block.
    of_ranks = run.ranks.exchange(run.progress.take() if isinstance(run.progress, Recorder) else [])
    for rank, warnings in enumerate(of_ranks) if run.ranks.first else ():
        for text in warnings:
            run.progress.warn(f"rank {rank}: {text}")
    phases, count = run.clock.take(), run.ranks.count
    return Commit(
        {"block": index, "phases": phases, "activations": saved, "form": form, "ranks": count}, late
    )


def _head(run: Run, stream: Stream, stages: Sequence[Stage]) -> dict[str, Item]:
    """Solve the output head, unless it stays dense, on the hidden states that leave the last block
    and its norm.
    """
    block = LoadedBlock(run, stream, len(run.model.blocks), run.head, {})
    for name in run.progress.bar(run.head, "calibrate", "head"):
        task = Task(Group((name,)), {name: {}})
        for stage in stages:
            stage.work(block, [task])
    return block.solved


def _rest(run: Run, solved: Mapping[str, Item]) -> Iterator[Item]:
    """Yield the tensors outside the blocks, some `solved` already; other linears there and
    embeddings that are not skipped are solved without a Hessian.
    """
    model, goals = run.model, run.goals(run.chosen)
    for name in model.stored(None) if run.ranks.first else ():
        run.progress.check()
        with run.clock.phase("solve"):
            if (item := solved.get(name)) is None:
                [item] = _uncalibrated(
                    model.src, [name], goals, run.recipe, model.device, "it is outside the blocks"
                )
        yield item


def save(
    run: Run, stream: Stream, block: int
) -> tuple[list[Json] | None, Callable[[], Json] | None]:
    """Save the activations after a block, if a snapshot is due and the block is not the last.

    Two snapshots alternate, so that the last commit's stays while another is written. The result
    has the facts of each rank's part, or the function that saves a copy.
    """
    model = run.model
    if block + 1 == len(model.blocks) or (block + 1) % SAVED_BLOCKS[model.device.type]:
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


def resume(run: Run, finished: Sequence[JsonView], done: Sequence[JsonView]) -> Stream:
    """Make the stream that enters the first unfinished block. `finished` has the facts of the
    finished blocks.

    It comes from the last saved activations, through the blocks that finished after them. Without
    any, it comes from the text.
    """
    first, stream = _load_saved(run, finished)
    if stream is None:
        stream = embedded(run)
    stored = StoredTensors(run.work.resolve(), list(committed_files(done)), None)
    for block in range(first, len(finished)):
        run.load(block)
        with run.clock.phase("load"):
            for linear, value in committed(run, run.model.targets(block), stored):
                run.put_back(linear, value)
        stream.forward(block)
        run.model.weights.unload_block(block)
    return stream


def _load_saved(run: Run, finished: Sequence[JsonView]) -> tuple[int, Stream | None]:
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
    run: Run, linears: Iterable[str], stored: StoredTensors
) -> Iterator[tuple[str, QuantizedTensor | Tensor]]:
    """Yield those of `linears` that were solved, from the files of the journal."""
    layout, names = run.recipe.output_layout, set(stored.names())
    for linear, goal in run.goals(linears).items():
        if layout is None or not isinstance(goal, Scheme):
            yield linear, stored.get(f"{linear}.weight")
            continue
        found = [suffix for suffix in layout.TENSORS if f"{linear}.{suffix}" in names]
        with about(linear):
            parts = {suffix: stored.get(f"{linear}.{suffix}") for suffix in found}
            yield linear, layout.unpack(parts, goal)
