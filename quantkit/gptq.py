"""GPTQ: round column after column, and let the columns still to come make up for the errors already made.

With `R R^T = H + damping`, `R` upper triangular, and `V = R / diag(R)`, column j of a row should be
`t_j = w_j + sum_{i<j} D_i V_ij`, given the errors `D`; it is rounded, and its own error joins `D`. This gives the codes
of the published loop from one factorisation and without weights that drift in place (ALGORITHMS 5). Rows never meet, so
linears that share an input are solved as one tall weight and `split` afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from quantkit import rtn
from quantkit.errors import NumericError, RecipeError
from quantkit.formats import Format
from quantkit.hessian import Hessian, live_diagonal, precise, upper_factor
from quantkit.rtn import Clip, Grid, Metric
from quantkit.tensor import QuantizedTensor, Scheme

__all__ = ["Factor", "Hessian", "Options", "Solution", "factorize", "quantize", "split"]

_STEP = 32  # columns that are corrected one by one before the rest of their block is corrected by one product
_LEAST_DAMP_FLOAT32 = 1e-3  # below it a float32 factor loses its digits (ALGORITHMS 5.1)


@dataclass(frozen=True)
class Options:
    """What a recipe may set: damping, block of columns, order, scales; RecipeError for a value out of range.

    `damp_kind` "own" adds `damp` times each channel's own diagonal, "mean" times the mean diagonal (the published
    form). `block` is a matter of speed. `on_unsolvable` says whether a broken Hessian stops the run or means RTN.
    """

    damp: float = 0.01
    damp_kind: Literal["own", "mean"] = "own"
    block: int = 128
    act_order: Literal["static", "off"] = "static"
    clip: Clip = "search"
    metric: Metric = "block"
    on_unsolvable: Literal["stop", "rtn"] = "stop"

    def __post_init__(self) -> None:
        if not 0 < self.damp <= 1:
            raise RecipeError(f"gptq.damp {self.damp} is not in (0, 1]: use 0.01")
        if self.block < 1:
            raise RecipeError(f"gptq.block {self.block} is not positive: use 128")


@dataclass(frozen=True, eq=False)
class Factor:
    """A damped Hessian, factored: `r` upper triangular `[k, k]`, rows and columns in processing `order`.

    `order` int64 `[k]` are the columns as they are processed; `diagonal` `[k]`, in natural order, is the damped one;
    `damp` is what sufficed, `rungs` all that were tried; `dead` bool `[k]` marks channels that never moved.
    """

    r: Tensor
    order: Tensor
    diagonal: Tensor
    dead: Tensor
    damp: float
    rungs: tuple[float, ...]

    def v(self, dtype: torch.dtype) -> Tensor:
        """Return `R` with each column divided by its diagonal, all that the sweep needs."""
        return (self.r / self.r.diagonal()).to(dtype)


@dataclass(frozen=True, eq=False)
class Solution:
    """A quantized weight and what it costs, row by row: `tr(D H D^T)` with the undamped H, float64 `[n]`.

    `loss` is that of `tensor`, `rtn_loss` that of plain rounding with scales by the same rule, `norm` is
    `tr(w H w^T)`; `guard_rows` bool `[n]` marks rows for which plain rounding was better and was kept.
    """

    tensor: QuantizedTensor
    loss: Tensor
    rtn_loss: Tensor
    norm: Tensor
    guard_rows: Tensor
    facts: dict[str, Any]


def factorize(h: Tensor, options: Options) -> Factor:
    """Factor the damped Hessian `h` `[k, k]`, in float64 where the device is good at it (ALGORITHMS 5.1).

    A failing factorisation is tried again with ten times the damping, up to 1; `rungs` says so. NumericError if that is
    not enough, if no channel ever moved, if `h` is not finite or cannot be a covariance, or if `damp` is too small for
    float32.
    """
    h = h.to(precise(h.device))
    if h.dtype == torch.float32 and options.damp < _LEAST_DAMP_FLOAT32:
        raise NumericError(f"gptq.damp {options.damp} is too small for float32 on this GPU: use 0.001 or more")
    diagonal, dead = live_diagonal(h)
    if bool(dead.all()):
        raise NumericError("no input channel ever moved in calibration: use other text, or on_unsolvable: rtn")
    if options.act_order == "static":
        order = torch.argsort(diagonal, descending=True, stable=True)
    else:
        order = torch.arange(len(diagonal), device=h.device)
    scale = diagonal[order].sqrt()
    c = h.index_select(0, order).index_select(1, order).div_(scale).div_(scale.unsqueeze(-1))
    low, high = c.aminmax()
    if max(-low, high) > 1.01:
        raise NumericError("the Hessian is no covariance: an entry exceeds what its diagonal allows: calibrate anew")
    rungs: list[float] = []
    while not rungs or rungs[-1] < 1:
        rungs.append(min(10 * rungs[-1], 1.0) if rungs else options.damp)
        extra = rungs[-1] * (diagonal if options.damp_kind == "own" else diagonal.mean().expand_as(diagonal))
        c.diagonal().copy_(1 + (extra / diagonal)[order])
        r = upper_factor(c)
        if r is not None:
            return Factor(r.mul_(scale.unsqueeze(-1)), order, diagonal + extra, dead, rungs[-1], tuple(rungs))
    raise NumericError("the Hessian is no covariance: it is indefinite even with damping 1: calibrate anew")


def quantize(weight: Tensor, scheme: Scheme, h: Tensor, options: Options, factor: Factor | None = None) -> Solution:
    """Quantize `weight` `[n, k]` so that its outputs change least on the calibration tokens behind `h` `[k, k]`.

    `factor`, from `factorize` with the same `h` and options, saves a factorisation. The result is never worse than
    plain rounding on any row, measured with the undamped `h`. Raises what `rtn.quantize` and `factorize` raise; with
    `on_unsolvable="rtn"` a Hessian that cannot be factored gives plain rounding, and the facts say so
    (ALGORITHMS 5 to 7 and 10).
    """
    rtn.check_weight(weight)
    groups = scheme.groups(weight.shape[1])
    try:
        factor = factor or factorize(h, options)
    except NumericError as error:
        if options.on_unsolvable == "stop":
            raise
        return _fallback(weight, scheme, h, options, str(error))
    errors = None
    if options.clip == "search":
        errors = rtn.group_errors(h, factor.diagonal, groups, options.metric, rtn.working_dtype(weight))
    grid = rtn.choose(weight, scheme, options.clip, errors)
    if scheme.format.is_float and options.clip == "none":
        plain, _ = rtn.quantize(weight, scheme)
    else:
        plain = QuantizedTensor(scheme, rtn.encode(weight, scheme, grid), *grid)
    if options.act_order == "off" and groups > 1:
        swept = _sweep(weight, scheme, factor, options, None)
    else:
        swept = _sweep(weight, scheme, factor, options, grid)
    return _guarded(weight, swept, plain, h, factor)


def split(solution: Solution, rows: Sequence[int]) -> list[Solution]:
    """Cut a solution into those of the linears, of so many rows each, that were solved together."""
    parts = []
    first = 0
    for count in rows:
        part = slice(first, first + count)
        t = solution.tensor
        tensor = QuantizedTensor(t.scheme, t.codes[part], t.scales[part], None if t.zeros is None else t.zeros[part])
        guard = solution.guard_rows[part]
        facts = {**solution.facts, **rtn.scale_facts(tensor), "guard_rows": int(guard.sum())}
        losses = (solution.loss[part], solution.rtn_loss[part], solution.norm[part])
        parts.append(Solution(tensor, *losses, guard, facts))
        first += count
    if first != len(solution.loss):
        raise ValueError(f"the parts have {first} rows, the solution {len(solution.loss)}")
    return parts


def _fallback(weight: Tensor, scheme: Scheme, h: Tensor, options: Options, reason: str) -> Solution:
    """Plain rounding, judged by the weights alone since there is nothing else to judge by."""
    tensor, facts = rtn.quantize(weight, scheme, clip=options.clip)
    loss = _losses(weight, tensor, h)
    kept = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
    dead = int((h.diagonal() == 0).sum())
    facts = {"fallback": "rtn", "reason": reason, "rungs": [], "dead_columns": dead, **facts, "guard_rows": 0}
    return Solution(tensor, loss, loss.clone(), _losses(weight, None, h), kept, facts)


def _guarded(weight: Tensor, swept: QuantizedTensor, plain: QuantizedTensor, h: Tensor, factor: Factor) -> Solution:
    """Keep the better of the sweep and plain rounding, row by row (ALGORITHMS 5.3)."""
    loss, rtn_loss = _losses(weight, swept, h), _losses(weight, plain, h)
    worse = rtn_loss < loss
    keep = worse.unsqueeze(-1)
    zeros = None
    if swept.zeros is not None and plain.zeros is not None:
        zeros = torch.where(keep, plain.zeros, swept.zeros)
    codes, scales = torch.where(keep, plain.codes, swept.codes), torch.where(keep, plain.scales, swept.scales)
    tensor = QuantizedTensor(swept.scheme, codes, scales, zeros)
    facts = {
        "damp": factor.damp,
        "rungs": list(factor.rungs),
        "dead_columns": int(factor.dead.sum()),
        **rtn.scale_facts(tensor),
        "guard_rows": int(worse.sum()),
    }
    return Solution(tensor, torch.minimum(loss, rtn_loss), rtn_loss, _losses(weight, None, h), worse, facts)


def _losses(weight: Tensor, tensor: QuantizedTensor | None, h: Tensor) -> Tensor:
    """Return `d H d^T` for each row of `weight - tensor` (None: of the weight itself), float64 `[n]`."""
    h = h.to(precise(h.device))
    d = weight.to(rtn.working_dtype(weight))
    if tensor is not None:
        d = d - tensor.dequantize(d.dtype)
    parts = [((part @ h) * part).sum(-1) for part in (rows.to(h.dtype) for rows in d.split(1024))]
    return torch.cat(parts).double().clamp_(min=0)


def _sweep(weight: Tensor, scheme: Scheme, factor: Factor, options: Options, grid: Grid | None) -> QuantizedTensor:
    """Round in processing order on `grid`, or, if it is None, on scales chosen as each group begins (ALGORITHMS 5.2).

    Everything is transposed, `[k, n]`, so that a column of the weight is contiguous.
    """
    dtype = rtn.working_dtype(weight)
    w = weight.to(dtype).T.index_select(0, factor.order)
    k, n = w.shape
    groups = scheme.groups(k)
    scales = torch.empty(groups, n, dtype=dtype, device=w.device)
    zeros = None if scheme.symmetric else torch.empty_like(scales)
    if grid is not None:
        _store(grid, scales.T, None if zeros is None else zeros.T)
    group_of = (factor.order // (k // groups)).tolist()
    v = factor.v(dtype)
    d = torch.empty_like(w)
    codes = torch.empty(k, n, dtype=torch.uint8, device=w.device)
    width = k // groups if grid is None else options.block
    for a in range(0, k, width):
        b = min(a + width, k)
        t = torch.addmm(w[a:b], v[:a, a:b].T, d[:a])
        if grid is None:
            # Where the columns of this group would go if none of them were rounded: what its scales must cover.
            shift = torch.linalg.solve_triangular(v[a:b, a:b].T, t - w[a:b], upper=False, unitriangular=True)
            error = _remaining_error(factor, options.metric, a, b, dtype)
            fitted = rtn.fit((w[a:b] + shift).T.contiguous(), scheme, options.clip, weight.dtype, error)
            _store(fitted, scales[a // width], None if zeros is None else zeros[a // width])
        steps = [(scales[j], None if zeros is None else zeros[j]) for j in group_of[a:b]]
        _round_block(t, d[a:b], w[a:b], v[a:b, a:b], steps, scheme.format)
        codes[a:b] = scheme.format.encode(t) if zeros is None else t.add_(zeros[group_of[a:b]])
    codes = torch.empty_like(codes).index_copy_(0, factor.order, codes).T.contiguous()
    half = scales.T.to(torch.float16).contiguous()
    return QuantizedTensor(scheme, codes, half, None if zeros is None else zeros.T.to(torch.uint8).contiguous())


def _store(grid: Grid, scales: Tensor, zeros: Tensor | None) -> None:
    scales.copy_(grid.scales)
    if zeros is not None and grid.zeros is not None:
        zeros.copy_(grid.zeros)


def _remaining_error(factor: Factor, metric: Metric, a: int, b: int, dtype: torch.dtype) -> rtn.Error:
    """The error of a group [a, b) as its sweep begins: for "block", what the best compensation will leave of it.

    That is the Schur complement of the group in the damped Hessian of itself and all later columns (ALGORITHMS 7).
    """
    if metric == "mse":
        return rtn.square_error
    mean = factor.diagonal.mean()
    if metric == "diag":
        return rtn.diagonal_error((factor.diagonal[factor.order[a:b]] / mean).to(dtype))
    return rtn.triangular_error([(0, (factor.r[a:b, a:b] / mean.sqrt()).to(dtype))])


def _round_block(
    t: Tensor, d: Tensor, w: Tensor, v: Tensor, grids: list[tuple[Tensor, Tensor | None]], fmt: Format
) -> None:
    """Turn the targets `t` `[b, n]` of a block into the values of codes, and fill in their errors `d` `[b, n]`.

    `w` `[b, n]` are the weights, `v` `[b, b]` the block of V, `grids` scales and zeros `[n]` of each column.
    """
    for a in range(0, len(t), _STEP):
        b = min(a + _STEP, len(t))
        for j in range(a, b):
            if j > a:
                t[j : j + 1].addmm_(v[a:j, j].unsqueeze(0), d[a:j])
            scale, zero = grids[j]
            rtn.snap(t[j].div_(scale), fmt, zero)
            torch.addcmul(w[j], t[j], scale, value=-1, out=d[j])
        t[b:].addmm_(v[a:b, b:].T, d[a:b])
