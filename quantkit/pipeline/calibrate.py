"""The loop over blocks that quantizes with activations: GPTQ, SparseGPT, and scale searches that use the Hessian.

One block is in memory. Its linears are solved in groups that share an input, in the order in which the block calls
them. A group's Hessian is summed over all documents, and its rows are solved together. The dequantized weights then
replace the original ones, before the next group's Hessian is summed (ALGORITHMS 2 and 12). The finished block turns
the stored activations into the inputs of the next.

Experts of one layer do not depend on each other: the groups of all experts are one stage, whose Hessians are summed in
as few passes as memory allows.

Every finished block is a commit. Activations are saved first, on a GPU after every eighth block, so that a stopped run
continues after the last commit with the same bits (RELIABILITY 1.2, 1.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.algorithms.hessian import Hessian
from quantkit.checkpoint.items import Commit, Item, Packed
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, NumericError, RecipeError, about
from quantkit.io import files
from quantkit.io.safetensors_header import read_header
from quantkit.layouts import LAYOUTS
from quantkit.models.block_runner import BlockRunner
from quantkit.models.passing import State
from quantkit.models.tokenizer import check_tokens
from quantkit.pipeline.activations import Activations
from quantkit.pipeline.layer_solver import solve, solve_uncalibrated
from quantkit.pipeline.memory_estimate import HESSIAN_BYTES, TOKENS_AT_ONCE, hessian_bytes
from quantkit.pipeline.recipe import Goal, Pruning, Recipe, goals_of
from quantkit.progress import Clock, Progress

#: The `block` of the commit for the tensors outside the blocks.
REST = "rest"
#: The most weights of a group that are solved together, unless a single one is larger.
SOLVED_WEIGHTS = 2**28
#: Activations are saved after every so many blocks. A GPU computes a few blocks again sooner than a disk takes them.
SAVED_BLOCKS = {"cpu": 1, "cuda": 8}


@dataclass(frozen=True)
class Group:
    """List linears that receive the same tensor, in order of first call; `once` if a document calls them once."""

    linears: tuple[str, ...]
    once: bool = True


@dataclass
class Run:
    """Hold the state of one calibrated run: the source, the model, its goals, the documents and their activations."""

    src: Checkpoint
    recipe: Recipe | Pruning
    model: BlockRunner
    sequences: Sequence[Tensor]
    work: Path
    act_budget: int | None
    progress: Progress
    clock: Clock
    chosen: Mapping[str, Goal | None]
    activations: Activations | None = None

    def goals(self, linears: Iterable[str]) -> dict[str, Goal]:
        """Return the goal of each linear that does not stay dense."""
        goals = {name: self.chosen[name] for name in linears}
        return {name: goal for name, goal in goals.items() if goal is not None}

    def documents(self) -> Iterator[tuple[int, Tensor, State]]:
        """Yield number, tokens `[t]` and the stored state of every document."""
        assert self.activations is not None
        for number, tokens in enumerate(self.sequences):
            self.progress.check()
            yield number, tokens, self.activations.get(number)

    def batches(self, block: int) -> Iterator[range]:
        """Yield the numbers of documents that one forward takes: adjacent ones of equal length, where that is possible.

        Their order stays, and so does the order of the tokens in each Hessian.
        """
        assert self.activations is not None
        first, lengths = 0, [len(tokens) for tokens in self.sequences]
        while first < len(lengths):
            self.progress.check()
            end = first + 1
            if self.model.takes_batches(block) and self.activations.hidden_only:
                most = first + TOKENS_AT_ONCE[self.model.device.type] // lengths[first]
                while end < min(most, len(lengths)) and lengths[end] == lengths[first]:
                    end += 1
            yield range(first, end)
            first = end

    def run(self, block: int, numbers: range) -> State | None:
        """Run the loaded block on one document, or on a batch, and return what it passes on; None if it was stopped."""
        assert self.activations is not None
        if len(numbers) == 1:
            return self.model.run(block, self.sequences[numbers[0]], self.activations.get(numbers[0]))
        tokens = torch.stack([self.sequences[number] for number in numbers])
        return self.model.run(block, tokens, self.activations.get_batch(numbers))

    def forward(self, block: int) -> None:
        """Run the loaded block on every document, and replace each state by the one that the block passes on."""
        assert self.activations is not None
        with self.clock.phase("forward"):
            for numbers in self.batches(block):
                out = self.run(block, numbers)
                assert out is not None
                if len(numbers) > 1 and not out.passed:
                    self.activations.put_batch(numbers, out)
                    continue
                for number in numbers:  # what is passed on is stored for each document
                    out = out if len(numbers) == 1 else self.run(block, range(number, number + 1))
                    assert out is not None
                    self.activations.put(number, out)


def calibrated(
    src: Checkpoint,
    recipe: Recipe | Pruning,
    model: BlockRunner,
    sequences: Sequence[Tensor],
    work: Path,
    done: Sequence[Mapping[str, Any]],
    *,
    progress: Progress | None = None,
    act_budget: int | None = None,
) -> Iterator[Item | Commit]:
    """Yield every tensor of a dense checkpoint once, its linears quantized or pruned on `sequences` (int64 `[t]`).

    Each block is followed by a Commit; the tensors outside the blocks come last. `work` is the run's folder. It holds
    the activations after the last two blocks and, if they exceed `act_budget` bytes, the current ones. `done` has the
    journal lines of an interrupted run to continue. Facts of an item are those of `layer_solver.solve`; facts of a
    commit are block, phases, activations and form.

    RecipeError for sequences that the model cannot take, or a tied linear that is not skipped. NumericError for
    unusable activations, Hessians or weights. CheckpointError for a model that cannot run block by block.
    """
    run = new_run(src, recipe, model, sequences, work, progress, act_budget)
    _check(run)
    facts = [line["facts"] for line in done if "block" in line.get("facts", {})]
    finished = [f for f in facts if f["block"] != REST]
    last, every = len(model.blocks), SAVED_BLOCKS[model.device.type]
    if len(finished) < last:
        _start(run, finished, done)
    for block in run.progress.bar(range(len(finished), last), "calibrate", last - len(finished)):
        yield from _block(run, block)
        saved = _save(run, block) if block + 1 < last and (block + 1) % every == 0 else None
        form = model.forms.get(block)
        yield Commit({"block": block, "phases": run.clock.take(), "activations": saved, "form": form})
    if len(facts) == len(finished):
        yield from _rest(run)
        yield Commit({"block": REST, "phases": run.clock.take()})


def new_run(
    src: Checkpoint,
    recipe: Recipe | Pruning,
    model: BlockRunner,
    sequences: Sequence[Tensor],
    work: Path,
    progress: Progress | None,
    act_budget: int | None = None,
) -> Run:
    """Return the state of a run that has not begun."""
    clock, chosen = Clock(model.device), goals_of(recipe, model.paths, model.kept_dense)
    return Run(src, recipe, model, sequences, work, act_budget, progress or Progress(quiet=True), clock, chosen)


def find_groups(run: Run, block: int, targets: Sequence[str]) -> list[Group]:
    """Group a loaded block's `targets` that receive the same tensor object, in order of first call.

    Documents are run until every target was called: one, unless tokens choose experts that are not unfused. A target
    that no document reaches becomes a group of its own, at the end, with those of its expert that share its input.
    """
    groups: list[Group] = []
    waiting, experts = set(targets), run.model.experts
    for _, tokens, state in run.documents():
        inputs: dict[str, list[Tensor]] = {}  # references, so that no two inputs share an id

        def see(linear: str, x: Tensor, inputs: dict[str, list[Tensor]] = inputs) -> bool:
            inputs.setdefault(linear, []).append(x)
            return False

        with run.model.watching(sorted(waiting), see):
            run.model.run(block, tokens, state)
        shared: dict[tuple[int, ...], list[str]] = {}
        for linear, seen in inputs.items():
            shared.setdefault(tuple(id(x) for x in seen), []).append(linear)
        groups += [Group(tuple(linears), once=len(calls) == 1) for calls, linears in shared.items()]
        waiting.difference_update(inputs)
        if waiting <= experts.keys():
            break
    idle: dict[object, list[str]] = {}
    for linear in targets:
        if linear in waiting:
            expert = experts.get(linear)
            idle.setdefault((expert.owner, expert.number, expert.role == "down") if expert else linear, []).append(
                linear
            )
    return groups + [Group(tuple(linears)) for linears in idle.values()]


def find_stages(run: Run, groups: Sequence[Group]) -> list[list[Group]]:
    """Return the groups in stages that are solved one after the other; groups of a stage do not depend on each other.

    True-sequential: one group is a stage, or the same projections of all experts of a layer. Else there is one stage.
    """
    if not run.recipe.true_sequential:
        return [list(groups)]
    stages: dict[object, list[Group]] = {}
    for group in groups:
        expert = run.model.experts.get(group.linears[0])
        stages.setdefault((expert.owner, expert.role == "down") if expert else group, []).append(group)
    return list(stages.values())


def with_hessians(
    run: Run, block: int, stage: Sequence[Group]
) -> Iterator[tuple[Group, Hessian, dict[str, dict[str, Any]]]]:
    """Yield each group of a stage with its Hessian, and facts for the report by linear.

    An expert that sees fewer tokens than it has input channels takes its Hessian from all tokens of the layer.
    """
    model = run.model
    starved: dict[str, str] = {}
    for groups in _batches(run, stage):
        for group, hessian in zip(groups, collect(run, block, groups), strict=True):
            expert, k = model.experts.get(group.linears[0]), model.linears[group.linears[0]][1]
            if expert and run.recipe.calibration.moe == "routed" and hessian.tokens < k:
                starved |= dict.fromkeys(group.linears, f"{hessian.tokens} tokens for {k} input channels")
            else:
                facts = {"moe": run.recipe.calibration.moe} if expert else {}
                yield group, hessian, dict.fromkeys(group.linears, facts)
    if not starved:
        return
    model.run_on_all_tokens(model.experts[name] for name in starved)
    for groups in _batches(run, find_groups(run, block, list(starved))):
        for group, hessian in zip(groups, collect(run, block, groups), strict=True):
            yield group, hessian, {name: {"moe": "all", "few_routed": starved[name]} for name in group.linears}
    model.run_on_all_tokens([])


def _batches(run: Run, groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Yield the groups in batches whose Hessians fit `HESSIAN_BYTES`."""
    batch: list[Group] = []
    size = 0
    for group in groups:
        needed = hessian_bytes(run.model.linears[group.linears[0]][1])
        if batch and size + needed > HESSIAN_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(group)
        size += needed
    if batch:
        yield batch


