"""One group of linears that share an input: weights and a Hessian in, quantized items with their facts out.

Weights of one scheme are solved as one tall weight, since rows never meet and the factor is the same (ALGORITHMS 2).
What could not be done as asked is an error here, or, where the recipe allows it, done otherwise, warned of and
recorded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit import gptq, rtn
from quantkit.checkpoint import Item
from quantkit.errors import NumericError, about
from quantkit.hessian import Hessian
from quantkit.progress import Progress
from quantkit.recipe import Recipe
from quantkit.tensor import QuantizedTensor, Scheme

Solved = list[tuple[QuantizedTensor, dict[str, Any]]]


def solve(
    weights: Mapping[str, Tensor], schemes: Mapping[str, Scheme], hessian: Hessian, recipe: Recipe, progress: Progress
) -> list[Item]:
    """Return the quantized items of linears `[n, k]`, by name, whose common input `hessian` was summed over.

    Facts: method, relative_error, loss, rtn_loss, norm (sums over rows with the undamped Hessian, ALGORITHMS 1),
    tokens, seconds, and what the solver reports. Raises NumericError, naming the linear, for weights that are not
    finite or overflow, and for a Hessian that cannot be used unless the recipe says `on_unsolvable: rtn`.
    """
    names = ", ".join(weights)
    k = next(iter(weights.values())).shape[1]
    for name, weight in weights.items():
        with about(name):
            rtn.check_weight(weight)
    if not hessian.tokens:
        if recipe.gptq.on_unsolvable == "stop":
            raise NumericError(
                f"{names}: no calibration token came here: give more text, leave it dense with --skip, or set gptq "
                "on_unsolvable: rtn in a recipe"
            )
        progress.warn(f"{names}: no calibration token came here, rounded to nearest")
        return [
            rounded(name, w, schemes[name], recipe, "no calibration token came here") for name, w in weights.items()
        ]
    if hessian.tokens < k / 8:
        progress.warn(f"{names}: only {hessian.tokens} tokens calibrate {k} input channels")
    h = hessian.matrix()
    factor = _factor(names, h, recipe, progress) if recipe.method == "gptq" else None
    together: dict[tuple[Scheme, torch.dtype], dict[str, Tensor]] = {}
    for name, weight in weights.items():
        together.setdefault((schemes[name], weight.dtype), {})[name] = weight
    items: list[Item] = []
    for (scheme, _), chosen in together.items():
        started = time.perf_counter()
        found = _gptq(chosen, scheme, h, recipe, factor) if recipe.method == "gptq" else _rtn(chosen, scheme, h, recipe)
        seconds = (time.perf_counter() - started) / sum(len(w) for w in chosen.values())
        for (name, weight), (tensor, facts) in zip(chosen.items(), found, strict=True):
            known = {"relative_error": relative_error(weight, tensor), "tokens": hessian.tokens}
            items.append(Item(f"{name}.weight", tensor, {**facts, **known, "seconds": seconds * len(weight)}))
    return items


def rounded(linear: str, weight: Tensor, scheme: Scheme, recipe: Recipe, reason: str | None = None) -> Item:
    """Return a linear rounded to nearest by its weight `[n, k]` alone; `reason` says why, if that was not asked for."""
    started = time.perf_counter()
    with about(linear):
        tensor, facts = rtn.quantize(weight, scheme, clip=recipe.clip)
    known = {"method": "rtn", "relative_error": relative_error(weight, tensor), "tokens": 0}
    why = {} if reason is None else {"reason": reason}
    return Item(f"{linear}.weight", tensor, {**facts, **known, **why, "seconds": time.perf_counter() - started})


def relative_error(weight: Tensor, tensor: QuantizedTensor) -> float:
    """Return `||W - Q|| / ||W||`, 0 for a weight of zeros."""
    difference = tensor.dequantize().sub_(weight)  # in place, and no float32 copy of the weight: this is a run's peak
    norm = torch.linalg.vector_norm(weight, dtype=rtn.working_dtype(weight)).clamp_min(1e-30)
    return float(torch.linalg.vector_norm(difference) / norm)


def _factor(names: str, h: Tensor, recipe: Recipe, progress: Progress) -> gptq.Factor | None:
    """Return the group's factor, with a warning if it took more damping; None if the recipe then allows rounding."""
    try:
        with about(names):
            factor = gptq.factorize(h, recipe.gptq)
    except NumericError as error:
        if recipe.gptq.on_unsolvable == "stop":
            raise
        progress.warn(f"{error}; rounded to nearest")
        return None
    if len(factor.rungs) > 1:
        progress.warn(f"{names}: the Hessian needed damping {factor.damp}, after {list(factor.rungs[:-1])}")
    return factor


def _gptq(
    weights: Mapping[str, Tensor], scheme: Scheme, h: Tensor, recipe: Recipe, factor: gptq.Factor | None
) -> Solved:
    rows = [len(w) for w in weights.values()]
    try:
        parts = gptq.split(gptq.quantize(torch.cat(list(weights.values())), scheme, h, recipe.gptq, factor), rows)
    except NumericError:  # again one by one, which says whose row it is
        parts = []
        for name, weight in weights.items():
            with about(name):
                parts.append(gptq.quantize(weight, scheme, h, recipe.gptq, factor))
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


def _known(losses: Tensor) -> float | None:
    """Return the sum of losses; None if it is no number, as with a Hessian that could not be used."""
    total = float(losses.sum(dtype=torch.float64))
    return total if math.isfinite(total) else None


def _rtn(weights: Mapping[str, Tensor], scheme: Scheme, h: Tensor, recipe: Recipe) -> Solved:
    found: Solved = []
    for name, weight in weights.items():
        with about(name):
            tensor, facts = rtn.quantize(weight, scheme, clip=recipe.clip, metric=recipe.metric, hessian=h)
        w = weight.float()
        loss, norm = (_known((d @ h) * d) for d in (w - tensor.dequantize(), w))
        found.append((tensor, {"method": "rtn", "loss": loss, "rtn_loss": loss, "norm": norm, **facts}))
    return found
