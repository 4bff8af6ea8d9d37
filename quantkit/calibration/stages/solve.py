"""Quantize or prune linears: a group that shares one Hessian, or a single linear without one.

Weights of one scheme are solved as a single tall weight: rows never interact, and the factor is the
same (ALGORITHMS 2). An unusable Hessian is an error, or leads to RTN with a warning if the recipe
allows it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate
from math import isfinite, nan, prod
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.algorithms import gptq, pruning, rtn
from quantkit.algorithms.hessian import (
    Factor,
    Hessian,
    check_size,
    factorize,
    row_losses,
    usual_energy,
)
from quantkit.algorithms.numerics import check_weight
from quantkit.algorithms.options import Options
from quantkit.calibration import budget
from quantkit.calibration.stages.base import LoadedBlock, Stage, Task
from quantkit.checkpoint.writer import Item
from quantkit.core import sparsity
from quantkit.core.quantized_tensor import Goal, QuantizedTensor, Scheme, concatenated, is_sparse
from quantkit.core.ranks import ALONE, Ranks
from quantkit.core.threads import divide, grouped
from quantkit.errors import NumericError, Setting, Words, about, more_samples
from quantkit.layouts.recast import recast
from quantkit.progress import Progress, Recorder
from quantkit.recipes.recipe import Recipe, stored_shape

Solved = list[tuple[QuantizedTensor | Tensor, dict[str, Any]]]
#: Weights `[n, k]`, or values of their rows, by the name of the linear.
ByLinear = Mapping[str, Tensor]

_Part = TypeVar("_Part")


class Solve(Stage):
    """Solve each group and put it back, so that later groups and blocks are calibrated on its
    quantized outputs.
    """

    def bytes(self, sizes: budget.Sizes) -> budget.Peaks:
        """Count Hessians with their factors, and rows, in the step of the solver that takes most.

        As an upper bound, all linears of one parent share a Hessian.
        """
        recipe, shared = sizes.recipe, Counter[tuple[str, int]]()
        for module, (n, k) in sizes.linears.items():
            shared[module.rpartition(".")[0], k] += n
        searches = recipe.clip == "search" and recipe.metric == "block"
        groups = [scheme.group_size for scheme in recipe.schemes] if searches else []
        steps = list[tuple[int, int]]()
        for (_, k), rows in shared.items():
            most = budget.rows_at_once(k, sizes.device)
            waiting = max(0, rows - most) * k * (sizes.width + budget.SOLVED_BYTES)
            found = gptq.step_bytes(k, min(rows, most), groups, sizes.factors, sizes.device)
            steps += [(squares, copies + waiting) for squares, copies in found]
        squares, copies = max(steps, key=sum, default=(0, 0))
        return budget.Peaks(at={budget.SQUARES: squares, budget.ROWS: copies})

    def enter(self, block: LoadedBlock) -> None:
        """Solve the linears that a text-only pass never calls."""
        for name, why in block.uncalled.items():
            with block.run.clock.phase("solve"):
                weight = block.run.model.weights.source(name)
                [item] = solve_uncalibrated(
                    {name: weight}, block.goals[name], block.run.recipe, why
                )
            block.put_back(item)

    def work(self, block: LoadedBlock, tasks: list[Task]) -> None:
        """Solve the groups, each on the rank that owns it or by rows on all ranks."""
        run, work = block.run, partial(self._solved, block)
        owners = [task.owner for task in tasks if task.owner is not None]
        solved: Iterable[tuple[list[Item], list[str]]] = map(work, tasks)
        if owners:
            with run.exchanging():
                solved = list(run.ranks.each(tasks, owners, work))
        for task, (items, warnings) in zip(tasks, solved, strict=True):
            for text in warnings if run.ranks.first else ():
                run.progress.warn(text)
            for item in items:
                facts = task.facts[item.name.removesuffix(".weight")]
                block.put_back(item._replace(facts={**(item.facts or {}), **facts}))
                run.progress.detail(_detail(item))

    def _solved(self, block: LoadedBlock, task: Task) -> tuple[list[Item], list[str]]:
        """Solve the linears of one group; return them and the warnings.

        At most `SOLVED_WEIGHTS` are solved at a time: `all` joins all experts of a layer.
        """
        run, items, progress = block.run, list[Item](), Recorder(block.run.progress)
        assert task.hessian is not None
        ranks = run.ranks if task.owner is None else ALONE
        sizes = {name: prod(run.model.sizes[name]) for name in task.group.linears}
        for part in divide(sizes, sizes.__getitem__, budget.SOLVED_WEIGHTS):
            with run.clock.phase("solve"):
                weights = {name: run.model.weights.source(name) for name in part}
                goals = {name: block.goals[name] for name in part}
                attempt = partial(
                    solve, weights, goals, task.hessian, run.recipe, progress, ranks, block.floors
                )
                try:
                    items += attempt()
                    continue
                except torch.OutOfMemoryError:
                    # Ranks that share rows exchange them, so one of them cannot begin anew.
                    if ranks.count > 1 or not block.stream.stop_waiting():
                        raise
                items += attempt()
        return items, progress.take()


def _detail(item: Item) -> str:
    facts = item.facts or {}
    found = [
        (key, facts.get(key))
        for key in ("method", "relative_error", "loss", "rtn_loss", "damp", "tokens")
    ]
    return f"{item.name}: " + ", ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in found
    )


def solve(
    weights: ByLinear,
    goals: Mapping[str, Goal],
    hessian: Hessian,
    recipe: Recipe,
    progress: Progress,
    ranks: Ranks = ALONE,
    floors: ByLinear = MappingProxyType({}),
) -> list[Item]:
    """Quantize or prune linears `[n, k]`, by name, that share an input and its `hessian`.

    With several ranks, all call this with the same arguments; each solves some rows, and all return
    the same. `floors` as in LoadedBlock.

    Facts: method, relative_error, loss, rtn_loss, norm (sums over rows with the undamped Hessian,
    ALGORITHMS 1), tokens, channel_peak, seconds, and the solver's facts. `true_shape` says that
    the stored weight is padded.

    NumericError, naming the linear, for weights that are not finite or overflow. NumericError for
    an unusable Hessian, unless the recipe says `on_unsolvable: rtn`.
    """
    names = ", ".join(weights)
    k = next(iter(weights.values())).shape[1]
    for name, weight in weights.items():
        with about(name):
            check_weight(weight)
    if not hessian.tokens:
        return _unreached(names, weights, goals, recipe, progress)
    if hessian.tokens < k / 8:
        few = f"{names}: only {hessian.tokens} tokens calibrate {k} input channels:"
        progress.warn(Words(few, more_samples(recipe.calibration.samples, hessian.tokens, k)))
    h = hessian.matrix()
    with about(names):
        check_size(h, k)
    common = {"tokens": hessian.tokens, **_channel_peak(h)}
    held_out = {source: torch.cat(inputs) for source, inputs in hessian.held_out.items()}
    systems: dict[tuple[bool, int], tuple[Tensor, Factor | None]] = {}
    alike = grouped(((goals[name], weight.dtype), name) for name, weight in weights.items())
    items: list[Item] = []
    for (goal, _), some in alike.items():
        progress.check()
        chosen = {name: weights[name] for name in some}
        sparse, width = is_sparse(goal), _solved_width(goal, k, recipe)
        if (sparse, width) not in systems:
            wide_h = _widened_hessian(h, width, recipe.gptq)
            factor = _factor(names, wide_h, recipe, sparse, progress) if recipe.factored else None
            systems[sparse, width] = wide_h, factor
        started = time.perf_counter()
        wide = {name: rtn.widened(weight, width) for name, weight in chosen.items()}
        by_row: dict[str, ByLinear] = {"weight": wide}
        if floors.keys() >= chosen.keys():
            by_row["floor"] = floors
        inputs = {source: pad(x, (0, width - k)) for source, x in held_out.items()}
        rounds = partial(_gptq, held_out=inputs) if recipe.factored else _rtn
        method = rounds if isinstance(goal, Scheme) else _prune
        solved = method(by_row, goal, *systems[sparse, width], recipe.solving(goal), ranks)
        seconds = (time.perf_counter() - started) / sum(len(w) for w in chosen.values())
        for (name, weight), (tensor, facts) in zip(chosen.items(), solved, strict=True):
            facts |= {**common, "seconds": seconds * len(weight)}
            facts["relative_error"] = rtn.relative_error(weight, tensor)
            facts |= rtn.zeroed(weight, tensor) if isinstance(tensor, QuantizedTensor) else {}
            items.append(_stored_item(name, weight, tensor, facts, recipe))
    return items


def _unreached(
    names: str, weights: ByLinear, goals: Mapping[str, Goal], recipe: Recipe, progress: Progress
) -> list[Item]:
    """Round to nearest the linears that no token reached, if the recipe allows it."""
    reason = "no calibration token came here"
    if recipe.gptq.on_unsolvable == "stop":
        raise NumericError(
            reason,
            Words(
                "give more text, leave it dense with",
                Setting("skip"),
                ", or set gptq on_unsolvable: rtn in a recipe",
            ),
            subject=names,
        )
    progress.warn(f"{names}: {reason}, rounded to nearest")
    return [
        item
        for name, weight in weights.items()
        for item in solve_uncalibrated({name: weight}, goals[name], recipe, reason)
    ]


def _channel_peak(h: Tensor) -> dict[str, float]:
    """Divide the RMS of the largest input channel by the RMS of the median live one, for the
    report.
    """
    energy = h.diagonal()
    live = energy[energy > 0]
    peak = float((live.max() / live.median()).sqrt()) if len(live) else nan
    return {"channel_peak": peak} if isfinite(peak) else {}


def _widened_hessian(h: Tensor, width: int, options: Options) -> Tensor:
    """Add uncorrelated channels to a Hessian, of usual energy, so that none is dead and damping
    stays.

    The weights there are zero and have no error, so they change no loss and no real column.
    """
    missing = width - len(h)
    return (
        torch.block_diag(
            h, usual_energy(h.diagonal(), options) * torch.eye(missing, device=h.device)
        )
        if missing
        else h
    )


def _factor(
    names: str, h: Tensor, recipe: Recipe, sparse: bool, progress: Progress
) -> Factor | None:
    """Factor the Hessian, warning of extra damping; None if that fails and the recipe allows
    rounding.
    """
    try:
        with about(names):
            factor = factorize(h, recipe.gptq, sparse)
    except NumericError as error:
        if recipe.gptq.on_unsolvable == "stop":
            raise
        progress.warn(Words(error.typed, "; rounded to nearest"))
        return None
    if len(factor.rungs) > 1:
        progress.warn(
            f"{names}: the Hessian needed damping {factor.damp}, after {list(factor.rungs[:-1])}"
        )
    return factor


def _gptq(
    by_row: Mapping[str, ByLinear],
    scheme: Any,
    h: Tensor,
    factor: Factor | None,
    recipe: Recipe,
    ranks: Ranks,
    held_out: ByLinear,
) -> Solved:
    rows = partial(
        gptq.quantize, scheme=scheme, h=h, options=recipe.gptq, factor=factor, held_out=held_out
    )
    joint = gptq.join(_as_one(by_row, rows, ranks))
    return [
        (
            part.tensor,
            {
                "method": part.facts.get("fallback", "gptq"),
                "loss": rtn.total(part.loss),
                "rtn_loss": rtn.total(part.rtn_loss),
                "norm": rtn.total(part.norm),
                **part.facts,
            },
        )
        for part in _split(joint, [len(w) for w in by_row["weight"].values()])
    ]


def _prune(
    by_row: Mapping[str, ByLinear],
    goal: Goal,
    h: Tensor,
    factor: Factor | None,
    recipe: Recipe,
    ranks: Ranks,
) -> Solved:
    rows = partial(pruning.prune, h=h, options=recipe.gptq, factor=factor)
    tall = torch.cat(_as_one(by_row, rows, ranks))
    weights = by_row["weight"]
    used = {"damp": factor.damp, "rungs": list(factor.rungs)} if factor else {}
    found: Solved = []
    values = tall.split([len(weight) for weight in weights.values()])
    for (name, weight), value in zip(weights.items(), values, strict=True):
        with about(name):
            facts = {"method": recipe.gptq.prune, **used, **_counts_of_pruned(value)}
        facts |= {
            "loss": rtn.total(row_losses(weight.float() - value.float(), None, h)),
            "norm": rtn.total(row_losses(weight, None, h)),
            "dead_columns": int((h.diagonal() == 0).sum()),
        }
        found.append((value.clone(), facts))  # a slice would hold the whole tall weight in memory
    return found


def _rtn(
    by_row: Mapping[str, ByLinear],
    scheme: Any,
    h: Tensor,
    factor: Factor | None,
    recipe: Recipe,
    ranks: Ranks,
) -> Solved:
    rows = partial(
        rtn.quantize,
        scheme=scheme,
        clip=recipe.clip,
        metric=recipe.metric,
        hessian=h,
        signed=recipe.signed,
        prune=recipe.prune or "magnitude",
    )
    found: Solved = []
    for name, weight in by_row["weight"].items():
        parts = _as_one({"weight": {name: weight}}, rows, ranks)
        tensor = concatenated([part for part, _ in parts])
        facts = {**parts[0][1], **rtn.scale_facts(tensor)}
        loss, norm = (rtn.total(row_losses(weight, value, h)) for value in (tensor, None))
        found.append(
            (tensor, {"method": "rtn", "loss": loss, "rtn_loss": loss, "norm": norm, **facts})
        )
    return found


def _as_one(
    by_row: Mapping[str, ByLinear], solve_rows: Callable[..., _Part], ranks: Ranks
) -> list[_Part]:
    """Apply `solve_rows` to all weights stacked, or to some rows on each rank; list the results in
    order.

    `by_row` has its arguments: the `weight`, and others by row. Of many rows, `rows_at_once` are
    solved at a time.
    """
    rows = ranks.rows(sum(map(len, by_row["weight"].values())))
    names = list(by_row["weight"])
    tall = {key: [each[name] for name in names] for key, each in by_row.items()}
    mine = {
        key: (each[0] if len(each) == 1 else torch.cat(each))[rows] for key, each in tall.items()
    }
    count, k = mine["weight"].shape
    most = budget.rows_at_once(k, mine["weight"].device.type)
    slices = [slice(at, at + most) for at in range(0, count, most)]
    try:
        parts = [solve_rows(**{key: each[some] for key, each in mine.items()}) for some in slices]
    except NumericError:
        for name in names:  # the row must be named within its own linear
            with about(name):
                solve_rows(**{key: each[name] for key, each in by_row.items()})
        raise
    return [part for found in ranks.gather(parts) for part in found]


def solve_uncalibrated(
    weights: ByLinear,
    goal: Goal,
    recipe: Recipe,
    reason: str | None = None,
    device: torch.device | None = None,
) -> list[Item]:
    """Round to nearest, or prune by magnitude, weights `[n, k]` without a Hessian, by name. Several
    have one k and one dtype, and are solved as one.

    `reason` tells the report why, if the recipe asked for calibration. Another `device` than the
    weights' computes the same, some rows at a time, and has the results. NumericError, naming the
    linear, for a weight that is not finite or overflows.
    """
    started, (first, weight) = time.perf_counter(), next(iter(weights.items()))
    device = weight.device if device is None else device
    try:
        with about(first):
            solved = _by_parts(weights, goal, recipe, device)
    except NumericError:
        if device == weight.device and len(weights) == 1:
            raise
        # So the line has the linear, the row in it, and the count.
        alone = [({name: weight}, goal, recipe, reason) for name, weight in weights.items()]
        return [item for each in alone for item in solve_uncalibrated(*each)]
    why = "reason" if isinstance(goal, Scheme) else "by_magnitude"
    seconds = (time.perf_counter() - started) / sum(map(len, weights.values()))
    items = list[Item]()
    for (name, weight), (value, facts) in zip(weights.items(), solved, strict=True):
        facts |= {} if reason is None else {why: reason}
        facts["relative_error"] = rtn.ratio(facts["relative_error"])
        item = _stored_item(name, weight, value, facts, recipe)
        items.append(item._replace(facts={**(item.facts or {}), "seconds": seconds * len(weight)}))
    return items


def _by_parts(weights: ByLinear, goal: Goal, recipe: Recipe, device: torch.device) -> Solved:
    """Round or prune weights on a device, several as one, and one by parts. The facts of parts are
    added up, and of the `relative_error` the norms are listed.
    """
    parts, (name, weight) = [weights], next(iter(weights.items()))
    if len(weights) == 1 and device != weight.device:
        rows = max(1, budget.PART // max(1, weight.shape[-1]))
        parts = [{name: part} for part in weight.split(rows)]
    found: dict[str, tuple[list[Any], dict[str, Any]]] = {name: ([], {}) for name in weights}
    for part in parts:
        there = [weight.to(device) for weight in part.values()]
        tall, shared = _rounded(torch.cat(there) if len(there) > 1 else there[0], goal, recipe)
        values = _split(tall, [len(weight) for weight in there])
        for name, weight, value in zip(part, there, values, strict=True):
            all_values, facts = found[name]
            all_values.append(value)
            for key, fact in {**shared, **_facts(weight, value)}.items():
                known = key in facts and not isinstance(fact, str)
                facts[key] = facts[key] + fact if known else fact
    return [(_joined(values), facts) for values, facts in found.values()]


def _rounded(
    weight: Tensor, goal: Goal, recipe: Recipe
) -> tuple[QuantizedTensor | Tensor, dict[str, Any]]:
    """Round or prune rows where they are; the facts are the same for all of them."""
    if not isinstance(goal, Scheme):
        check_weight(weight)
        pruned = weight.masked_fill(~pruning.fixed_mask(weight, "magnitude", None), 0)
        return pruned, {"method": "magnitude"}
    wide = rtn.widened(weight, _solved_width(goal, weight.shape[1], recipe))
    signed = recipe.solving(goal).signed
    tensor, facts = rtn.quantize(wide, goal, clip=recipe.clip, signed=signed)
    return tensor, {**facts, "method": "rtn"}


def _facts(weight: Tensor, value: QuantizedTensor | Tensor) -> dict[str, Any]:
    """Collect the facts of some rows; of their error, the norms."""
    norms = {"relative_error": [rtn.error_norms(weight, value)]}
    if isinstance(value, QuantizedTensor):
        return {**rtn.scale_facts(value), "tokens": 0, **norms, **rtn.zeroed(weight, value)}
    return {**_counts_of_pruned(value), **norms, "tokens": 0}


def _split(tall: Any, counts: list[int]) -> list[Any]:
    """Divide solved rows among weights that have so many: a tensor, a record or a solution."""
    if isinstance(tall, Tensor):
        return [*tall.split(counts)]
    rows = [slice(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
    return [tall.rows(some) for some in rows] if len(rows) > 1 else [tall]


def _joined(parts: list[Any]) -> QuantizedTensor | Tensor:
    """Join the solved parts of one weight."""
    if isinstance(parts[0], QuantizedTensor):
        return concatenated(parts)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _solved_width(goal: Goal, k: int, recipe: Recipe) -> int:
    """Count the columns of a weight `[n, k]` while it is solved: padded to whole groups and groups
    of four.
    """
    return goal.padded_k(k) if recipe.pad and isinstance(goal, Scheme) else k


def _stored_item(
    linear: str,
    weight: Tensor,
    value: QuantizedTensor | Tensor,
    facts: dict[str, Any],
    recipe: Recipe,
) -> Item:
    """Give a solved linear its stored shape, padded if the recipe asks for it, and the facts that
    depend on it.
    """
    if facts["relative_error"] == 0 and not weight.any():
        facts["all_zero"] = weight.numel()
    if isinstance(value, QuantizedTensor):
        stored = stored_shape(recipe, value.scheme, *weight.shape)
        if stored != weight.shape:
            if "zeros" in facts:
                facts["zeros"] -= value.codes.numel() - weight.numel()
            value, facts["true_shape"] = recast(value, value.scheme, stored), list(weight.shape)
    return Item(f"{linear}.weight", value, facts)


def _counts_of_pruned(value: Tensor) -> dict[str, Any]:
    """Count zeros and other weights of a pruned weight, for the report; LayoutError if it is not
    2:4.
    """
    nonzero = value != 0
    sparsity.check(nonzero)
    count = int(nonzero.sum())
    return {"zeros": value.numel() - count, "kept": count}
