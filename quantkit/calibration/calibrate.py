"""The loop over blocks that quantizes with activations: GPTQ, SparseGPT, and scale searches that use the Hessian.

One block is in memory. Its linears are solved in groups that share an input, in the order in which the block calls
them. A group's Hessian is summed over all documents, and its rows are solved together. The dequantized weights then
replace the original ones, before the next group's Hessian is summed (ALGORITHMS 2 and 12). The finished block turns
the stored activations into the inputs of the next.

Experts of one layer do not depend on each other: the groups of all experts are one stage, whose Hessians are summed in
as few passes as memory allows.

Every finished block is a commit. Activations are saved first, on a GPU after every eighth block, so that a stopped run
continues after the last commit with the same bits (RELIABILITY 1.2, 1.3).

Several ranks divide the documents and the work of solving. Each has the whole block, and the activations of its own
documents. All put back the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.algorithms.hessian import CHUNK, LONG_CHUNK, Hessian
from quantkit.calibration import budget
from quantkit.calibration.activations import Activations
from quantkit.calibration.budget import SAVED_BLOCKS, TOKENS_AT_ONCE, gradient_documents
from quantkit.calibration.layer_solver import solve, solve_uncalibrated
from quantkit.calibration.output_gradients import OutputGradients, measure
from quantkit.calibration.tuning import check_held_out, tune
from quantkit.checkpoint.items import Commit, Item, Packed
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.ranks import ALONE, Ranks
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, NumericError, QuantkitError, RecipeError, about
from quantkit.io import files
from quantkit.io.safetensors_header import read_header
from quantkit.kernels import gptq
from quantkit.models.block_runner import BlockRunner
from quantkit.models.passing import State
from quantkit.progress import Clock, Progress, Recorder
from quantkit.recipes.goals import Goal
from quantkit.recipes.recipe import Recipe, goals_of
from quantkit.text.tokenizer import check_tokens

#: The `block` of the commit for the tensors outside the blocks.
REST = "rest"


@dataclass(frozen=True)
class Group:
    """List linears that receive the same tensor, in order of first call; `once` if a document calls them once."""

    linears: tuple[str, ...]
    once: bool = True


class Calibrated(NamedTuple):
    """Hold a group, its Hessian, facts for the report by linear, and the rank that solves it (None: all, by rows).

    The Hessian is that of all documents; None on a rank that does not solve the group.
    """

    group: Group
    hessian: Hessian | None
    facts: dict[str, dict[str, Any]]
    owner: int | None = None


@dataclass
class Run:
    """Hold the state of one calibrated run: the source, the model, its goals, the documents and their activations.

    `sequences` and `activations` are those of this rank's documents, of which `first` is the first.
    """

    src: Checkpoint
    recipe: Recipe
    model: BlockRunner
    sequences: Sequence[Tensor]
    work: Path
    act_budget: int | None
    progress: Progress
    clock: Clock
    chosen: Mapping[str, Goal | None]
    beside: bool = False
    activations: Activations | None = None
    at_once: int = 0
    ranks: Ranks = ALONE
    first: int = 0
    unquantized: Activations | None = None  # the same of the unquantized model, of all documents or the first ones
    gradients: OutputGradients | None = None
    output_hessians: Mapping[str, Tensor] = field(default_factory=dict)  # of this block's linears, with gradients

    def __post_init__(self) -> None:
        self.at_once = TOKENS_AT_ONCE[self.model.device.type]

    def exchanging(self) -> AbstractContextManager[None]:
        """Return the phase in which several ranks wait for each other and exchange values."""
        return self.clock.phase("exchange") if self.ranks.count > 1 else nullcontext()

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

    def batches(self, block: int, first: int = 0) -> Iterator[range]:
        """Yield the numbers of documents that one forward takes: adjacent ones of equal length, where that is possible.

        Their order stays, and so does the order of the tokens in each Hessian. `first` is the first number.
        """
        assert self.activations is not None
        lengths = [len(tokens) for tokens in self.sequences]
        while first < len(lengths):
            self.progress.check()
            end = first + 1
            if self.model.takes_batches(block) and self.activations.hidden_only:
                most = first + self.at_once // lengths[first]
                while end < min(most, len(lengths)) and lengths[end] == lengths[first]:
                    end += 1
            yield range(first, end)
            first = end

    def run(self, block: int, numbers: range) -> State | None:
        """Run the loaded block on one document, or on a batch, and return what it passes on; None if it was stopped."""
        assert self.activations is not None
        key = id(self.activations), numbers
        if len(numbers) == 1:
            return self.model.run(block, self.sequences[numbers[0]], self.activations.get(numbers[0]), key)
        tokens = torch.stack([self.sequences[number] for number in numbers])
        return self.model.run(block, tokens, self.activations.get_batch(numbers), key)

    def forward(self, block: int) -> None:
        """Run the loaded block on every document, and replace each state by the one that the block passes on."""
        done = 0
        with self.clock.phase("forward"):
            while (done := self._replace(block, done)) < len(self.sequences):
                self.run_fewer(block)

    def _replace(self, block: int, done: int) -> int:
        """Replace the states behind the first `done` until a GPU has no memory left; return how many then are done."""
        assert self.activations is not None
        try:
            for numbers in self.batches(block, done):
                out = self.run(block, numbers)
                assert out is not None
                if len(numbers) > 1 and not out.passed:
                    self.activations.put_batch(numbers, out)
                    done = numbers[-1] + 1
                    continue
                for number in numbers:  # what is passed on is stored for each document
                    out = out if len(numbers) == 1 else self.run(block, range(number, number + 1))
                    assert out is not None
                    self.activations.put(number, out)
                    done = number + 1
        except torch.OutOfMemoryError:
            pass  # the caller goes on: here the traceback still holds tensors
        return done

    def run_fewer(self, block: int) -> None:
        """Let fewer documents run together, as a GPU ran out of memory; QuantkitError if they run alone already."""
        longest = max(map(len, self.sequences))
        if self.at_once < 2 * longest:
            raise QuantkitError(
                f"{self.model.blocks[block]}: the GPU has not enough memory for a document of {longest} tokens: use a "
                "smaller --max-length or --act-budget, or --device cpu"
            )
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        before, self.at_once = self.at_once, self.at_once // 2
        self.progress.warn(
            f"{self.model.blocks[block]}: the GPU has not enough memory for {before} tokens at a time, "
            f"{self.at_once} are tried; the last bits of sums may differ, a smaller --act-budget makes space"
        )


def calibrated(
    src: Checkpoint,
    recipe: Recipe,
    model: BlockRunner,
    sequences: Sequence[Tensor],
    work: Path,
    done: Sequence[Mapping[str, Any]],
    *,
    progress: Progress | None = None,
    act_budget: int | None = None,
    beside: bool = False,
    ranks: Ranks = ALONE,
) -> Iterator[Item | Commit]:
    """Yield every tensor of a dense checkpoint once, its linears quantized or pruned on `sequences` (int64 `[t]`).

    Each block is followed by a Commit; the tensors outside the blocks come last. `work` is the run's folder. It holds
    the activations after the last two blocks and, if they exceed `act_budget` bytes, the current ones. `done` has the
    journal lines of an interrupted run to continue. Facts of an item are those of `layer_solver.solve`; facts of a
    commit are block, phases, activations, form and ranks. With `beside` its activations may come late.

    Each of several ranks computes a part, and the first one alone yields tensors; all are given the same arguments.

    RecipeError for sequences that the model cannot take, or a tied linear that is not skipped. NumericError for
    unusable activations, Hessians or weights. CheckpointError for a model that cannot run block by block.
    """
    run = replace(new_run(src, recipe, model, sequences, work, progress, act_budget), beside=beside)
    _check(run)
    mine = split_documents([len(tokens) for tokens in sequences], ranks.count)[ranks.rank]
    # A copy of tokens in each forward would wait for a GPU.
    here = [tokens.to(model.device) for tokens in sequences[mine.start : mine.stop]]
    run = replace(run, sequences=here, ranks=ranks, first=mine.start)
    facts = [line["facts"] for line in done if "block" in line.get("facts", {})]
    finished = [f for f in facts if f["block"] != REST]
    last, every = len(model.blocks), SAVED_BLOCKS[model.device.type]
    if len(finished) < last:
        gptq.load_beside(model.device)
        _start(run, finished, done)
    for block in run.progress.bar(range(len(finished), last), "calibrate", last - len(finished)):
        yield from _block(run, block)
        saved, late = _save(run, block) if block + 1 < last and (block + 1) % every == 0 else (None, None)
        form = model.forms.get(block)
        _print_warnings(run)
        facts_ = {"block": block, "phases": run.clock.take(), "activations": saved, "form": form, "ranks": ranks.count}
        yield Commit(facts_, late)
    if len(facts) == len(finished):
        yield from _rest(run)
        yield Commit({"block": REST, "phases": run.clock.take()})


def split_documents(lengths: Sequence[int], count: int) -> list[range]:
    """Divide documents of `lengths` tokens over `count` ranks: adjacent ones, at least one for each, by tokens.

    RecipeError if there are fewer documents than ranks.
    """
    if len(lengths) < count > 1:
        raise RecipeError(
            f"{len(lengths)} calibration sequences for {count} processes: give more --samples, or start fewer processes"
        )
    ends = list(accumulate(lengths))
    bounds = [0]
    for rank in range(1, count):
        share = ends[-1] * rank / count
        nearest = min(range(len(ends)), key=lambda number: abs(ends[number] - share)) + 1
        bounds.append(min(max(nearest, bounds[-1] + 1), len(lengths) - count + rank))
    return [range(*bound) for bound in zip(bounds, [*bounds[1:], len(lengths)], strict=True)]


def new_run(
    src: Checkpoint,
    recipe: Recipe,
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
    Groups that the documents of several ranks show are taken in the order of the ranks.
    """
    seen_here: list[Group] = []
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
        seen_here += [Group(tuple(linears), once=len(calls) == 1) for calls, linears in shared.items()]
        waiting.difference_update(inputs)
        if waiting <= experts.keys():
            break
    groups: list[Group] = []
    waiting = set(targets)
    for group in chain.from_iterable(run.ranks.exchange(seen_here)):
        if linears := tuple(linear for linear in group.linears if linear in waiting):
            groups.append(Group(linears, group.once))
            waiting.difference_update(linears)
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


