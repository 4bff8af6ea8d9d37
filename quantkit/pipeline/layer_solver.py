"""One group of linears that share an input: weights and a Hessian in, quantized or pruned items with their facts out.

Weights of one scheme are solved as one tall weight, since rows never meet and the factor is the same (ALGORITHMS 2).
What could not be done as asked is an error here, or, where the recipe allows it, done otherwise, warned of and
recorded.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.algorithms import coordinate_descent, gptq, rtn, sparsegpt
from quantkit.algorithms.cholesky import Factor, factorize
from quantkit.algorithms.hessian import Hessian, row_losses
from quantkit.algorithms.masks import fixed_mask
from quantkit.algorithms.numerics import check_weight, working_dtype
from quantkit.checkpoint.items import Item
from quantkit.core import sparsity
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import NumericError, about
from quantkit.layouts.recast import restated
from quantkit.pipeline.recipe import Goal, Pruning, Recipe, is_sparse, stored_shape
from quantkit.progress import Progress

Solved = list[tuple[QuantizedTensor | Tensor, dict[str, Any]]]

_Part = TypeVar("_Part")


def solve(
    weights: Mapping[str, Tensor],
    schemes: Mapping[str, Goal],
    hessian: Hessian,
    recipe: Recipe | Pruning,
    progress: Progress,
) -> list[Item]:
    """Return the quantized or pruned items of linears `[n, k]`, by name, whose common input `hessian` was summed over.

    Facts: method, relative_error, loss, rtn_loss, norm (sums over rows with the undamped Hessian, ALGORITHMS 1),
    tokens, seconds, `descent_skipped` if there were too few tokens for it, `true_shape` if it is stored with zeros in a
    larger one, and what the solver reports. Raises NumericError, naming the linear, for weights that are not finite or
    overflow, and for a Hessian that cannot be used unless the recipe says `on_unsolvable: rtn`.
    """
    names = ", ".join(weights)
    k = next(iter(weights.values())).shape[1]
    for name, weight in weights.items():
        with about(name):
            check_weight(weight)
    if not hessian.tokens:
        if recipe.gptq.on_unsolvable == "stop":
            raise NumericError(
                f"{names}: no calibration token came here: give more text, leave it dense with --skip, or set gptq "
                "on_unsolvable: rtn in a recipe"
            )
        progress.warn(f"{names}: no calibration token came here, rounded to nearest")
        return [alone(name, w, schemes[name], recipe, "no calibration token came here") for name, w in weights.items()]
    if hessian.tokens < k / 8:
        progress.warn(f"{names}: only {hessian.tokens} tokens calibrate {k} input channels")
    recipe, skipped = _trusted(names, k, hessian.tokens, recipe, progress)
    h = hessian.matrix()
    kinds = sorted({(is_sparse(goal), _width(goal, k, recipe)) for goal in schemes.values()})
    hessians = {width: _widened(h, width) for _, width in kinds}
    asked = kinds if recipe.factored else []
    factors = {kind: _factor(names, hessians[kind[1]], recipe, kind[0], progress) for kind in asked}
    together: dict[tuple[Goal, torch.dtype], dict[str, Tensor]] = {}
    for name, weight in weights.items():
        together.setdefault((schemes[name], weight.dtype), {})[name] = weight
    items: list[Item] = []
    for (scheme, _), chosen in together.items():
        progress.check()
        started = time.perf_counter()
        width = _width(scheme, k, recipe)
        h, factor = hessians[width], factors.get((is_sparse(scheme), width))
        wide = {name: _filled(weight, width) for name, weight in chosen.items()}
        if isinstance(recipe, Pruning) or not isinstance(scheme, Scheme):
            found = _pruned(wide, h, recipe, factor)
        elif recipe.factored:
            found = _gptq(wide, scheme, h, recipe, factor)
        else:
            found = _rtn(wide, scheme, h, recipe)
        seconds = (time.perf_counter() - started) / sum(len(w) for w in chosen.values())
        for (name, weight), (tensor, facts) in zip(chosen.items(), found, strict=True):
            known = {"tokens": hessian.tokens, **skipped, "seconds": seconds * len(weight)}
            items.append(_item(name, weight, tensor, {**facts, **known}, recipe))
    return items


def alone(linear: str, weight: Tensor, scheme: Goal, recipe: Recipe | Pruning, reason: str | None = None) -> Item:
    """Return a linear done by its weight `[n, k]` alone, rounded or pruned by magnitude; `reason` as for `rounded`."""
    if isinstance(recipe, Recipe) and isinstance(scheme, Scheme):
        return rounded(linear, weight, scheme, recipe, reason)
    started = time.perf_counter()
    with about(linear):
        check_weight(weight)
        value = weight.masked_fill(~fixed_mask(weight, "magnitude", None), 0)
        known = {"method": "magnitude", **_checked(value), "relative_error": relative_error(weight, value), "tokens": 0}
    why = {} if reason is None else {"by_magnitude": reason}
    return Item(f"{linear}.weight", value, {**known, **why, "seconds": time.perf_counter() - started})


def rounded(linear: str, weight: Tensor, scheme: Scheme, recipe: Recipe, reason: str | None = None) -> Item:
    """Return a linear rounded to nearest by its weight `[n, k]` alone; `reason` says why, if that was not asked for."""
    started = time.perf_counter()
    with about(linear):
        wide = _filled(weight, _width(scheme, weight.shape[1], recipe))
        tensor, facts = rtn.quantize(wide, scheme, clip=recipe.clip, signed=recipe.signed)
    known = {"method": "rtn", "tokens": 0, **({} if reason is None else {"reason": reason})}
    item = _item(linear, weight, tensor, {**facts, **known}, recipe)
    return Item(item.name, item.value, {**(item.facts or {}), "seconds": time.perf_counter() - started})


def relative_error(weight: Tensor, value: QuantizedTensor | Tensor) -> float:
    """Return `||W - Q|| / ||W||`, 0 for a weight of zeros; columns of Q past those of W do not count."""
    decoded = value.dequantize() if isinstance(value, QuantizedTensor) else value.to(torch.float32, copy=True)
    difference = decoded[:, : weight.shape[1]]
    difference.sub_(weight)  # in place, and no float32 copy of the weight: this is a run's peak
    norm = torch.linalg.vector_norm(weight, dtype=working_dtype(weight)).clamp_min(1e-30)
    return float(torch.linalg.vector_norm(difference) / norm)


def _width(goal: Goal, k: int, recipe: Recipe | Pruning) -> int:
    """Return how many columns a weight of `k` is solved in: those of whole groups and quads, where padding is asked."""
    return goal.padded_k(k) if isinstance(recipe, Recipe) and recipe.pad and isinstance(goal, Scheme) else k


def _filled(weight: Tensor, width: int) -> Tensor:
    """Return a weight with columns of zeros up to `width`, which leave the scale of a last group as it was."""
    if weight.shape[1] == width:
        return weight
    check_weight(weight)  # here, where its size is still its own
    return pad(weight, (0, width - weight.shape[1]))


def _widened(h: Tensor, width: int) -> Tensor:
    """Return a Hessian with columns that no other depends on, as large as the mean one: damping stays, none is dead.

    Weights of zero there have no error, so they change neither a loss nor what becomes of a real column.
    """
    missing = width - len(h)
    return torch.block_diag(h, h.diagonal().mean() * torch.eye(missing, device=h.device)) if missing else h


def _item(
    name: str, weight: Tensor, tensor: QuantizedTensor | Tensor, facts: dict[str, Any], recipe: Recipe | Pruning
) -> Item:
    """Return a solved linear as it is stored, filled up with zeros where that was asked, with the weight's facts."""
    facts = {**facts, "relative_error": relative_error(weight, tensor)}
    shape = tuple(weight.shape)
    if isinstance(tensor, QuantizedTensor):
        stored = stored_shape(recipe, tensor.scheme, *shape)
        if stored != shape:
            facts |= {"zeros": facts["zeros"] - tensor.codes.numel() + weight.numel()} if "zeros" in facts else {}
            tensor, facts = restated(tensor, tensor.scheme, stored), {**facts, "true_shape": list(shape)}
    return Item(f"{name}.weight", tensor, facts)