def _parts(run: Run, group: Group) -> Iterator[list[str]]:
    """Yield the linears of a group in parts of at most `SOLVED_WEIGHTS`, as `all` makes one group of all experts."""
    part: list[str] = []
    size = 0
    for name in group.linears:
        n, k = run.model.linears[name]
        if part and size + n * k > SOLVED_WEIGHTS:
            yield part
            part, size = [], 0
        part.append(name)
        size += n * k
    yield part


def collect(run: Run, block: int, groups: Sequence[Group]) -> list[Hessian]:
    """Sum the Hessian of each group's input over all documents, in one pass through the loaded block.

    The pass for a single group ends before its first linear runs.
    """
    model = run.model
    cap = run.recipe.gptq.cap_tokens
    hessians = {g.linears[0]: Hessian(model.linears[g.linears[0]][1], model.device, cap_tokens=cap) for g in groups}
    stop = len(groups) == 1 and groups[0].once
    document = 0

    def see(linear: str, x: Tensor) -> bool:
        with run.clock.phase("hessian"), about(f"{linear}, calibration document {document}"):
            hessians[linear].add(x)
        return stop

    with run.clock.phase("forward"), model.watching(hessians, see):
        for numbers in run.batches(block):
            document = numbers[0]
            try:
                run.run(block, numbers)
            except NumericError:
                for document in numbers if len(numbers) > 1 else ():
                    run.run(block, range(document, document + 1))
                raise
    return list(hessians.values())