def with_hessians(run: Run, block: int, stage: Sequence[Group]) -> Iterator[list[Calibrated]]:
    """Yield the groups of a stage with their Hessians over the documents of all ranks, as many as memory allows.

    An expert that sees fewer tokens than it has input channels takes its Hessian from all tokens of the layer.
    """
    model = run.model
    starved: dict[str, str] = {}
    for groups in _batches(run, stage):
        found: list[Calibrated] = []
        hessians = collect(run, block, groups)
        with run.exchanging():
            counts = run.ranks.exchange([hessian.tokens for hessian in hessians])
        for group, hessian, tokens in zip(groups, hessians, map(sum, zip(*counts, strict=True)), strict=True):
            expert, k = model.experts.get(group.linears[0]), model.linears[group.linears[0]][1]
            if expert and run.recipe.calibration.moe == "routed" and tokens < k:
                starved |= dict.fromkeys(group.linears, f"{tokens} tokens for {k} input channels")
            else:
                facts = {"moe": run.recipe.calibration.moe} if expert else {}
                found.append(Calibrated(group, hessian, dict.fromkeys(group.linears, facts)))
        del hessians, hessian  # what is added up elsewhere is freed here
        _add_up(run, found)
        yield found
    if not starved:
        return
    model.run_on_all_tokens(model.experts[name] for name in starved)
    for groups in _batches(run, find_groups(run, block, list(starved))):
        found = []
        for group, hessian in zip(groups, collect(run, block, groups), strict=True):
            facts_of = {name: {"moe": "all", "few_routed": starved[name]} for name in group.linears}
            found.append(Calibrated(group, hessian, facts_of))
        del hessian
        _add_up(run, found)
        yield found
    model.run_on_all_tokens([])


