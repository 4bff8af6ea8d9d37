"""The statistics of all documents, on all ranks, that a solver needs: the Hessian of each group's
input (ALGORITHMS 2), and the largest sums of rows that vLLM holds in float16 (docs/layouts.md 9b).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from quantkit.algorithms.hessian import CHUNK, LONG_CHUNK, Hessian
from quantkit.calibration.budget import Peaks, Sizes, most_summed
from quantkit.calibration.run import Run
from quantkit.calibration.stages.base import Group, LoadedBlock, Stage, Task, quantized
from quantkit.checkpoint.report import ROW_SUM
from quantkit.core.quantized_tensor import Scheme
from quantkit.core.ranks import ranks
from quantkit.engines.readers import sums_in_float16
from quantkit.errors import about
from quantkit.layouts.humming import Humming
from quantkit.models.families import EXPERT
from quantkit.text.sequences import MOST_HELD_OUT

#: Sources whose held-out inputs memory is planned for: those of the package, and two others.
HELD_OUT_SOURCES = 8
#: A sum from here on is reported: served text may be worse than the calibration tokens.
LEAST = torch.finfo(torch.float16).max / 4
#: Raised scales bring the sums of the original weights below this. Those of codes may be somewhat
#: larger.
AIM = 0.9 * LEAST


class Hessians(Stage):
    """Give each task its Hessian, and the rank that solves it.

    An expert that sees fewer tokens than it has input channels is starved: its task is removed.
    """

    def bytes(self, sizes: Sizes) -> Peaks:
        """Count the Hessians of a layer's experts on each rank, and the widest linear's chunk and
        held-out inputs.

        A rank holds Hessians of its own documents, and the sums over all ranks that it will solve.
        """
        experts = {
            (found[1], found[2], k)
            for module, (_, k) in sizes.linears.items()
            if (found := EXPERT.match(module))
        }
        count, of_layers = ranks().count, Counter((layer, k) for layer, _, k in experts)
        most = max(
            (n * (Hessian.bytes(k) + Hessian.chunk_bytes(k)) for (_, k), n in of_layers.items()),
            default=0,
        )
        free = None if sizes.gpu_memory is None else sizes.gpu_memory - sizes.block
        summed = min(most_summed(free), most)
        at = {
            "Hessians of experts": summed * (count + (count > 1)) // count,
            "held-out inputs": HELD_OUT_SOURCES * MOST_HELD_OUT * sizes.channels * sizes.width,
        }
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
        k = run.model.sizes[linears[0]][1]
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
    shapes = [[run.model.sizes[linear] for linear in task.group.linears] for task in tasks]
    costs = [sum(n * k * k for n, k in each) for each in shapes]
    owners = run.ranks.owners(costs) if len(tasks) > 1 else [None]
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
    for a GPU. So sums are checked at the end, and a second pass, one document at a time, names the
    linear and the document.
    """
    checks, singly = block.run.model.device.type == "cpu", False
    while True:
        found = sum_once(block, groups, checks, singly)
        if found is None:
            block.stream.run_fewer(block.index)
        elif len(found) < len(groups):
            block.stream.waiting.close()
        elif checks or not any(hessian.may_be_broken() for hessian in found):
            return found
        else:
            block.stream.waiting.close()
            checks = singly = True


def new_hessian(run: Run, group: Group, checks: bool = True) -> Hessian:
    """Make an empty Hessian for the input of a group. The many experts of a layer must do with
    short chunks.
    """
    first, model = group.linears[0], run.model
    chunk = LONG_CHUNK if model.device.type == "cuda" and first not in model.experts else CHUNK
    return Hessian(model.sizes[first][1], model.device, checks=checks, chunk=chunk)


def token_weights(block: LoadedBlock, documents: Sequence[int]) -> Tensor:
    """Weigh the tokens of documents of equal length for Hessians of normalised inputs: float32
    `[documents, t]`.

    All later tokens attend to the first one, so its errors spread.
    """
    length = len(block.stream.sequences[documents[0]])
    found = torch.ones(len(documents), length, device=block.run.model.device)
    found[:, 0] = max(1.0, block.run.recipe.gptq.first_token * length)
    return found


