"""The interface of a stage, and a loaded block: its linears that share an input, divided into tasks
in the order of solving.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from torch import Tensor

from quantkit.algorithms.hessian import Hessian
from quantkit.calibration import budget
from quantkit.calibration.run import Run, Stream
from quantkit.checkpoint.writer import Item
from quantkit.core.quantized_tensor import Goal, QuantizedTensor
from quantkit.core.threads import divide, grouped
from quantkit.models.weights import free_gpu_memory


@dataclass(frozen=True)
class Group:
    """List linears that receive the same tensor, in order of first call.

    `once`: a document calls them once. `normalised`: their input is a norm's output, with a row for
    each token.
    """

    linears: tuple[str, ...]
    once: bool = True
    normalised: bool = False


@dataclass
class Task:
    """A group to solve, its Hessian, facts for the report, and the rank that solves it.

    Once summed, the Hessian covers all documents. It is None on a rank that does not solve the
    group. With `owner` None, each rank solves some of the rows.
    """

    group: Group
    facts: dict[str, Any] = field(default_factory=dict)
    hessian: Hessian | None = None
    owner: int | None = None


@dataclass
class LoadedBlock:
    """Hold a block in memory: its number, the `stream` that enters it, its goals, and solved
    weights by tensor name. The number behind the last block stands for the output head.

    `uncalled` gives the reason why a text-only pass never calls a linear. `starved` names the
    experts with too few tokens; the loop then makes tasks of all tokens for them. `floors` has the
    least scale of each row, float32 `[n]`, of some linears.
    """

    run: Run
    stream: Stream
    index: int
    goals: Mapping[str, Goal]
    uncalled: Mapping[str, str]
    solved: dict[str, Item] = field(default_factory=dict)
    starved: dict[str, str] = field(default_factory=dict)
    floors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The module path of the block."""
        return self.run.model.blocks[self.index]

    def put_back(self, item: Item) -> None:
        """Let a solved linear take the place of the original one."""
        assert isinstance(
            item.value, Tensor | QuantizedTensor
        )  # only conversions yield packed items
        if self.index < len(self.run.model.blocks):
            self.run.put_back(item.name.removesuffix(".weight"), item.value)
        self.solved[item.name] = item


def quantized(items: Mapping[str, Item]) -> dict[str, QuantizedTensor]:
    """Return the values of the items that are quantized, by the names of their linears."""
    return {
        name.removesuffix(".weight"): item.value
        for name, item in items.items()
        if isinstance(item.value, QuantizedTensor)
    }


class Stage:
    """A part of a calibrated run. The loop calls each step of all stages, in their order; by
    default a step is empty.

    A stage may hold state for later stages of the same run.
    """

    def bytes(self, sizes: budget.Sizes) -> budget.Peaks:
        """Bound the memory that the stage takes in a run of such sizes."""
        return budget.Peaks()

    def check(self, sequences: Sequence[Tensor]) -> None:
        """Raise RecipeError for calibration sequences that the stage cannot work with."""

    def start(self, run: Run, finished: int) -> None:
        """Begin a run after `finished` blocks of a stopped one; no block is loaded."""

    def enter(self, block: LoadedBlock) -> None:
        """Work on a loaded block before any of its linears is solved."""

    def work(self, block: LoadedBlock, tasks: list[Task]) -> None:
        """Work on independent groups; their Hessians fit into memory together.

        A stage may remove tasks from the list.
        """

    def leave(self, block: LoadedBlock) -> None:
        """Work on a block whose linears are all solved."""


def tasks(block: LoadedBlock) -> Iterator[list[Task]]:
    """Yield independent groups of a loaded block, as many at a time as memory allows.

    The caller solves them, and puts the solved linears into the block, before it takes the next
    ones. If the caller names an expert as starved, it is yielded again, with all tokens of the
    layer.
    """
    run, model, moe = block.run, block.run.model, block.run.recipe.calibration.moe
    if moe == "all":
        model.run_on_all_tokens(
            model.experts[name] for name in block.goals if name in model.experts
        )
    with run.clock.phase("forward"):
        reached = [name for name in block.goals if name not in block.uncalled]
        groups = find_groups(block, reached) if reached else []
    for step in find_steps(run, groups):
        yield from _divided(run, step, {name: {"moe": moe} for name in model.experts})
        starved = [name for group in step for name in group.linears if name in block.starved]
        if starved:
            model.run_on_all_tokens(model.experts[name] for name in starved)
            facts = {name: {"moe": "all", "few_routed": block.starved[name]} for name in starved}
            yield from _divided(run, find_groups(block, starved), facts)
            model.run_on_all_tokens([])
    model.run_on_all_tokens([])