def _add_up(run: Run, found: list[Calibrated]) -> None:
    """Choose the ranks that solve the groups of `found`, and put the sum of the Hessians of all ranks there.

    Several groups are divided over the ranks. The rows of a single one are, so that all ranks need its Hessian. The
    order of the sum is that of the ranks.
    """
    if run.ranks.count == 1 or not found:
        return
    owners: list[int | None] = [None]
    if len(found) > 1:
        work = [0] * run.ranks.count
        owners = [0] * len(found)
        costs = [sum(n * k * k for n, k in map(run.model.linears.__getitem__, each.group.linears)) for each in found]
        for number in sorted(range(len(found)), key=lambda number: -costs[number]):
            least = work.index(min(work))
            owners[number] = least
            work[least] += costs[number]
    here = [each.hessian.part() for each in found if each.hessian is not None]
    with run.exchanging(), closing(run.ranks.gather_each(here, owners)) as gathered:
        for number, parts in enumerate(gathered):
            summed = None
            if parts is not None:
                summed = _new_hessian(run, found[number].group)
                for part in parts:
                    summed.absorb(part)
            found[number] = found[number]._replace(hessian=summed, owner=owners[number])


def _solved(run: Run, found: Sequence[Calibrated], goals: Mapping[str, Goal]) -> Iterator[list[Item]]:
    """Yield the solved linears of each group."""

    def work(each: Calibrated) -> tuple[list[Item], list[str]]:
        items: list[Item] = []
        told = Recorder(run.progress)
        assert each.hessian is not None
        for part in _parts(run, each.group):
            with run.clock.phase("solve"):
                weights = {name: run.model.source_weight(name) for name in part}
                ranks = run.ranks if each.owner is None else ALONE
                chosen = {name: goals[name] for name in weights}
                items += solve(weights, chosen, each.hessian, run.recipe, told, ranks, run.output_hessians)
        return items, told.take()

    solved: Iterable[tuple[list[Item], list[str]]] = map(work, found)
    owners = [each.owner for each in found if each.owner is not None]
    if owners:
        with run.exchanging():
            solved = list(run.ranks.each(found, owners, work))
    for items, warnings in solved:
        for text in warnings if run.ranks.first else ():
            run.progress.warn(text)
        yield items


