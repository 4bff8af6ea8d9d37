"""Quantize or prune the linears that share an input, given their weights and one Hessian.

Weights of one scheme are solved as one tall weight: rows never interact, and the factor is the same
(ALGORITHMS 2). An unusable Hessian is an error or, if the recipe allows it, means RTN with a warning.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.algorithms import coordinate_descent, gptq, output_aware, rtn, sparsegpt
from quantkit.algorithms.cholesky import Factor, factorize
from quantkit.algorithms.hessian import Hessian, row_losses
from quantkit.algorithms.masks import fixed_mask
from quantkit.algorithms.numerics import check_weight, row_slices, working_dtype
from quantkit.checkpoint.items import Item
from quantkit.core import sparsity
from quantkit.core.quantized_tensor import QuantizedTensor, concatenated
from quantkit.core.ranks import ALONE, Ranks
from quantkit.core.scheme import Scheme
from quantkit.core.threads import one_thread
from quantkit.errors import NumericError, about
from quantkit.layouts.recast import recast
from quantkit.progress import Progress
from quantkit.recipes.goals import Goal, is_sparse
from quantkit.recipes.recipe import Recipe, stored_shape

Solved = list[tuple[QuantizedTensor | Tensor, dict[str, Any]]]

_Part = TypeVar("_Part")

#: A weight is far smaller than another below this ratio.
FAR_SMALLER = 2.0**-20


class _System(NamedTuple):
    """Hold a Hessian `[width, width]` and, if the method needs it, its factor."""

    h: Tensor
    factor: Factor | None


def solve(
    weights: Mapping[str, Tensor],
    goals: Mapping[str, Goal],
    hessian: Hessian,
    recipe: Recipe,
    progress: Progress,
    ranks: Ranks = ALONE,
    outputs: Mapping[str, Tensor] = MappingProxyType({}),
) -> list[Item]:
    """Quantize or prune linears `[n, k]`, by name, whose common input gave `hessian`.

    GPTQ is output-aware for those whose `outputs` have a Hessian `[n, n]`, which needs one rank.

    Several ranks, which call this with the same arguments, solve some rows each and return the same.

    Facts: method, relative_error, loss, rtn_loss, norm (sums over rows with the undamped Hessian, ALGORITHMS 1),
    tokens, capped_tokens (if any), channel_peak, seconds, and those of the solver. `descent_skipped` says that there
    were too few tokens for descent, `true_shape` that the stored weight is padded.

    NumericError, naming the linear, for weights that are not finite or overflow. NumericError for an unusable Hessian,
    unless the recipe says `on_unsolvable: rtn`.
    """
    names = ", ".join(weights)
    k = next(iter(weights.values())).shape[1]
    for name, weight in weights.items():
        with about(name):
            check_weight(weight)
    if not hessian.tokens:
        reason = "no calibration token came here"
        if recipe.gptq.on_unsolvable == "stop":
            raise NumericError(
                f"{names}: {reason}: give more text, leave it dense with --skip, or set gptq on_unsolvable: rtn in a "
                "recipe"
            )
        progress.warn(f"{names}: {reason}, rounded to nearest")
        return [solve_uncalibrated(name, w, goals[name], recipe, reason) for name, w in weights.items()]
    if hessian.tokens < k / 8:
        progress.warn(f"{names}: only {hessian.tokens} tokens calibrate {k} input channels")
    recipe, skipped = _without_noise(names, k, hessian.tokens, recipe, progress)
    with about(names):
        hessian.check_size(k)
    h, capped = hessian.limited(weights.values())
    sums = {"tokens": hessian.tokens, **({"capped_tokens": capped} if capped else {}), **_channel_peak(h)}
    systems = _systems(names, h, goals.values(), recipe, progress)
    alike: dict[tuple[Goal, torch.dtype], dict[str, Tensor]] = {}
    for name, weight in weights.items():
        alike.setdefault((goals[name], weight.dtype), {})[name] = weight
    items: list[Item] = []
    for (goal, _), chosen in alike.items():
        progress.check()
        started = time.perf_counter()
        width = _width(goal, k, recipe)
        system = systems[is_sparse(goal), width]
        wide = {name: _widened(w, width) for name, w in chosen.items()}
        solved = _solve_alike(wide, goal, system, recipe, ranks, outputs)
        seconds = (time.perf_counter() - started) / sum(len(w) for w in chosen.values())
        for (name, weight), (tensor, facts) in zip(chosen.items(), solved, strict=True):
            common = {**sums, **skipped, "seconds": seconds * len(weight)}
            items.append(_item(name, weight, tensor, {**facts, **common}, recipe))
    return items


def solve_uncalibrated(linear: str, weight: Tensor, goal: Goal, recipe: Recipe, reason: str | None = None) -> Item:
    """Round to nearest, or prune by magnitude, one weight `[n, k]` without a Hessian.

    `reason` tells the report why, if the recipe asked for calibration. NumericError if the weight is not finite or
    overflows.
    """
    if isinstance(goal, Scheme):
        return _round_to_nearest(linear, weight, goal, recipe, reason)
    started = time.perf_counter()
    with about(linear):
        check_weight(weight)
        value = weight.masked_fill(~fixed_mask(weight, "magnitude", None), 0)
        facts = {"method": "magnitude", **_checked(value), "relative_error": relative_error(weight, value), "tokens": 0}
    why = {} if reason is None else {"by_magnitude": reason}
    return Item(f"{linear}.weight", value, {**facts, **why, "seconds": time.perf_counter() - started})


def _round_to_nearest(linear: str, weight: Tensor, scheme: Scheme, recipe: Recipe, reason: str | None) -> Item:
    started = time.perf_counter()
    with about(linear):
        wide = _widened(weight, _width(scheme, weight.shape[1], recipe))
        tensor, facts = rtn.quantize(wide, scheme, clip=recipe.clip, signed=recipe.signed)
    common = {"method": "rtn", "tokens": 0, **({} if reason is None else {"reason": reason})}
    item = _item(linear, weight, tensor, {**facts, **common}, recipe)
    return Item(item.name, item.value, {**(item.facts or {}), "seconds": time.perf_counter() - started})


def relative_error(weight: Tensor, value: QuantizedTensor | Tensor) -> float:
    """Return `||W - Q|| / ||W||`, 0 for a weight of zeros; padding columns of Q do not count."""
    decoded = value.dequantize() if isinstance(value, QuantizedTensor) else value.to(torch.float32, copy=True)
    difference = decoded[:, : weight.shape[1]]
    difference.sub_(weight)  # in place, without a float32 copy of the weight: memory peaks here
    with one_thread(weight.device):
        norm = torch.linalg.vector_norm(weight, dtype=working_dtype(weight)).clamp_min(1e-30)
        return float(torch.linalg.vector_norm(difference) / norm)


def zeroed(weight: Tensor, tensor: QuantizedTensor) -> dict[str, int]:
    """Count weights `[n, k]` that became 0 because others of their group are far larger; {} if there are none.

    Counted are those below 2^-20 of the largest, in groups where they are an eighth or more of the weights that are not
    zero. Single small weights among normal ones are no event.
    """
    columns = tensor.codes.shape[1]  # padded, so that the last group is whole
    count = 0
    for rows in row_slices(weight, columns):
        parts = _widened(weight[rows], columns).abs().unflatten(1, (tensor.scales.shape[1], -1))
        small = (parts < parts.amax(-1, keepdim=True).to(working_dtype(weight)) * FAR_SMALLER) & (parts > 0)
        small &= 8 * small.sum(-1, keepdim=True) >= (parts > 0).sum(-1, keepdim=True)
        if bool(small.any()):
            zeros = None if tensor.zeros is None else tensor.zeros[rows]
            some = QuantizedTensor(tensor.scheme, tensor.codes[rows], tensor.scales[rows], zeros)
            count += int((small.flatten(1) & (some.dequantize() == 0)).sum())
    return {"zeroed": count} if count else {}


def _width(goal: Goal, k: int, recipe: Recipe) -> int:
    """Return the columns in which a weight `[n, k]` is solved: with padding, those of whole groups and quads."""
    return goal.padded_k(k) if recipe.pad and isinstance(goal, Scheme) else k


def _widened(weight: Tensor, width: int) -> Tensor:
    """Return a weight with columns of zeros up to `width`, which do not change the scale of a last group."""
    if weight.shape[1] == width:
        return weight
    check_weight(weight)  # an error must name the shape without padding
    return pad(weight, (0, width - weight.shape[1]))


def _widened_hessian(h: Tensor, width: int) -> Tensor:
    """Return a Hessian with uncorrelated channels added, as large as the mean one: none is dead, damping stays.

    The weights there are zero and have no error, so they change no loss and no real column.
    """
    missing = width - len(h)
    return torch.block_diag(h, h.diagonal().mean() * torch.eye(missing, device=h.device)) if missing else h


def _item(name: str, weight: Tensor, tensor: QuantizedTensor | Tensor, facts: dict[str, Any], recipe: Recipe) -> Item:
    """Return a solved linear as it is stored, padded if the recipe asks for it, with its facts."""
    facts = {**facts, "relative_error": relative_error(weight, tensor)}
    shape = tuple(weight.shape)
    if isinstance(tensor, QuantizedTensor):
        facts |= zeroed(weight, tensor)
        stored = stored_shape(recipe, tensor.scheme, *shape)
        if stored != shape:
            facts |= {"zeros": facts["zeros"] - tensor.codes.numel() + weight.numel()} if "zeros" in facts else {}
            tensor, facts = recast(tensor, tensor.scheme, stored), {**facts, "true_shape": list(shape)}
    return Item(f"{name}.weight", tensor, facts)


def _without_noise(
    names: str, k: int, tokens: int, recipe: Recipe, progress: Progress
) -> tuple[Recipe, dict[str, str]]:
    """Return the recipe, and the fact for the report; descent is dropped if it would fit the noise of few tokens."""
    if not recipe.gptq.descent or tokens >= coordinate_descent.TOKENS_PER_COLUMN * k:
        return recipe, {}
    few = f"{tokens} tokens for {k} input channels"
    least = coordinate_descent.TOKENS_PER_COLUMN
    if not recipe.descends_by_default:  # else the closing table counts these linears
        progress.warn(f"{names}: no descent: {few} are fewer than {least} each; give more --samples")
    return replace(recipe, gptq=replace(recipe.gptq, descent=0)), {"descent_skipped": few}


def _channel_peak(h: Tensor) -> dict[str, float]:
    """Return the RMS of the largest input channel over that of the median live one, for the report."""
    energy = h.diagonal()
    live = energy[energy > 0]
    peak = float((live.max() / live.median()).sqrt()) if len(live) else math.nan
    return {"channel_peak": peak} if math.isfinite(peak) else {}


def _systems(
    names: str, h: Tensor, goals: Iterable[Goal], recipe: Recipe, progress: Progress
) -> dict[tuple[bool, int], _System]:
    """Return the system for each kind of goal, by sparsity and width; `h` is `[k, k]`."""
    kinds = sorted({(is_sparse(goal), _width(goal, len(h), recipe)) for goal in goals})
    hessians = {width: _widened_hessian(h, width) for _, width in kinds}
    factors = {
        (sparse, width): _factor(names, hessians[width], recipe, sparse, progress) if recipe.factored else None
        for sparse, width in kinds
    }
    return {kind: _System(hessians[kind[1]], factors[kind]) for kind in kinds}


def _solve_alike(
    weights: Mapping[str, Tensor],
    goal: Goal,
    system: _System,
    recipe: Recipe,
    ranks: Ranks,
    outputs: Mapping[str, Tensor],
) -> Solved:
    """Solve weights of one dtype with one goal, by the method of the recipe."""
    if not isinstance(goal, Scheme):
        return _prune(weights, system, recipe, ranks)
    if recipe.factored:
        return _gptq(weights, goal, system, recipe, ranks, outputs)
    return _rtn(weights, goal, system.h, recipe, ranks)


def _factor(names: str, h: Tensor, recipe: Recipe, sparse: bool, progress: Progress) -> Factor | None:
    """Factor the Hessian, warning of extra damping; None if that fails and the recipe allows rounding."""
    try:
        with about(names):
            factor = factorize(h, recipe.gptq, sparse)
    except NumericError as error:
        if recipe.gptq.on_unsolvable == "stop":
            raise
        progress.warn(f"{error}; rounded to nearest")
        return None
    if len(factor.rungs) > 1:
        progress.warn(f"{names}: the Hessian needed damping {factor.damp}, after {list(factor.rungs[:-1])}")
    return factor


def _gptq(
    weights: Mapping[str, Tensor],
    scheme: Scheme,
    system: _System,
    recipe: Recipe,
    ranks: Ranks,
    outputs: Mapping[str, Tensor],
) -> Solved:
    def solve_rows(weight: Tensor) -> gptq.Solution:
        return gptq.quantize(weight, scheme, system.h, recipe.gptq, system.factor)

    parts = gptq.split(gptq.join(_as_one(weights, solve_rows, ranks)), [len(w) for w in weights.values()])
    named = dict(zip(weights, parts, strict=True))
    again = [name for name in weights if name in outputs] if system.factor is not None else []
    if again:
        plain, seen = [named[name] for name in again], [outputs[name] for name in again]
        found = output_aware.refine([weights[name] for name in again], plain, seen, system.h, solve_rows)
        named |= zip(again, found, strict=True)
    return [
        (
            part.tensor,
            {
                "method": part.facts.get("fallback", "gptq"),
                "loss": _finite(part.loss),
                "rtn_loss": _finite(part.rtn_loss),
                "norm": _finite(part.norm),
                **part.facts,
            },
        )
        for part in named.values()
    ]


def _prune(weights: Mapping[str, Tensor], system: _System, recipe: Recipe, ranks: Ranks) -> Solved:
    h, factor = system
    tall = torch.cat(_as_one(weights, lambda weight: sparsegpt.prune(weight, h, recipe.gptq, factor), ranks))
    used = {"damp": factor.damp, "rungs": list(factor.rungs)} if factor else {}
    found: Solved = []
    for (name, weight), value in zip(weights.items(), tall.split([len(w) for w in weights.values()]), strict=True):
        with about(name):
            facts = {"method": recipe.gptq.prune, **used, **_checked(value)}
        facts["loss"] = _finite(row_losses(weight.float() - value.float(), None, h))
        facts["norm"] = _finite(row_losses(weight, None, h))
        facts["dead_columns"] = int((h.diagonal() == 0).sum())
        found.append((value.clone(), facts))  # a slice would hold the whole tall weight in memory
    return found


def _as_one(weights: Mapping[str, Tensor], solve_rows: Callable[[Tensor], _Part], ranks: Ranks) -> list[_Part]:
    """Apply `solve_rows` to all weights stacked, or to some rows on each rank; return the results, stacked in order."""
    mine = torch.cat(list(weights.values()))[ranks.rows(sum(map(len, weights.values())))]
    try:
        part = solve_rows(mine) if len(mine) else None
    except NumericError:
        for name, weight in weights.items():  # the row must be named within its own linear
            with about(name):
                solve_rows(weight)
        raise
    return [found for found in ranks.gather(part) if found is not None]


def _checked(value: Tensor) -> dict[str, Any]:
    """Return the counts for the report of a pruned weight; LayoutError if it is not 2:4."""
    nonzero = value != 0
    sparsity.check(nonzero)
    return {"zeros": value.numel() - int(nonzero.sum()), "kept": int(nonzero.sum())}


def _finite(losses: Tensor) -> float | None:
    """Return the sum of losses; None if it is not finite, as with an unusable Hessian."""
    with one_thread(losses.device):
        total = float(losses.sum(dtype=torch.float64))
    return total if math.isfinite(total) else None


def _rtn(weights: Mapping[str, Tensor], scheme: Scheme, h: Tensor, recipe: Recipe, ranks: Ranks) -> Solved:
    def solve_rows(weight: Tensor) -> tuple[QuantizedTensor, dict[str, Any]]:
        return rtn.quantize(
            weight,
            scheme,
            clip=recipe.clip,
            metric=recipe.metric,
            hessian=h,
            signed=recipe.signed,
            prune=recipe.prune or "magnitude",
        )

    found: Solved = []
    for name, weight in weights.items():
        parts = _as_one({name: weight}, solve_rows, ranks)
        tensor = concatenated([part for part, _ in parts])
        facts = {**parts[0][1], **rtn.scale_facts(tensor)}
        loss, norm = (_finite(row_losses(weight, value, h)) for value in (tensor, None))
        found.append((tensor, {"method": "rtn", "loss": loss, "rtn_loss": loss, "norm": norm, **facts}))
    return found