def sum_once(
    block: LoadedBlock, groups: Sequence[Group], checks: bool, singly: bool = False
) -> list[Hessian] | None:
    """Sum the Hessians in one pass, with `singly` of one document after the other.

    None if a GPU has no memory left, no Hessian if passes that waited were too far.
    """
    run, stream = block.run, block.stream
    hessians = {group.linears[0]: new_hessian(run, group, checks) for group in groups}
    stop = len(groups) == 1 and groups[0].once
    normalised = {group.linears[0] for group in groups if group.normalised}
    # Experts are not called in the order of solving, and nothing follows the head.
    first = groups[0].linears[0]
    waits = stop and first not in run.model.experts and first != run.model.head
    numbers: Sequence[int] = ()
    weights, seen, source = None, False, None
    if not waits:
        stream.waiting.close()

    def see(linear: str, x: Tensor) -> bool:
        nonlocal seen
        seen, fits = True, waits and stream.may_wait(numbers, x)
        with (
            run.clock.phase("hessian"),
            about(f"{linear}, calibration document {run.first + numbers[0]}"),
        ):
            if source is None:
                hessians[linear].add(x, weights if linear in normalised else None)
            else:
                hessians[linear].hold_out(
                    source, without_first(x, len(stream.sequences[numbers[0]]))
                )
        return stop and not (fits and stream.waiting.wait())

    with run.clock.phase("forward"), run.model.watching(hessians, see):
        for numbers in stream.forwards(block.index, at_once=0 if singly else None):
            weights, seen = token_weights(block, numbers), False
            source = run.held_out_source(numbers[0])
            waited = tuple(numbers) in stream.waiting
            try:
                stream.run(block.index, numbers, waits)
            except torch.OutOfMemoryError:
                return None
            if waited and not seen:  # it calls its linears in another order than the first document
                return []
    return list(hessians.values())


def without_first(x: Tensor, tokens: int) -> Tensor:
    """Drop the first of a document's `tokens` from an input with a row `[k]` for each token.

    Its input hardly depends on the text, and may have most of the energy.
    """
    rows = x.reshape(-1, x.shape[-1])
    return rows[1:] if len(rows) == tokens else rows


class RowSums(Stage):
    """Find the least scales of FP6 and FP5 with which sums stay small.

    Where a scale is raised, only small weights lose precision. Integers would lose a bit for each
    power of two.
    """

    def enter(self, block: LoadedBlock) -> None:
        """Measure the largest outputs of the unquantized block, in a pass of its own."""
        recipe, floats = block.run.recipe, dict[str, Scheme]()
        if recipe.layout == Humming.NAME and recipe.factored and recipe.clip == "search":
            floats = {
                linear: goal
                for linear, goal in block.goals.items()
                if isinstance(goal, Scheme) and goal.format.is_float
            }
        with _peaks(block, floats) as found:
            if found:
                block.stream.forward(block.index, keep=False)
        block.floors.update({linear: peak / AIM for linear, peak in found.items()})


@contextmanager
def measured(block: LoadedBlock) -> Iterator[bool]:
    """Measure solved linears while the block runs on all documents; add ROW_SUM to the facts of
    those near overflow.

    A sum is `|output - bias| / scale`. Yields False if vLLM has no kernel that overflows so.
    """
    values = quantized(block.solved)
    with _peaks(block, {linear: value.scheme for linear, value in values.items()}) as found:
        yield bool(found)
    for linear, peak in found.items():
        scales = values[linear].scales[: len(peak), 0].to(peak.device, torch.float32).abs()
        largest = float((peak / scales).nan_to_num(0.0, posinf=0.0).amax())  # a scale may be 0
        if largest > LEAST:
            item = block.solved[f"{linear}.weight"]
            block.solved[item.name] = item._replace(facts={**(item.facts or {}), ROW_SUM: largest})


@contextmanager
def _peaks(block: LoadedBlock, schemes: Mapping[str, Scheme]) -> Iterator[dict[str, Tensor]]:
    """Measure the largest `|output - bias|` of each row, float32 `[n]`, of linears whose sums vLLM
    holds in float16.

    All ranks have the largest of all when the context ends.
    """
    run, layout, peaks = block.run, block.run.recipe.layout or "", dict[str, Tensor]()

    def see(linear: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        bias = getattr(module, "bias", None)
        rows = (output if bias is None else output - bias).flatten(0, -2)
        if len(rows):
            peaks[linear] = torch.maximum(
                peaks[linear], torch.maximum(rows.amax(0), -rows.amin(0)).float()
            )

    with ExitStack() as stack:
        for linear, scheme in schemes.items():
            n, k = run.model.sizes[linear]
            if linear not in block.uncalled and sums_in_float16(
                layout, scheme, n, k, linear in run.model.experts
            ):
                peaks[linear] = torch.zeros(n, device=run.model.device)
                module = run.model.module.get_submodule(run.model.places[linear])
                stack.callback(module.register_forward_hook(partial(see, linear)).remove)
        yield peaks
    for part in run.ranks.gather(peaks) if peaks else ():
        peaks.update({linear: torch.maximum(peak, part[linear]) for linear, peak in peaks.items()})