def check_sequences(recipe: Recipe | Pruning, model: BlockRunner, sequences: Sequence[Tensor]) -> None:
    """Raise an error for calibration sequences that the model cannot run on."""
    longest = max((len(s) for s in sequences), default=0)
    if not longest:
        other = "--method magnitude" if isinstance(recipe, Pruning) else "--method rtn --clip none"
        raise RecipeError(f"no calibration sequences: give calibration data, or use {other}")
    tuned = isinstance(recipe, Recipe) and recipe.distill > 0
    if tuned and len(sequences) < 2:
        raise RecipeError("--distill holds out one calibration sequence, and there is one: use more --samples or text")
    if tuned and model.text.get_output_embeddings() is None:
        kind = type(model.text).__name__
        raise RecipeError(f"{kind} computes no distribution of tokens from text alone: drop --distill")
    if longest > model.max_length:
        raise RecipeError(
            f"a calibration sequence has {longest} tokens, the model takes {model.max_length}: use --max-length "
            f"{model.max_length}"
        )
    embeddings = model.text.get_input_embeddings().get_parameter("weight")
    check_tokens(max(int(s.max()) for s in sequences), len(embeddings))


def _check(run: Run) -> None:
    check_sequences(run.recipe, run.model, run.sequences)
    for linear in run.goals(sorted(run.model.tied)):
        raise RecipeError(f"{linear} shares its weight with the embeddings, which stay dense: add --skip {linear}")


