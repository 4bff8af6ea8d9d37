"""GPTQ: round column after column, and let the columns still to come make up for the errors already made.

With `R R^T = H + damping`, `R` upper triangular, and `V = R / diag(R)`, column j of a row should be
`t_j = w_j + sum_{i<j} D_i V_ij`, given the errors `D`; it is rounded, and its own error joins `D`. This gives the codes
of the published loop from one factorisation and without weights that drift in place (ALGORITHMS 5). Rows never meet, so
linears that share an input are solved as one tall weight and `split` afterwards.

A 2:4 weight is swept twice over one factor: without rounding, which shows how large the survivors grow and so what
their scales must cover; then from the original weight again, with those scales and the mask chosen anew, since now the
rounding errors are known (ALGORITHMS 9).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.algorithms import coordinate_descent, rtn
from quantkit.algorithms.cholesky import Factor, Options, factorize
from quantkit.algorithms.hessian import Hessian
from quantkit.algorithms.rtn import Grid, Metric
from quantkit.core import sparsity
from quantkit.core.formats import Format
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.core.sparsity import QUAD, best_two
from quantkit.core.tensors import dtype_name
from quantkit.errors import NumericError

__all__ = ["Factor", "Hessian", "Options", "Solution", "factorize", "prune", "quantize", "split"]

_TALLEST = 60000.0  # of weights whose scale, and that times the largest code, float16 holds
_STEP = 32  # columns that are corrected one by one before the rest of their block is corrected by one product


class Pattern(NamedTuple):
    """Which entries of a 2:4 weight stay: `kept` bool `[k, n]`, in processing order, columns in quads.

    With `r` and `ahead` the sweep fills in `kept` as each quad begins. `r` `[k, 1]` is the diagonal of R, `ahead`
    `[k, 4]` says how `t - w` of a quad's columns, times R's diagonal, goes on to its later ones: targets of the sweep
    take the columns before them in the quad for done without error, scores take them for not done yet.
    """

    kept: Tensor
    r: Tensor | None = None
    ahead: Tensor | None = None

    def part(self, a: int, b: int) -> Pattern:
        return Pattern(self.kept[a:b], *(None if x is None else x[a:b] for x in (self.r, self.ahead)))

    def begin(self, q: int, t: Tensor, w: Tensor) -> None:
        """Choose the two of the quad at `q` that cost most if removed, from its targets and weights `[4, n]`."""
        if self.r is not None and self.ahead is not None:
            quad = slice(q, q + QUAD)
            self.kept[quad] = best_two(torch.addmm(self.r[quad] * w, self.ahead[quad], t - w).abs_())


@dataclass(frozen=True, eq=False)
class Solution:
    """A quantized weight and what it costs, row by row: `tr(D H D^T)` with the undamped H, float64 `[n]`.

    `loss` is that of `tensor`, `rtn_loss` that of plain rounding with scales by the same rule, `norm` is
    `tr(w H w^T)`; `guard_rows` bool `[n]` marks rows for which plain rounding was better and was kept; `changes` are
    what `refine` made of the other rows. The facts hold the sums of both.
    """

    tensor: QuantizedTensor
    loss: Tensor
    rtn_loss: Tensor
    norm: Tensor
    guard_rows: Tensor
    facts: dict[str, Any]
    changes: dict[str, Tensor] = field(default_factory=dict)


def quantize(weight: Tensor, scheme: Scheme, h: Tensor, options: Options, factor: Factor | None = None) -> Solution:
    """Quantize `weight` `[n, k]` so that its outputs change least on the calibration tokens behind `h` `[k, k]`.

    `factor`, from `factorize` with the same `h`, options and sparsity, saves a factorisation. The result is never worse
    than plain rounding (of a 2:4 weight: under the same mask) on any row, measured with the undamped `h`. Raises what
    `rtn.quantize` and `factorize` raise; with `on_unsolvable="rtn"` a Hessian that cannot be factored gives plain
    rounding, and the facts say so (ALGORITHMS 5 to 7, 9 and 10).
    """
    rtn.check_weight(weight)
    groups = scheme.groups(weight.shape[1])
    try:
        factor = factor or factorize(h, options, scheme.sparsity is not None)
    except NumericError as error:
        if options.on_unsolvable == "stop":
            raise
        return _fallback(weight, scheme, h, options, str(error))
    errors = None
    if options.clip == "search":
        errors = rtn.group_errors(h, factor.diagonal, groups, options.metric, rtn.working_dtype(weight))
    if scheme.sparsity is not None:
        return _sparse(weight, scheme, h, options, factor, errors)
    grid = rtn.choose(weight, scheme, options.clip, errors, options.signed)
    if scheme.format.is_float and options.clip == "none":
        plain, _ = rtn.quantize(weight, scheme)
    else:
        plain = QuantizedTensor(scheme, rtn.encode(weight, scheme, grid), *grid)
    if options.act_order == "off" and groups > 1:
        swept = _sweep(weight, scheme, factor, options, None)
    else:
        swept = _sweep(weight, scheme, factor, options, grid)
    swept, changes = coordinate_descent.refine(weight, swept, h, descent=options.descent, refit=options.refit)
    return _guarded(weight, swept, plain, h, factor, changes)


def prune(weight: Tensor, h: Tensor, options: Options, factor: Factor | None = None) -> Tensor:
    """Return `weight` `[n, k]` with two of each quad at most, by the rule of `options`, in its dtype.

    sparsegpt moves the survivors so that outputs change least on the calibration tokens behind `h` `[k, k]`. `factor`
    is as for `quantize`, with `sparse`. Raises NumericError for what `rtn.check_weight` refuses, for a survivor that
    overflows the dtype, and what `factorize` raises (ALGORITHMS 9).
    """
    rtn.check_weight(weight)
    if options.prune != "sparsegpt":
        return weight.masked_fill(~rtn.fixed_mask(weight, options.prune, h), 0)
    factor = factor or factorize(h, options, sparse=True)
    pattern = _pattern(weight, h, options, factor)
    values = _survivors(weight, factor, options, pattern)
    if not bool(torch.isfinite(values).all()):
        raise NumericError(f"weights that make up for pruned ones overflow {dtype_name(values.dtype)}: --skip it")
    return values


def split(solution: Solution, rows: Sequence[int]) -> list[Solution]:
    """Cut a solution into those of the linears, of so many rows each, that were solved together."""
    parts = []
    first = 0
    for count in rows:
        part = slice(first, first + count)
        t = solution.tensor
        tensor = QuantizedTensor(t.scheme, t.codes[part], t.scales[part], None if t.zeros is None else t.zeros[part])
        guard = solution.guard_rows[part]
        changes = {name: changed[part] for name, changed in solution.changes.items()}
        facts = {**solution.facts, **rtn.scale_facts(tensor), **_sums({"guard_rows": guard, **changes})}
        losses = (solution.loss[part], solution.rtn_loss[part], solution.norm[part])
        parts.append(Solution(tensor, *losses, guard, facts, changes))
        first += count
    if first != len(solution.loss):
        raise ValueError(f"the parts have {first} rows, the solution {len(solution.loss)}")
    return parts


def _sparse(
    weight: Tensor, scheme: Scheme, h: Tensor, options: Options, factor: Factor, errors: list[rtn.Error] | None
) -> Solution:
    """Mask and codes together, in two sweeps (ALGORITHMS 9); the guard compares with rounding under the same mask."""
    pattern = _pattern(weight, h, options, factor)
    survivors = _survivors(weight, factor, options, pattern)
    # A row that would have to outgrow float16 gets scales for what it was: the guard then judges it like any other.
    grown = survivors.abs().amax(-1, keepdim=True) > _TALLEST
    survivors = torch.where(grown & (survivors != 0), weight, survivors)
    grid = rtn.choose(survivors, scheme, options.clip, errors, options.signed)
    swept = _sweep(weight, scheme, factor, options, grid, pattern)
    swept, changes = coordinate_descent.refine(weight, swept, h, descent=options.descent, refit=options.refit)
    kept = torch.empty_like(pattern.kept).index_copy_(0, factor.order, pattern.kept).T
    masked = weight.masked_fill(~kept, 0)
    own = rtn.choose(masked, scheme, options.clip, errors, options.signed)
    plain = QuantizedTensor(scheme, rtn.encode(masked, scheme, own), *own)
    solution = _guarded(weight, swept, plain, h, factor, changes)
    return replace(solution, facts={"prune": options.prune, **solution.facts})


def _pattern(weight: Tensor, h: Tensor, options: Options, factor: Factor) -> Pattern:
    """Return the pattern of a weight, known beforehand by the rules that look at the weight as it is."""
    if options.prune == "sparsegpt":
        n, k = weight.shape
        kept = torch.empty(k, n, dtype=torch.bool, device=weight.device)
        r = factor.r.diagonal().unsqueeze(-1)
        each = torch.arange(k // QUAD, device=weight.device)
        blocks = factor.r.reshape(k // QUAD, QUAD, k // QUAD, QUAD)[each, :, each]
        unit = blocks / blocks.diagonal(dim1=1, dim2=2).unsqueeze(1)
        eye = torch.eye(QUAD, dtype=unit.dtype, device=unit.device)
        ahead = r * torch.linalg.solve_triangular(unit, eye.expand_as(unit), upper=True).mT.reshape(k, QUAD)
        dtype = rtn.working_dtype(weight)
        return Pattern(kept, r.to(dtype), ahead.to(dtype))
    return Pattern(rtn.fixed_mask(weight, options.prune, h).T.index_select(0, factor.order))


def _survivors(weight: Tensor, factor: Factor, options: Options, pattern: Pattern) -> Tensor:
    """Sweep without rounding: return the weights that stay, moved to make up for those that go, and zeros."""
    dtype = rtn.working_dtype(weight)
    w = weight.to(dtype).T.index_select(0, factor.order)
    values = torch.empty_like(w)
    d, v = torch.empty_like(w), factor.v(dtype)
    for a, b in _blocks(len(w), options.block, pattern):
        t = torch.addmm(w[a:b], v[:a, a:b].T, d[:a], out=values[a:b])
        _round_block(t, d[a:b], w[a:b], v[a:b, a:b], None, None, pattern.part(a, b))
    values.masked_fill_(~pattern.kept, 0)  # without the sign of what was there
    return torch.empty_like(w).index_copy_(0, factor.order, values).T.to(weight.dtype).contiguous()


def _blocks(k: int, width: int, pattern: Pattern | None) -> Iterator[tuple[int, int]]:
    """Yield the bounds of blocks of columns, of so many columns each or, with a pattern, the next multiple of four."""
    width = width if pattern is None else QUAD * sparsity.quads(width + -width % QUAD)
    for a in range(0, k, width):
        yield a, min(a + width, k)


def _fallback(weight: Tensor, scheme: Scheme, h: Tensor, options: Options, reason: str) -> Solution:
    """Plain rounding, judged by the weights alone since there is nothing else to judge by."""
    tensor, facts = rtn.quantize(weight, scheme, clip=options.clip, signed=options.signed)
    loss = rtn.losses(weight, tensor, h)
    kept = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
    dead = int((h.diagonal() == 0).sum())
    facts = {"fallback": "rtn", "reason": reason, "rungs": [], "dead_columns": dead, **facts, "guard_rows": 0}
    return Solution(tensor, loss, loss.clone(), rtn.losses(weight, None, h), kept, facts)


def _guarded(
    weight: Tensor,
    swept: QuantizedTensor,
    plain: QuantizedTensor,
    h: Tensor,
    factor: Factor,
    changes: dict[str, Tensor],
) -> Solution:
    """Keep the better of the refined sweep and plain rounding, row by row (ALGORITHMS 5.3)."""
    loss, rtn_loss = rtn.losses(weight, swept, h), rtn.losses(weight, plain, h)
    worse = rtn_loss < loss
    keep = worse.unsqueeze(-1)
    changes = {name: rows.masked_fill(worse, 0) for name, rows in changes.items()}
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
        **_sums({"guard_rows": worse, **changes}),
    }
    return Solution(tensor, torch.minimum(loss, rtn_loss), rtn_loss, rtn.losses(weight, None, h), worse, facts, changes)


def _sums(rows: dict[str, Tensor]) -> dict[str, int]:
    return {name: int(counts.sum()) for name, counts in rows.items()}


def _sweep(
    weight: Tensor, scheme: Scheme, factor: Factor, options: Options, grid: Grid | None, pattern: Pattern | None = None
) -> QuantizedTensor:
    """Round in processing order on `grid`, or, if it is None, on scales chosen as each group begins (ALGORITHMS 5.2).

    With a `pattern`, which needs a grid, what it removes becomes zero. Everything is transposed, `[k, n]`, so that a
    column of the weight is contiguous.
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
    for a, b in _blocks(k, width, pattern):
        t = torch.addmm(w[a:b], v[:a, a:b].T, d[:a])
        if grid is None:
            # Where the columns of this group would go if none of them were rounded: what its scales must cover.
            shift = torch.linalg.solve_triangular(v[a:b, a:b].T, t - w[a:b], upper=False, unitriangular=True)
            error = _remaining_error(factor, options.metric, a, b, dtype)
            x = (w[a:b] + shift).T.contiguous()
            fitted = rtn.fit(x, scheme, options.clip, weight.dtype, error, signed=options.signed)
            _store(fitted, scales[a // width], None if zeros is None else zeros[a // width])
        steps = [(scales[j], None if zeros is None else zeros[j]) for j in group_of[a:b]]
        part = None if pattern is None else pattern.part(a, b)
        _round_block(t, d[a:b], w[a:b], v[a:b, a:b], steps, scheme.format, part)
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
    t: Tensor,
    d: Tensor,
    w: Tensor,
    v: Tensor,
    grids: list[tuple[Tensor, Tensor | None]] | None,
    fmt: Format | None,
    pattern: Pattern | None = None,
) -> None:
    """Turn the targets `t` `[b, n]` of a block into the values of codes, and fill in their errors `d` `[b, n]`.

    `w` `[b, n]` are the weights, `v` `[b, b]` the block of V, `grids` scales and zeros `[n]` of each column; without
    them and `fmt` nothing is rounded. What a `pattern` removes becomes zero; a quad's targets are all known before its
    first column is processed.
    """
    unit = 1 if pattern is None else QUAD
    for a in range(0, len(t), _STEP):
        b = min(a + _STEP, len(t))
        for q in range(a, b, unit):
            if q > a:
                t[q : q + unit].addmm_(v[a:q, q : q + unit].T, d[a:q])
            if pattern is not None:
                pattern.begin(q, t[q : q + unit], w[q : q + unit])
            for j in range(q, q + unit):
                if j > q:
                    t[j : j + 1].addmm_(v[q:j, j : j + 1].T, d[q:j])
                if pattern is not None:
                    t[j].mul_(pattern.kept[j])
                if grids is None or fmt is None:
                    torch.sub(w[j], t[j], out=d[j])
                    continue
                scale, zero = grids[j]
                rtn.snap(t[j].div_(scale), fmt, zero)
                torch.addcmul(w[j], t[j], scale, value=-1, out=d[j])
        t[b:].addmm_(v[a:b, b:].T, d[a:b])
