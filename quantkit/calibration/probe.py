"""How long a run will take, from a short measured probe: the run itself on its first blocks and
some of its documents.

Solving a block does not depend on the number of documents, all else grows with their tokens. The
true time depends on the machine's other work, so a range is stated.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import ceil, prod
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import torch
from torch import Tensor

from quantkit.calibration.budget import RATE, gradient_documents, rounders, solving_work
from quantkit.calibration.loop import calibrated, new_run, streamed
from quantkit.calibration.stages.base import LoadedBlock, Stage, Task
from quantkit.calibration.stages.tune import BATCH, CHECKS, HELD_OUT
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import Commit
from quantkit.core.quantized_tensor import Goal
from quantkit.models.block_runner import BlockRunner
from quantkit.progress import QUIET, Progress, Recorder
from quantkit.recipes.recipe import Recipe

_T = TypeVar("_T")
#: Blocks of a probe. The second is measured: it is neither slow like the first, nor without a
#: successor like the last.
BLOCKS = 3
#: The phases that grow with tokens, and the fewest tokens of a document of a probe.
GROWING, LEAST = ("forward", "hessian", "save"), 16
#: Tokens of a probe without tuning, which needs some whole documents.
TOKENS = 4096
#: Seconds after which a probe ends, and what it says before it begins.
MOST_SECONDS = 30.0
BEGINS = f"the speed of this machine is measured on a few blocks, in about {MOST_SECONDS:.0f} s"
#: The range that is stated, relative to the estimate; and if the probe was stopped.
SPREAD, WIDE = (0.7, 1.5), (0.5, 2.0)
#: Seconds of each run, and bytes of the source a second, for reading, writing and opening: of two
#: cores, and beside a GPU.
FIXED, BYTES_A_SECOND = {"cpu": 4.0, "cuda": 8.0}, {"cpu": 6e8, "cuda": 1.2e9}
#: Products of weights and tokens below which a run takes less time than it is worth to be probed.
SMALL = {device: 3 * rate for device, rate in RATE.items()}
#: The same for runs without text, in weights.
FEW_WEIGHTS = 5e7


def is_worth_a_probe(
    recipe: Recipe, weights: int, sequences: Sequence[Tensor], device: str
) -> bool:
    """Return True if a run on `weights` takes more than some seconds."""
    if not recipe.calibrated:
        return weights >= FEW_WEIGHTS
    lengths = [len(tokens) for tokens in sequences]
    tuned = 3 * recipe.tune * BATCH * sum(lengths) / max(1, len(lengths))
    return weights * (sum(lengths) + tuned) >= SMALL[device]


def probe(
    model: BlockRunner,
    recipe: Recipe,
    goals: Mapping[str, Goal | None],
    sequences: Sequence[Tensor],
    *,
    progress: Progress,
    evaluated: int = 0,
) -> tuple[float, float]:
    """Measure a small part of a run and estimate the least and the most seconds of the whole.

    `model` has not run. `goals` has the goal of each linear, and `sequences` are int64 `[t]`. The
    run also measures on `evaluated` tokens, before and after. Raises as the run would.
    """
    src, watch = model.src, _Watch(progress)
    shapes = [shape for name, shape in model.linears.items() if goals.get(name) is not None]
    weights, (low, high) = sum(n * k for n, k in shapes), SPREAD
    kind = model.device.type
    seconds = FIXED[kind] + src.source_bytes / BYTES_A_SECOND[kind]
    each = 1 / RATE[kind]
    if not recipe.calibrated:
        seconds += _rounding(src, recipe, goals, model.device)
    else:
        meter = _Meter(watch, each)
        try:
            some = model.first_blocks(BLOCKS)
            seconds += _calibrating(recipe, some, len(model.blocks), sequences, watch, meter)
        except _Late:
            # What was done in time tells of the rest: each product with a token, and solving.
            low, high = WIDE
            lengths = [*map(len, sequences)]
            tokens = sum(lengths) + (_passes(lengths, recipe.tune) if recipe.tune else 0)
            seconds += meter.each * weights * tokens + meter.solving * solving_work(shapes)
        each = meter.each
        passes = _passes([*map(len, sequences)], recipe.tune_scales)
        seconds += 4 / 3 * each * weights * passes if recipe.tune_scales else 0
    head = max((prod(src.shape(name)) for name in src.names()), default=0)
    seconds += 2 * each * evaluated * (weights + head)
    return low * seconds, high * seconds


def _rounding(
    src: Checkpoint, recipe: Recipe, goals: Mapping[str, Goal | None], device: torch.device
) -> float:
    """Estimate the seconds of a run without text from some linears of middle size, which all
    threads solve as the run does; the first one warms up.
    """
    names = [f"{name}.weight" for name, goal in goals.items() if goal is not None]
    sizes = {name: prod(src.shape(name)) for name in names}
    some = sorted(sizes, key=sizes.__getitem__)[len(sizes) // 2 :][: 2 * rounders(device)]

    def solve(names: Sequence[str]) -> None:
        rest = {*src.names()}.difference(names)
        for _ in streamed(src, recipe, goals, rest, lambda i: i, QUIET, device, lambda names: {}):
            pass

    solve(some[:1])
    begun = time.perf_counter()
    solve(some)
    return (time.perf_counter() - begun) * sum(sizes.values()) / sum(sizes[name] for name in some)


def _calibrating(
    recipe: Recipe,
    model: BlockRunner,
    blocks: int,
    sequences: Sequence[Tensor],
    watch: _Watch,
    meter: _Meter,
) -> float:
    lengths = [len(tokens) for tokens in sequences]
    some = _typical(
        sequences, HELD_OUT if recipe.tune else ceil(TOKENS * len(lengths) / sum(lengths))
    )
    if model.device.type == "cpu":  # a part of the time passes before the first linear is solved
        weights = max(1, sum(n * k for n, k in model.linears.values()) // len(model.blocks))
        most = MOST_SECONDS * RATE["cpu"] / 6 / weights / len(some)
        some = [tokens[: max(LEAST, int(most))] for tokens in some]
    here = list(map(len, some))
    times = sum(lengths) / sum(here)
    with tempfile.TemporaryDirectory() as work:
        once = replace(recipe, tune=min(recipe.tune, 1))
        run = new_run(once, model, some, Path(work), progress=watch)
        meter.times = times
        steps = calibrated(run, [], meter)
        phases = (step.facts["phases"] for step in steps if isinstance(step, Commit))
        commits: list[dict[str, float]] = list(islice(phases, min(2, len(model.blocks))))
    first, each = commits[0], commits[-1]
    grows = times * sum(each.get(phase, 0.0) for phase in GROWING)
    tuned = each.get("tune", 0.0) * _passes(lengths, recipe.tune) / _passes(here, 1)
    of_blocks = blocks * (each.get("load", 0.0) + each.get("solve", 0.0) + grows + tuned)
    of_blocks += meter.solving * solving_work([model.sizes[name] for name in run.head])
    share = sum(lengths[: gradient_documents(lengths)]) / sum(here[: gradient_documents(here)])
    return of_blocks + _gradients(blocks, first, watch) * share


def _gradients(blocks: int, first: Mapping[str, float], watch: _Watch) -> float:
    """Estimate the seconds of output gradients of the probe's documents through all blocks."""
    forward, back = (watch.seconds[f"gradients, {way}"] for way in ("forward", "backward"))
    sampling = first.get("gradients", 0.0) - sum(back)
    return blocks * sum(map(fmean, filter(None, (forward, back)))) + max(0.0, sampling)