def _trusted(
    names: str, k: int, tokens: int, recipe: Recipe | Pruning, progress: Progress
) -> tuple[Recipe | Pruning, dict[str, str]]:
    """Return the recipe, without descent where it would fit the noise of so few tokens, and the fact that says so."""
    if not recipe.gptq.descent or tokens >= coordinate_descent.TOKENS_PER_COLUMN * k:
        return recipe, {}
    few = f"{tokens} tokens for {k} input channels"
    progress.warn(
        f"{names}: no descent: {few} are fewer than {coordinate_descent.TOKENS_PER_COLUMN} each; give more --samples"
    )
    return dataclasses.replace(recipe, gptq=dataclasses.replace(recipe.gptq, descent=0)), {"descent_skipped": few}


def _factor(names: str, h: Tensor, recipe: Recipe | Pruning, sparse: bool, progress: Progress) -> Factor | None:
    """Return the group's factor, with a warning if it took more damping; None if the recipe then allows rounding."""
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


def _gptq(weights: Mapping[str, Tensor], scheme: Scheme, h: Tensor, recipe: Recipe, factor: Factor | None) -> Solved:
    def tall(weight: Tensor, rows: list[int]) -> list[gptq.Solution]:
        return gptq.split(gptq.quantize(weight, scheme, h, recipe.gptq, factor), rows)

    parts = _as_one(weights, tall)
    return [
        (
            part.tensor,
            {
                "method": part.facts.get("fallback", "gptq"),
                "loss": _known(part.loss),
                "rtn_loss": _known(part.rtn_loss),
                "norm": _known(part.norm),
                **part.facts,
            },
        )
        for part in parts
    ]