def _start(run: Run, finished: Sequence[Mapping[str, Any]], done: Sequence[Mapping[str, Any]]) -> None:
    """Fill `run.activations` with the input of the first unfinished block.

    It comes from the last saved activations, through the blocks that finished after them; without any, from the text.
    """
    first = _load_saved(run, finished)
    if not first:
        _embed(run)
    for block in range(first, len(finished)):
        with run.clock.phase("load"):
            run.model.load_block(block)
            for linear, value in committed(run, run.model.targets(block), done):
                _put_back(run.model, linear, value)
        run.forward(block)
        run.model.unload_block(block)


def _load_saved(run: Run, finished: Sequence[Mapping[str, Any]]) -> int:
    """Load the last saved activations, and return the number of the block that they enter; 0 if there are none."""
    number = max((block for block, facts in enumerate(finished) if facts["activations"] is not None), default=-1)
    if number < 0:
        return 0
    try:
        facts, parity = finished[number]["activations"], _parity(run, number)
        run.activations = Activations.load(run.work, run.act_budget, parity, facts, run.model.device)
    except CheckpointError as error:
        run.progress.warn(f"{error}: the activations of {len(finished)} finished blocks are computed again")
        return 0
    run.model.forms[number] = finished[number]["form"]
    with run.clock.phase("load"):
        run.model.prepare(embeddings=False)
    return number + 1


def _embed(run: Run) -> None:
    """Fill `run.activations` with the input of the first block."""
    model = run.model
    with run.clock.phase("load"):
        model.prepare(embeddings=True)
    with run.clock.phase("forward"):
        first = model.embed(run.sequences[0]).hidden
        rows = [len(tokens) for tokens in run.sequences]
        if len(first) != rows[0]:  # padding, prompts or streams come with the tokens
            rows = [len(model.embed(tokens).hidden) for tokens in run.sequences]
        like = tuple(first.shape[1:])
        run.activations = Activations(run.work, run.act_budget, rows, like, model.dtype, model.device)
        for number, tokens, _ in run.documents():
            run.activations.put(number, model.embed(tokens))
    model.drop_embeddings()


