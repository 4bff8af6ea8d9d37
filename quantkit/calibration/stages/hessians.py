"""Sum the Hessian of each group's input over all documents, on all ranks (ALGORITHMS 2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing

import torch
from torch import Tensor

from quantkit.algorithms.hessian import CHUNK, LONG_CHUNK, Hessian
from quantkit.calibration.budget import HESSIAN_BYTES, Peaks, Sizes
from quantkit.calibration.run import Run
from quantkit.calibration.stages.base import Group, LoadedBlock, Stage, Task
from quantkit.core.ranks import ranks
from quantkit.errors import NumericError, about
from quantkit.models.families import EXPERT


class Hessians(Stage):
    """Give each task its Hessian, and the rank that solves it.

    An expert that sees fewer tokens than it has input channels is starved: its task is removed.
    """

    def bytes(self, sizes: Sizes) -> Peaks:
        """Count the Hessians of a layer's experts on each rank, and a chunk of the widest linear.

        A rank holds Hessians of its own documents, and the sums over all ranks that it will solve.
        """
        experts = {
            (found[1], found[2], k)
            for module, (_, k) in sizes.linears.items()
            if (found := EXPERT.match(module))
        }
        count, of_layers = ranks().count, Counter[tuple[str, int]]()
        for layer, _, k in experts:
            of_layers[layer, k] += Hessian.bytes(k) + Hessian.chunk_bytes(k)
        summed = min(HESSIAN_BYTES, max(of_layers.values(), default=0))
        at = {"Hessians of experts": summed * (count + (count > 1)) // count}
        if sizes.on_gpu:
            at["chunk of a Hessian"] = Hessian.chunk_bytes(sizes.channels, "cuda", sizes.width)
        return Peaks(at=at)

    def work(self, block: LoadedBlock, tasks: list[Task]) -> None:
        """Sum the Hessians of some tasks in one pass."""
        for task, hessian in zip(
            tasks, collect(block, [task.group for task in tasks]), strict=True
        ):
            task.hessian = hessian
        del hessian  # frees sums that another rank adds up
        if tasks[0].group.linears[0] not in block.starved:
            _remove_starved(block, tasks)
        _add_up(block.run, tasks)


def _remove_starved(block: LoadedBlock, tasks: list[Task]) -> None:
    """Count the tokens of all ranks, and remove the tasks of experts that have too few."""
    run = block.run
    with run.exchanging():
        counts = run.ranks.exchange([task.hessian.tokens if task.hessian else 0 for task in tasks])
    for task, tokens in zip(list(tasks), map(sum, zip(*counts, strict=True)), strict=True):
        linears = task.group.linears
        k = run.model.linears[linears[0]][1]
        if (
            linears[0] in run.model.experts
            and run.recipe.calibration.moe == "routed"
            and tokens < k
        ):
            block.starved |= dict.fromkeys(linears, f"{tokens} tokens for {k} input channels")
            tasks.remove(task)


def _add_up(run: Run, tasks: Sequence[Task]) -> None:
    """Choose the ranks that solve the tasks, and put the sum of the Hessians of all ranks there.

    Several tasks are divided over the ranks. A single task is divided by rows, so all ranks need
    its Hessian. The parts are added in the order of the ranks.
    """
    if run.ranks.count == 1 or not tasks:
        return
    owners: list[int | None] = [None]
    if len(tasks) > 1:
        shapes = [[run.model.linears[linear] for linear in task.group.linears] for task in tasks]
        owners = [*run.ranks.owners([sum(n * k * k for n, k in each) for each in shapes])]
    here = [task.hessian.part() for task in tasks if task.hessian is not None]
    with run.exchanging(), closing(run.ranks.gather_each(here, owners)) as gathered:
        for task, owner, parts in zip(tasks, owners, gathered, strict=True):
            task.hessian, task.owner = None, owner
            if parts is not None:
                task.hessian = new_hessian(run, task.group)
                for part in parts:
                    task.hessian.absorb(part)


def collect(block: LoadedBlock, groups: Sequence[Group]) -> list[Hessian]:
    """Sum the Hessian of each group's input over this rank's documents, in one pass through the
    loaded block.

    The pass for a single group ends before its first linear runs. A check of each token would wait
    for a GPU. So sums are checked at the end, and a second pass names the linear.
    """
    checks = block.run.model.device.type == "cpu"
    while True:
        found = sum_once(block, groups, checks)
        if found is None:
            block.stream.run_fewer(block.index)
        elif len(found) < len(groups):
            block.stream.waiting.close()
        elif checks or not any(hessian.may_be_broken() for hessian in found):
            return found
        else:
            checks = True


def new_hessian(run: Run, group: Group, checks: bool = True) -> Hessian:
    """Make an empty Hessian for the input of a group. The many experts of a layer must do with
    short chunks.
    """
    first, model = group.linears[0], run.model
    chunk = LONG_CHUNK if model.device.type == "cuda" and first not in model.experts else CHUNK
    return Hessian(model.linears[first][1], model.device, checks=checks, chunk=chunk)


def token_weights(block: LoadedBlock, documents: Sequence[int]) -> Tensor:
    """Weigh the tokens of documents of equal length for Hessians of normalised inputs: float32
    `[documents, t]`.

    All later tokens attend to the first one, so its errors spread.
    """
    length = len(block.stream.sequences[documents[0]])
    found = torch.ones(len(documents), length, device=block.run.model.device)
    found[:, 0] = max(1.0, block.run.recipe.gptq.first_token * length)
    return found


def sum_once(block: LoadedBlock, groups: Sequence[Group], checks: bool) -> list[Hessian] | None:
    """Sum the Hessians in one pass; None if a GPU has no memory left, no Hessian if passes that
    waited were too far.
    """
    run, stream = block.run, block.stream
    hessians = {group.linears[0]: new_hessian(run, group, checks) for group in groups}
    stop = len(groups) == 1 and groups[0].once
    normalised = {group.linears[0] for group in groups if group.normalised}
    waits = (
        stop and groups[0].linears[0] not in run.model.experts
    )  # which are not called in the order of solving
    numbers: Sequence[int] = ()
    document, weights, seen = 0, None, False
    if not waits:
        stream.waiting.close()

    def see(linear: str, x: Tensor) -> bool:
        nonlocal seen
        seen, fits = True, waits and stream.may_wait(numbers, x)
        with (
            run.clock.phase("hessian"),
            about(f"{linear}, calibration document {run.first + document}"),
        ):
            hessians[linear].add(x, weights if linear in normalised else None)
        return stop and not (fits and stream.waiting.wait())

    with run.clock.phase("forward"), run.model.watching(hessians, see):
        for numbers in stream.forwards(block.index):
            document, weights, seen = numbers[0], token_weights(block, numbers), False
            waited = tuple(numbers) in stream.waiting
            try:
                stream.run(block.index, numbers, waits)
            except NumericError:
                stream.waiting.close()
                for document in numbers if len(numbers) > 1 else ():
                    weights = token_weights(block, [document])
                    stream.run(block.index, [document])
                raise
            except torch.OutOfMemoryError:
                return None
            if waited and not seen:  # it calls its linears in another order than the first document
                return []
    return list(hessians.values())