def _pruned(weights: Mapping[str, Tensor], h: Tensor, recipe: Recipe | Pruning, factor: Factor | None) -> Solved:
    def tall(weight: Tensor, rows: list[int]) -> list[Tensor]:
        return list(sparsegpt.prune(weight, h, recipe.gptq, factor).split(rows))

    used = {"damp": factor.damp, "rungs": list(factor.rungs)} if factor else {}
    found: Solved = []
    for (name, weight), value in zip(weights.items(), _as_one(weights, tall), strict=True):
        with about(name):
            facts = {"method": recipe.gptq.prune, **used, **_checked(value)}
        facts["loss"] = _known(row_losses(weight.float() - value.float(), None, h))
        facts["norm"] = _known(row_losses(weight, None, h))
        facts["dead_columns"] = int((h.diagonal() == 0).sum())
        found.append((value.clone(), facts))  # a slice of the tall weight would keep all of it in memory
    return found


def _as_one(weights: Mapping[str, Tensor], tall: Callable[[Tensor, list[int]], list[_Part]]) -> list[_Part]:
    """Return what `tall` makes of all weights stacked, given the rows of each; on an error it is asked one by one."""
    try:
        return tall(torch.cat(list(weights.values())), [len(w) for w in weights.values()])
    except NumericError:  # which says whose row it is
        parts = []
        for name, weight in weights.items():
            with about(name):
                parts += tall(weight, [len(weight)])
        return parts


def _checked(value: Tensor) -> dict[str, Any]:
    """Return what is reported of a pruned weight, which is made sure to be 2:4."""
    kept = value != 0
    sparsity.check(kept)
    return {"zeros": value.numel() - int(kept.sum()), "kept": int(kept.sum())}


def _known(losses: Tensor) -> float | None:
    """Return the sum of losses; None if it is no number, as with a Hessian that could not be used."""
    total = float(losses.sum(dtype=torch.float64))
    return total if math.isfinite(total) else None


def _rtn(weights: Mapping[str, Tensor], scheme: Scheme, h: Tensor, recipe: Recipe) -> Solved:
    found: Solved = []
    for name, weight in weights.items():
        with about(name):
            tensor, facts = rtn.quantize(
                weight,
                scheme,
                clip=recipe.clip,
                metric=recipe.metric,
                hessian=h,
                signed=recipe.signed,
                prune=recipe.prune or "magnitude",
            )
        w = weight.float()
        loss, norm = (_known((d @ h) * d) for d in (w - tensor.dequantize(), w))
        found.append((tensor, {"method": "rtn", "loss": loss, "rtn_loss": loss, "norm": norm, **facts}))
    return found
