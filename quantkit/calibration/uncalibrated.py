"""Round to nearest, or prune by magnitude, weights without a Hessian, and give solved weights their
stored shape.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from quantkit.algorithms import rtn
from quantkit.algorithms.numerics import check_weight
from quantkit.algorithms.pruning import fixed_mask
from quantkit.algorithms.rtn import relative_error, widened, zeroed
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import Commit, Item
from quantkit.core import sparsity
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import about
from quantkit.layouts.recast import recast
from quantkit.progress import Progress
from quantkit.recipes.goals import Goal
from quantkit.recipes.recipe import Recipe, stored_shape

#: Streamed work is committed to the journal in steps of about this many source bytes.
COMMIT_BYTES = 2 * 2**30


def streamed(
    src: Checkpoint,
    recipe: Recipe,
    goals: Mapping[str, Goal | None],
    done: Collection[str],
    progress: Progress,
) -> Iterator[Item | Commit]:
    """Yield every tensor of a dense checkpoint that is not `done`, its linears rounded or pruned;
    one weight is in memory at a time.
    """
    names = [name for name in src.names() if name not in done]
    last = {unit[-1] for unit in units_of(src, names)}
    for name in progress.bar(names, "prune" if recipe.only_prunes else "quantize", len(names)):
        module = name.removesuffix(".weight")
        goal = goals.get(module) if module != name else None
        # The weight has no name here, so that its memory is free when the next one is read.
        yield (
            Item(name, src.get(name))
            if goal is None
            else solve_uncalibrated(module, src.get(name), goal, recipe)
        )
        if name in last:
            yield Commit({})


def units_of(src: Checkpoint, names: Iterable[str]) -> Iterator[list[str]]:
    """Yield tensors in the units that streamed work commits."""
    unit: list[str] = []
    size = 0
    for name in names:
        unit.append(name)
        size += src.nbytes(name)
        if size >= COMMIT_BYTES:
            yield unit
            unit, size = [], 0
    if unit:
        yield unit


def solve_uncalibrated(
    linear: str, weight: Tensor, goal: Goal, recipe: Recipe, reason: str | None = None
) -> Item:
    """Round to nearest, or prune by magnitude, one weight `[n, k]` without a Hessian.

    `reason` tells the report why, if the recipe asked for calibration. NumericError if the weight
    is not finite or overflows.
    """
    started = time.perf_counter()
    with about(linear):
        item = (
            _rounded(linear, weight, goal, recipe)
            if isinstance(goal, Scheme)
            else _pruned(linear, weight)
        )
    why = (
        {} if reason is None else {"reason" if isinstance(goal, Scheme) else "by_magnitude": reason}
    )
    return item._replace(
        facts={**(item.facts or {}), **why, "seconds": time.perf_counter() - started}
    )


def _rounded(linear: str, weight: Tensor, scheme: Scheme, recipe: Recipe) -> Item:
    wide = widened(weight, solved_width(scheme, weight.shape[1], recipe))
    tensor, facts = rtn.quantize(
        wide, scheme, clip=recipe.clip, signed=recipe.solving(scheme).signed
    )
    return stored_item(linear, weight, tensor, {**facts, "method": "rtn", "tokens": 0}, recipe)


def _pruned(linear: str, weight: Tensor) -> Item:
    check_weight(weight)
    value = weight.masked_fill(~fixed_mask(weight, "magnitude", None), 0)
    facts = {
        "method": "magnitude",
        **counts_of_pruned(value),
        "relative_error": relative_error(weight, value),
    }
    return Item(f"{linear}.weight", value, {**facts, "tokens": 0})


def solved_width(goal: Goal, k: int, recipe: Recipe) -> int:
    """Count the columns of a weight `[n, k]` while it is solved: padded to whole groups and groups
    of four.
    """
    return goal.padded_k(k) if recipe.pad and isinstance(goal, Scheme) else k


def stored_item(
    name: str,
    weight: Tensor,
    tensor: QuantizedTensor | Tensor,
    facts: dict[str, Any],
    recipe: Recipe,
) -> Item:
    """Give a solved linear its stored shape, padded if the recipe asks for it, and the facts that
    depend on it.
    """
    facts = {**facts, "relative_error": relative_error(weight, tensor)}
    shape = tuple(weight.shape)
    if isinstance(tensor, QuantizedTensor):
        facts |= zeroed(weight, tensor)
        stored = stored_shape(recipe, tensor.scheme, *shape)
        if stored != shape:
            facts |= (
                {"zeros": facts["zeros"] - tensor.codes.numel() + weight.numel()}
                if "zeros" in facts
                else {}
            )
            tensor, facts = (
                recast(tensor, tensor.scheme, stored),
                {**facts, "true_shape": list(shape)},
            )
    return Item(f"{name}.weight", tensor, facts)


def counts_of_pruned(value: Tensor) -> dict[str, int]:
    """Count zeros and other weights of a pruned weight, for the report; LayoutError if it is not
    2:4.
    """
    nonzero = value != 0
    sparsity.check(nonzero)
    return {"zeros": value.numel() - int(nonzero.sum()), "kept": int(nonzero.sum())}