def _block(run: Run, block: int) -> Iterator[Item]:
    """Quantize one block and yield its tensors in source order; `run.activations` become the input of the next."""
    model = run.model
    with run.clock.phase("load"):
        model.load_block(block)
    if model.device.type == "cuda" and block + 1 < len(model.blocks):
        model.read_ahead(block + 1)
    goals = run.goals(model.targets(block))
    if run.recipe.calibration.moe == "all":
        model.run_on_all_tokens(model.experts[name] for name in goals if name in model.experts)
    with run.clock.phase("forward"):
        uncalled = {name: why for name in goals if (why := model.why_uncalled(name)) is not None}
        reached = [name for name in goals if name not in uncalled]
        groups = find_groups(run, block, reached) if reached else []
    solved: dict[str, Item] = {}
    for name, why in uncalled.items():
        with run.clock.phase("solve"):
            item = solve_uncalibrated(name, model.source_weight(name), goals[name], run.recipe, why)
        assert not isinstance(item.value, Packed)
        _put_back(model, name, item.value)
        solved[item.name] = item
    for stage in find_stages(run, groups):
        for group, hessian, facts in with_hessians(run, block, stage):
            for part in _parts(run, group):
                with run.clock.phase("solve"):
                    weights = {name: model.source_weight(name) for name in part}
                    items = solve(weights, {name: goals[name] for name in weights}, hessian, run.recipe, run.progress)
                for item in items:
                    assert not isinstance(item.value, Packed)  # only conversions yield packed items
                    name = item.name.removesuffix(".weight")
                    _put_back(model, name, item.value)
                    solved[item.name] = item._replace(facts={**(item.facts or {}), **facts[name]})
                    run.progress.detail(_detail(item))
    model.run_on_all_tokens([])
    if block + 1 < len(model.blocks):
        run.forward(block)
    model.unload_block(block)
    for name in model.stored(block):
        yield solved.pop(name) if name in solved else Item(name, run.src.get(name))


def _detail(item: Item) -> str:
    facts = item.facts or {}
    found = [(key, facts.get(key)) for key in ("method", "relative_error", "loss", "rtn_loss", "damp", "tokens")]
    return f"{item.name}: " + ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in found)


def _rest(run: Run) -> Iterator[Item]:
    """Yield the tensors outside the blocks; a linear there that is not skipped is solved without a Hessian."""
    outside = run.model.stored(None)
    goals = run.goals(linear for linear in run.model.linears if f"{linear}.weight" in outside)
    for name in outside:
        tensor = run.src.get(name)
        linear = name.removesuffix(".weight")
        goal = goals.get(linear)
        if linear == name or goal is None:
            yield Item(name, tensor)
            continue
        with run.clock.phase("solve"):
            item = solve_uncalibrated(linear, tensor.to(run.model.device), goal, run.recipe, "it is outside the blocks")
        yield item


def _save(run: Run, block: int) -> dict[str, Any]:
    assert run.activations is not None
    with run.clock.phase("save"):
        return run.activations.save(_parity(run, block))


def _parity(run: Run, block: int) -> int:
    """Return which of two snapshots is written after a block: meanwhile the other one is that of the last commit."""
    return block // SAVED_BLOCKS[run.model.device.type] % 2


def _put_back(model: BlockRunner, linear: str, value: QuantizedTensor | Tensor) -> None:
    """Replace the weight of a linear in a loaded block by its solved value, without padding."""
    n, k = model.linears[linear]
    dense = value.dequantize(model.dtype) if isinstance(value, QuantizedTensor) else value
    model.replace(linear, dense[:n, :k].contiguous())


def committed(
    run: Run, linears: Iterable[str], done: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, QuantizedTensor | Tensor]]:
    """Yield those of `linears` that were solved, read back from the files in the journal."""
    layout = None if isinstance(run.recipe, Pruning) else LAYOUTS[run.recipe.layout]
    paths = [run.work / name for line in done for name in line.get("files", {})]
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