def _batches(run: Run, groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Yield the groups in batches whose Hessians fit `HESSIAN_BYTES`."""
    linears = run.model.linears
    return budget.divide(groups, lambda group: budget.hessian_bytes(linears[group.linears[0]][1]), budget.HESSIAN_BYTES)


def _parts(run: Run, group: Group) -> Iterator[list[str]]:
    """Yield the linears of a group in parts of at most `SOLVED_WEIGHTS`, as `all` makes one group of all experts."""
    return budget.divide(group.linears, lambda name: prod(run.model.linears[name]), budget.SOLVED_WEIGHTS)


def collect(run: Run, block: int, groups: Sequence[Group]) -> list[Hessian]:
    """Sum the Hessian of each group's input over this rank's documents, in one pass through the loaded block.

    The pass for a single group ends before its first linear runs. Where a check would wait for a GPU, all numbers are
    checked in the end, and a second pass names what is not finite.
    """
    checks = run.model.device.type == "cpu"
    while True:
        found = _sums(run, block, groups, checks)
        if found is None:
            run.run_fewer(block)
        elif checks or not any(hessian.may_be_broken() for hessian in found):
            return found
        else:
            checks = True


def _new_hessian(run: Run, group: Group, checks: bool = True) -> Hessian:
    """Return an empty Hessian for the input of a group. The many experts of a layer must do with short chunks."""
    first, model = group.linears[0], run.model
    chunk = LONG_CHUNK if model.device.type == "cuda" and first not in model.experts else CHUNK
    cap = run.recipe.gptq.cap_tokens
    return Hessian(model.linears[first][1], model.device, cap_tokens=cap, checks=checks, chunk=chunk)


def _sums(run: Run, block: int, groups: Sequence[Group], checks: bool) -> list[Hessian] | None:
    """Sum the Hessians in one pass; None if a GPU has no memory left."""
    model = run.model
    hessians = {group.linears[0]: _new_hessian(run, group, checks) for group in groups}
    stop = len(groups) == 1 and groups[0].once
    document = 0

    def see(linear: str, x: Tensor) -> bool:
        with run.clock.phase("hessian"), about(f"{linear}, calibration document {run.first + document}"):
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
            except torch.OutOfMemoryError:
                return None
    return list(hessians.values())


def check_sequences(recipe: Recipe, model: BlockRunner, sequences: Sequence[Tensor]) -> None:
    """Raise an error for calibration sequences that the model cannot run on."""
    longest = max((len(s) for s in sequences), default=0)
    if not longest:
        other = "--method magnitude" if recipe.layout is None else "--method rtn --clip none"
        raise RecipeError(f"no calibration sequences: give calibration data, or use {other}")
    tuned = recipe.distill > 0
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
    if recipe.tune:
        check_held_out(len(sequences))
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
    count = gradient_documents(map(len, run.sequences)) if run.recipe.output_aware else 0
    if count:
        run.gradients = measure(_embedded(run, count), resumed=bool(finished))
    if run.recipe.tune or count:
        run.unquantized = _follow_unquantized(run, len(finished), None if run.recipe.tune else count)
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


def _follow_unquantized(run: Run, blocks: int, count: int | None) -> Activations:
    """Return the activations of the unquantized model after its first `blocks` blocks: of all documents, or `count`."""
    stream = _embedded(run, count)
    for block in range(blocks):
        with run.clock.phase("load"):
            run.model.load_block(block)
        stream.forward(block)
        run.model.unload_block(block)
    assert stream.activations is not None
    return stream.activations


def _embedded(run: Run, count: int | None) -> Run:
    """Return a stream of the unquantized model, with the input of the first block: of all documents, or `count`."""
    stream = replace(run, activations=None, sequences=run.sequences[:count])
    _embed(stream, "unquantized-")
    return stream


def _load_saved(run: Run, finished: Sequence[Mapping[str, Any]]) -> int:
    """Load the last saved activations, and return the number of the block that they enter; 0 if there are none."""
    number = max((block for block, facts in enumerate(finished) if facts["activations"] is not None), default=-1)
    if number < 0:
        return 0
    problem = None
    try:
        parts, parity = finished[number]["activations"], _parity(run, number)
        mine = range(run.first, run.first + len(run.sequences))
        run.activations = Activations.load(
            run.work, run.act_budget, parity, parts, mine, run.model.device, run.ranks.rank
        )
    except CheckpointError as error:
        problem = str(error)
    problem = next((told for told in run.ranks.exchange(problem) if told is not None), None)
    if problem is not None:
        if run.ranks.first:
            run.progress.warn(f"{problem}: the activations of {len(finished)} finished blocks are computed again")
        return 0
    run.model.forms[number] = finished[number]["form"]
    with run.clock.phase("load"):
        run.model.prepare(embeddings=False)
    return number + 1


def _embed(run: Run, kind: str = "") -> None:
    """Fill `run.activations` with the input of the first block; `kind` begins the names of its files."""
    model = run.model
    with run.clock.phase("load"):
        model.prepare(embeddings=True)
    with run.clock.phase("forward"):
        first = model.embed(run.sequences[0]).hidden
        rows = [len(tokens) for tokens in run.sequences]
        if len(first) != rows[0]:  # padding, prompts or streams come with the tokens
            rows = [len(model.embed(tokens).hidden) for tokens in run.sequences]
        like = tuple(first.shape[1:])
        run.activations = Activations(
            run.work, run.act_budget, rows, like, model.dtype, model.device, run.ranks.rank, kind
        )
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
    if run.gradients is not None:
        with run.clock.phase("gradients"):
            run.output_hessians = run.gradients.of_linears(_unquantized(run, run.gradients.documents), block, goals)
    if run.unquantized is not None:
        _unquantized(run).forward(block)
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
        for found in with_hessians(run, block, stage):
            for each, items in zip(found, _solved(run, found, goals), strict=True):
                for item in items:
                    assert not isinstance(item.value, Packed)  # only conversions yield packed items
                    name = item.name.removesuffix(".weight")
                    _put_back(model, name, item.value)
                    solved[item.name] = item._replace(facts={**(item.facts or {}), **each.facts[name]})
                    run.progress.detail(_detail(item))
    model.run_on_all_tokens([])
    run.output_hessians = {}
    if run.recipe.tune:
        with run.clock.phase("tune"):
            called = [item for key, item in solved.items() if key.removesuffix(".weight") not in uncalled]
            for item in tune(run, block, run.recipe.tune, called):
                assert isinstance(item.value, QuantizedTensor)
                _put_back(model, item.name.removesuffix(".weight"), item.value)
                solved[item.name] = item
    if block + 1 < len(model.blocks):
        run.forward(block)
    model.unload_block(block)
    for name in model.stored(block) if run.ranks.first else ():
        yield solved.pop(name) if name in solved else Item(name, run.src.get(name))


def _unquantized(run: Run, count: int | None = None) -> Run:
    """Return the run as the stream of the unquantized model, of its first `count` documents or of all that it has."""
    assert run.unquantized is not None
    chosen = run.sequences[: len(run.unquantized.rows) if count is None else count]
    return replace(run, activations=run.unquantized, sequences=chosen)


def _print_warnings(run: Run) -> None:
    """Let the first rank print what the others had to say since the last call."""
    said = run.progress.take() if isinstance(run.progress, Recorder) else []
    told = run.ranks.exchange(said)
    for rank, warnings in enumerate(told) if run.ranks.first else ():
        for text in warnings:
            run.progress.warn(f"rank {rank}: {text}")


def _detail(item: Item) -> str:
    facts = item.facts or {}
    found = [(key, facts.get(key)) for key in ("method", "relative_error", "loss", "rtn_loss", "damp", "tokens")]
    return f"{item.name}: " + ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in found)


def _rest(run: Run) -> Iterator[Item]:
    """Yield the tensors outside the blocks; a linear there that is not skipped is solved without a Hessian."""
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
            item = solve_uncalibrated(linear, tensor.to(run.model.device), goal, run.recipe, "it is outside the blocks")
        yield item


def _save(run: Run, block: int) -> tuple[list[dict[str, Any]] | None, Callable[[], dict[str, Any]] | None]:
    """Save the activations after a block; return the facts of each rank's part, or the function that saves a copy."""
    assert run.activations is not None
    parity = _parity(run, block)
    with run.clock.phase("save"):
        copied = run.activations.copied(run.model.device) if run.beside and run.ranks.count == 1 else None
        if copied is not None:
            return None, lambda: {"activations": [copied.save(parity)]}
        facts = run.activations.save(parity)
    with run.exchanging():
        return run.ranks.exchange(facts), None


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
    layout = run.recipe.output_layout
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
