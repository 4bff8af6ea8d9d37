"""GPTQ: quantize a weight so that its outputs change least on the calibration tokens (ALGORITHMS 5
to 9).

Rows never interact. Linears that share an input are therefore solved as one tall weight, whose
solution has the rows of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from quantkit.algorithms import coordinate_descent, rtn
from quantkit.algorithms.hessian import (
    MATRICES,
    Factor,
    damped,
    diagonal_losses,
    factorize,
    output_losses,
    row_losses,
)
from quantkit.algorithms.numerics import check_weight, encode, working_dtype
from quantkit.algorithms.options import Options
from quantkit.algorithms.pruning import survivors, sweep_pattern
from quantkit.algorithms.scale_search import choose_scales, group_errors, search_bytes
from quantkit.algorithms.sweep import sweep
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme, concatenated
from quantkit.errors import NumericError
from quantkit.names import Json

#: Up to this magnitude a weight's scale, and its largest code times the scale, fit in float16.
TALLEST = 60000.0

#: A scale 16 times as large leaves FP6 31 of its 63 values, and FP5 15 of 31.
MOST_BINADES = 4

#: float32 matrices `[k, k]` while rows are solved, by the dtype of factors: the sum, H, the factors
#: of H and of the sweep, and H for the losses.
SQUARES = {torch.float32: 4, torch.float64: 7}
#: float32 matrices `[rows, k]` meanwhile, by device: weights, targets, errors, both results, the
#: search's scratch. The kernels of a GPU need no more than 4
#: (benchmarks/gpu/quantize_llama2-70b_3.csv).
_ROWS = {"cpu": 11, "cuda": 4}


@dataclass(frozen=True, eq=False)
class Solution:
    """Hold a quantized weight and its losses by row: `d H d^T` with the undamped H, float64 `[n]`.

    `loss` is the loss of `tensor`, `rtn_loss` the loss of plain rounding with scales by the same
    rule, and `norm` the loss of a zero weight. `guard_rows` bool `[n]` marks rows that were
    rounded, because rounding had less loss. `solver` describes the factorisation. `changes` counts
    the changes of `coordinate_descent.refine` in the other rows, by row `[n]`, and marks raised
    scales. `held_out`, float64 `[n, 2]`, has the losses of `tensor` and of plain rounding on inputs
    of each source that did not calibrate.
    """

    tensor: QuantizedTensor
    loss: Tensor
    rtn_loss: Tensor
    norm: Tensor
    guard_rows: Tensor
    solver: Json
    changes: dict[str, Tensor] = field(default_factory=dict)
    held_out: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def facts(self) -> Json:
        """The facts for the report: facts of the solver, counts of scales, sums over rows, and the
        loss on each held-out source over that of plain rounding.
        """
        sums = {
            name: int(rows.sum())
            for name, rows in {"guard_rows": self.guard_rows, **self.changes}.items()
        }
        losses = {source: each.sum(0).tolist() for source, each in self.held_out.items()}
        over_rounding = {
            source: loss / of_plain
            for source, (loss, of_plain) in losses.items()
            if of_plain and math.isfinite(loss / of_plain)
        }
        held_out = {"held_out": over_rounding} if over_rounding else {}
        return {**self.solver, **rtn.scale_facts(self.tensor), **sums, **held_out}

    def rows(self, part: slice) -> Solution:
        """Take some rows, as views."""
        return replace(
            self,
            tensor=self.tensor.rows(part),
            loss=self.loss[part],
            rtn_loss=self.rtn_loss[part],
            norm=self.norm[part],
            guard_rows=self.guard_rows[part],
            changes={name: rows[part] for name, rows in self.changes.items()},
            held_out={source: losses[part] for source, losses in self.held_out.items()},
        )


def quantize(
    weight: Tensor,
    scheme: Scheme,
    h: Tensor,
    options: Options,
    factor: Factor | None = None,
    floor: Tensor | None = None,
    held_out: Mapping[str, Tensor] = MappingProxyType({}),
) -> Solution:
    """Quantize `weight` `[n, k]` so that its outputs change least on the calibration tokens behind
    `h` `[k, k]`.

    `factor`, from `factorize` with the same `h`, options and sparsity, saves a factorisation. No
    row is worse than plain rounding (for a 2:4 weight: under the same mask), measured with the
    undamped `h`. `floor`, float32 `[n]`, raises the searched scales of FP6 and FP5 that are
    smaller, by powers of two up to 2^MOST_BINADES. `held_out` has inputs `[t, k]` that did not
    calibrate, by source. Raises the errors of `rtn.quantize` and `factorize`. With
    `on_unsolvable="rtn"`, a Hessian that cannot be factored gives plain rounding, and the facts say
    so.
    """
    check_weight(weight)
    groups = scheme.groups(weight.shape[1])
    try:
        factor = factor or factorize(h, options, scheme.sparsity is not None)
    except NumericError as error:
        if options.on_unsolvable == "stop":
            raise
        return _fallback(weight, scheme, h, options, str(error))
    errors = (
        group_errors(h, factor.diagonal, groups, options.metric, working_dtype(weight))
        if options.clip == "search"
        else None
    )
    pattern, covered, facts = None, weight, dict[str, Any]()
    if scheme.sparsity is not None:
        pattern, facts = sweep_pattern(weight, h, options, factor), {"prune": options.prune}
        covered = _moved(weight, survivors(weight, factor, options, pattern))
    grid = choose_scales(covered, scheme, options.clip, errors, options.signed)
    raised = {}
    if floor is not None:
        binades = (
            torch.log2(floor / grid.scales[:, 0]).ceil().nan_to_num(0.0).clamp(0, MOST_BINADES)
        )
        raised = {"raised_scales": binades > 0}
        grid = grid._replace(scales=grid.scales * binades.exp2().half().unsqueeze(-1))
    scales_by_group = options.act_order == "off" and groups > 1 and pattern is None
    swept = sweep(weight, scheme, factor, options, None if scales_by_group else grid, pattern)
    with damped(h, factor):
        refined = coordinate_descent.refine(
            weight,
            swept,
            h,
            descent=options.descent,
            refit=options.refit,
            masks=pattern is not None and options.prune == "sparsegpt",
        )
    # Last, because the check of a record waits for the GPU, and before it the launches of the sweep
    # hide behind the search.
    rounded = weight
    if pattern is not None:
        mask = torch.empty_like(pattern.mask).index_copy_(0, factor.order, pattern.mask).T
        rounded = weight.masked_fill(~mask, 0)
        grid = choose_scales(rounded, scheme, options.clip, errors, options.signed)
    if rtn.rounds_codes_first(scheme.format, options.clip):
        plain, _ = rtn.quantize(weight, scheme)
    else:
        plain = QuantizedTensor(scheme, encode(rounded, scheme, grid), *grid)
    solution = _guarded(weight, refined, plain, h, factor)
    losses = {
        source: torch.stack([output_losses(weight, t, x) for t in (solution.tensor, plain)], -1)
        for source, x in held_out.items()
    }
    return replace(
        solution,
        solver={**facts, **solution.solver},
        changes={**solution.changes, **raised},
        held_out=losses,
    )


def step_bytes(
    k: int, rows: int, group_sizes: Iterable[int | None], dtype: torch.dtype, device: str
) -> list[tuple[int, int]]:
    """List the bytes of matrices `[k, k]`, and of copies of the rows, in each step of `quantize`.

    Factors have `dtype`. `group_sizes` are those whose scales are searched by the metric `block`.
    """
    square, copy = 4 * k * k, 4 * k * rows
    return [
        (MATRICES[dtype] * square, copy),
        ((2 + dtype.itemsize // 4) * square + search_bytes(k, group_sizes), 2 * copy),
        (SQUARES[dtype] * square, _ROWS[device] * copy),
    ]


def join(parts: Sequence[Solution]) -> Solution:
    """Join the solutions of several row blocks, of one or more weights."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    return replace(
        first,
        tensor=concatenated([part.tensor for part in parts]),
        loss=torch.cat([part.loss for part in parts]),
        rtn_loss=torch.cat([part.rtn_loss for part in parts]),
        norm=torch.cat([part.norm for part in parts]),
        guard_rows=torch.cat([part.guard_rows for part in parts]),
        changes={name: torch.cat([part.changes[name] for part in parts]) for name in first.changes},
        held_out={
            source: torch.cat([part.held_out[source] for part in parts])
            for source in first.held_out
        },
    )


