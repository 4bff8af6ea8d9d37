"""2:4 pruning: masks known before any rounding, by magnitude and by wanda's score, and SparseGPT.

SparseGPT chooses the mask during the sweep, and moves the surviving weights (ALGORITHMS 9).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.algorithms.coordinate_descent import descend_pruned
from quantkit.algorithms.hessian import Factor, damped, factorize, live_diagonal
from quantkit.algorithms.numerics import check_weight, working_dtype
from quantkit.algorithms.options import Options
from quantkit.algorithms.sweep import Pattern, column_blocks, round_block, targets
from quantkit.core.formats import dtype_name
from quantkit.core.sparsity import QUAD, weight_mask
from quantkit.core.threads import one_thread
from quantkit.errors import Command, NumericError, RecipeError, Setting, Words
from quantkit.names import Rule


def fixed_mask(weight: Tensor, rule: Rule, h: Tensor | None) -> Tensor:
    """Return the mask bool `[n, k]` of `weight` by `rule`: magnitude, or wanda with the Hessian `h`
    `[k, k]`.

    RecipeError as `check_fixed`, and for wanda without a Hessian. NumericError if every channel is
    dead.
    """
    check_fixed(rule)
    if rule == "magnitude":
        return weight_mask(weight)
    if h is None:
        raise RecipeError(
            "wanda needs calibration data",
            "give a calibration set",
            Words("use", Setting("prune_method", "magnitude")),
        )
    diagonal, dead = live_diagonal(h)
    if bool(dead.all()):
        raise NumericError(
            "no input channel ever moved in calibration",
            "use other text, or magnitude instead of wanda",
        )
    return weight_mask(weight, diagonal)


def check_fixed(rule: Rule) -> None:
    """Raise RecipeError if a rule needs more than rounding."""
    if rule == "sparsegpt":
        raise RecipeError(
            "sparsegpt moves the weights that stay, rounding does not",
            Words("use", Setting("method", "gptq")),
            Words(
                Setting("prune_method", "magnitude"),
                "on what",
                Command("prune", Setting("method", "sparsegpt")),
                "wrote",
            ),
        )


def prune(weight: Tensor, h: Tensor, options: Options, factor: Factor | None = None) -> Tensor:
    """Return `weight` `[n, k]` with at most two of each four values not zero, by the rule of
    `options`, in its dtype.

    sparsegpt moves the survivors so that outputs change least on the calibration tokens behind `h`
    `[k, k]`. Then `options.descent` passes choose the masks and values of single fours anew.
    `factor` is the result of `factorize` with `sparse`, if it is known already. NumericError for a
    weight that is not finite, for a survivor that overflows the dtype, and as `factorize`.
    """
    check_weight(weight)
    if options.prune != "sparsegpt":
        return weight.masked_fill(~fixed_mask(weight, options.prune, h), 0)
    factor = factor or factorize(h, options, sparse=True)
    values = survivors(weight, factor, options, sweep_pattern(weight, h, options, factor))
    if options.descent:
        with damped(h, factor), one_thread(h.device):
            values = descend_pruned(weight, values, h, options.descent)
    if not bool(torch.isfinite(values).all()):
        raise NumericError(
            f"weights that make up for pruned ones overflow {dtype_name(values.dtype)}",
            Words(Setting("skip"), "it"),
        )
    return values


def sweep_pattern(weight: Tensor, h: Tensor, options: Options, factor: Factor) -> Pattern:
    """Return the pattern of a weight `[n, k]`: known by magnitude or wanda, filled in by the sweep
    for sparsegpt.
    """
    if options.prune != "sparsegpt":
        return Pattern(fixed_mask(weight, options.prune, h).T.index_select(0, factor.order))
    n, k = weight.shape
    mask = torch.empty(k, n, dtype=torch.bool, device=weight.device)
    r = factor.r.diagonal().unsqueeze(-1)
    each = torch.arange(k // QUAD, device=weight.device)
    blocks = factor.r.reshape(k // QUAD, QUAD, k // QUAD, QUAD)[each, :, each]
    unit = blocks / blocks.diagonal(dim1=1, dim2=2).unsqueeze(1)
    eye = torch.eye(QUAD, dtype=unit.dtype, device=unit.device)
    with one_thread(r.device):
        ahead = r * torch.linalg.solve_triangular(unit, eye.expand_as(unit), upper=True).mT.reshape(
            k, QUAD
        )
    dtype = working_dtype(weight)
    return Pattern(mask, r.to(dtype), ahead.to(dtype))


def survivors(weight: Tensor, factor: Factor, options: Options, pattern: Pattern) -> Tensor:
    """Sweep `weight` `[n, k]` without rounding: return the weights that stay, moved, and zeros;
    fill in the pattern.
    """
    dtype = working_dtype(weight)
    w = weight.to(dtype).T.index_select(0, factor.order)
    values = torch.empty_like(w)
    d, v = torch.empty_like(w), factor.unit(dtype)
    for a, b in column_blocks(len(w), options.block, pattern):
        t = targets(w[a:b], (v[:a, a:b],), (d[:a],), values[a:b])
        round_block(t, d[a:b], w[a:b], v[a:b, a:b], None, None, pattern.part(a, b))
    values.masked_fill_(~pattern.mask, 0)  # a removed weight must not leave a negative zero
    return torch.empty_like(w).index_copy_(0, factor.order, values).T.to(weight.dtype).contiguous()