def _divided(
    run: Run, groups: Sequence[Group], facts: Mapping[str, dict[str, Any]]
) -> Iterator[list[Task]]:
    """Divide groups into tasks with Hessians of at most `most_summed` bytes, the same on all ranks;
    the linears of a group have the same facts.
    """
    device = run.model.device
    free = free_gpu_memory(device) if device.type == "cuda" else None
    most = min(run.ranks.exchange(budget.most_summed(free)))
    width = {group: run.model.sizes[group.linears[0]][1] for group in groups}
    size = {group: Hessian.bytes(k) + Hessian.chunk_bytes(k) for group, k in width.items()}
    for some in divide(groups, size.__getitem__, most):
        yield [Task(group, {name: facts.get(name, {}) for name in group.linears}) for group in some]


def find_groups(block: LoadedBlock, targets: Sequence[str]) -> list[Group]:
    """Group a loaded block's `targets` that receive the same tensor object, in order of first call.

    Documents are run until every target was called. One is enough, unless tokens choose experts
    that are not unfused. Targets that no document reaches become groups at the end, each with its
    expert's targets of the same input. Groups from several ranks are merged in rank order.
    """
    groups: list[Group] = []
    waiting = set(targets)
    for group in chain.from_iterable(block.run.ranks.exchange(_seen_here(block, targets))):
        if linears := tuple(linear for linear in group.linears if linear in waiting):
            groups.append(replace(group, linears=linears))
            waiting.difference_update(linears)
    experts = block.run.model.experts
    alike = ((experts.get(linear), linear) for linear in targets if linear in waiting)
    idle = grouped(
        ((each.owner, each.number, each.role == "down") if each else linear, linear)
        for each, linear in alike
    )
    return groups + [Group(tuple(linears)) for linears in idle.values()]


def _seen_here(block: LoadedBlock, targets: Sequence[str]) -> list[Group]:
    """Group the `targets` that the documents of this rank call."""
    groups, waiting = list[Group](), set(targets)
    for number in range(len(block.stream.sequences)):
        block.run.progress.check()
        found = _seen_in(block, number, sorted(waiting))
        groups += found
        waiting.difference_update(linear for group in found for linear in group.linears)
        if waiting <= block.run.model.experts.keys():
            break
    return groups


def _seen_in(block: LoadedBlock, number: int, targets: Sequence[str]) -> list[Group]:
    """Group the `targets` that one document calls."""
    model, tokens = block.run.model, block.stream.sequences[number]
    inputs: dict[str, list[Tensor]] = {}  # references, so that no two inputs share an id
    others = set[str]()  # linears whose input is not a norm's output with a row for each token

    def see(linear: str, x: Tensor) -> bool:
        inputs.setdefault(linear, []).append(x)
        if x.numel() != len(tokens) * x.shape[-1] or not is_normalised(x):
            others.add(linear)
        return False

    with model.watching_norms(block.index) as is_normalised, model.watching(targets, see):
        model.run(block.index, tokens, block.stream.activations.get(number))
    shared = grouped((tuple(id(x) for x in seen), linear) for linear, seen in inputs.items())
    return [
        Group(tuple(linears), len(inputs[linears[0]]) == 1, others.isdisjoint(linears))
        for linears in shared.values()
    ]


def find_steps(run: Run, groups: Sequence[Group]) -> list[list[Group]]:
    """Divide the groups into steps, one after the other; the groups of a step do not depend on each
    other.

    True-sequential: one group is a step, or the same projections of all experts of a layer. Else
    there is one step.
    """
    if not run.recipe.true_sequential:
        return [list(groups)]
    experts = ((run.model.experts.get(group.linears[0]), group) for group in groups)
    steps = grouped(
        ((each.owner, each.role == "down") if each else group, group) for each, group in experts
    )
    return list(steps.values())