def _moved(weight: Tensor, survivors: Tensor) -> Tensor:
    """Choose the weights that scales of a 2:4 weight must cover: the weights after a first sweep
    without rounding (ALGORITHMS 9).

    A row that would overflow float16 gets scales for its original weights; the row guard applies as
    usual. The second sweep starts from the original weights, and chooses the mask again, now with
    rounding errors.
    """
    grown = survivors.abs().amax(-1, keepdim=True) > TALLEST
    return torch.where(grown & (survivors != 0), weight, survivors)


def _fallback(weight: Tensor, scheme: Scheme, h: Tensor, options: Options, reason: str) -> Solution:
    """Round to nearest without the Hessian, which is unusable."""
    tensor, facts = rtn.quantize(weight, scheme, clip=options.clip, signed=options.signed)
    loss = row_losses(weight, tensor, h)
    guard = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
    solver = {
        "fallback": "rtn",
        "reason": reason,
        "rungs": [],
        "dead_columns": int((h.diagonal() == 0).sum()),
        **facts,
    }
    return Solution(tensor, loss, loss.clone(), row_losses(weight, None, h), guard, solver)


def _guarded(
    weight: Tensor,
    refined: coordinate_descent.Refined,
    plain: QuantizedTensor,
    h: Tensor,
    factor: Factor,
) -> Solution:
    """Take the better of the refined sweep and plain rounding, row by row (ALGORITHMS 5.3)."""
    swept, loss = refined.tensor, refined.loss
    if loss is None:
        loss = row_losses(weight, swept, h)
    else:  # less the part of what damping added to the diagonal
        extra = factor.diagonal.to(h.dtype) - h.diagonal().to(factor.diagonal.dtype)
        loss = (loss - diagonal_losses(weight, swept, extra)).clamp_(min=0)
    rtn_loss = row_losses(weight, plain, h)
    worse = rtn_loss < loss
    changes = {name: rows.masked_fill(worse, 0) for name, rows in refined.changes.items()}
    tensor = coordinate_descent.rows_of(worse, plain, swept)
    solver = {
        "damp": factor.damp,
        "rungs": list(factor.rungs),
        "dead_columns": int(factor.dead.sum()),
    }
    norm = row_losses(weight, None, h)
    return Solution(tensor, torch.minimum(loss, rtn_loss), rtn_loss, norm, worse, solver, changes)