def _passes(lengths: Sequence[int], steps: int) -> float:
    """Count the tokens of the forward passes that tune a block. A pass with gradients counts three
    times.
    """
    held_out = sum(lengths[HELD_OUT - 1 :: HELD_OUT])
    batch = min(BATCH, len(lengths) - len(lengths) // HELD_OUT) * sum(lengths) / len(lengths)
    return (1 + min(CHECKS, steps)) * held_out + 3 * steps * batch


def _typical(sequences: Sequence[Tensor], count: int) -> list[Tensor]:
    """Choose documents of all lengths."""
    by_length = sorted(sequences, key=len)
    count = min(count, len(by_length))
    return [by_length[(2 * i + 1) * len(by_length) // (2 * count)] for i in range(count)]


class _Meter(Stage):
    """Let Hessians count the tokens of the whole run, so that the probe skips no step of the run,
    and relate the work that is done to its seconds.

    It ends the probe where the next group would take longer than is left. The whole run has `times`
    as many tokens. `each` are the seconds of a product of a weight and a token, `solving` those of
    such a product that stands for solving: `usual`, until they are measured.
    """

    def __init__(self, watch: _Watch, usual: float) -> None:
        self._watch, self.times = watch, 1.0
        self._solved, self._most = list[tuple[int, int]](), 0.0
        self.each = self.solving = usual

    def enter(self, block: LoadedBlock) -> None:
        self._solved = []

    def work(self, block: LoadedBlock, tasks: list[Task]) -> None:
        for task in tasks:
            if task.hessian is not None:
                task.hessian.tokens = round(task.hessian.tokens * self.times)
        run, done = block.run, solving_work(self._solved)
        if done > self._most:
            passed = sum(n * k for n, k in self._solved) * sum(map(len, run.sequences))
            seconds = run.clock.seconds
            self.each = sum(seconds.get(phase, 0.0) for phase in GROWING) / passed or self.each
            self.solving, self._most = seconds.get("solve", 0.0) / done or self.each, done
        here = [run.model.sizes[name] for task in tasks for name in task.group.linears]
        if run.model.device.type == "cpu":
            self._watch.require(self.solving * solving_work(here))
        self._solved += here


class _Late(Exception):
    """The probe took too long."""


class _Watch(Recorder):
    """Progress that prints nothing, measures the `seconds` of each item of a bar, by its label, and
    ends a probe that takes too long.
    """

    def __init__(self, like: Progress) -> None:
        super().__init__(like)
        self.seconds = defaultdict[str, list[float]](list)
        self._end = time.perf_counter() + MOST_SECONDS

    def check(self) -> None:
        super().check()
        self.require(0.0)

    def require(self, seconds: float) -> None:
        """End the probe if work of so many seconds would end too late."""
        if time.perf_counter() + seconds > self._end:
            raise _Late

    def watched(self, work: Collection[_T], label: str) -> Iterator[_T]:
        for item in work:
            begun = time.perf_counter()
            yield item
            self.seconds[label].append(time.perf_counter() - begun)
