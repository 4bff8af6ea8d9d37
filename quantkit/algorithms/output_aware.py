"""Round a weight so that the model's likelihood changes least, not each output by itself (ALGORITHMS 8.3).

Plain GPTQ minimises `tr(D H D^T)` of the error `D`, which weighs all outputs equally and ignores their correlation.
Here the Hessian of the outputs, `H_out` `[n, n]`, weighs them, as in the Kronecker-factored loss of YAQA (Tseng et al.
2025, arXiv:2505.22988): `tr(D H D^T H_out)`. Rows are solved by GPTQ, some at a time, and each makes up for the errors
of the rows before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.algorithms.gptq import SQUARES, TALLEST, Solution, join, split
from quantkit.algorithms.hessian import row_losses
from quantkit.algorithms.numerics import factor_dtype, working_dtype
from quantkit.algorithms.rtn import scale_facts
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.threads import one_thread
from quantkit.errors import NumericError, Setting, Words

#: Added to the diagonal of `H_out`, relative to each of its entries.
DAMP = 0.02
#: A weight is solved in at most so many steps, and a step has at least so many rows.
_STEPS, _LEAST_ROWS = 32, 16
#: The least diagonal of `H_out` relative to the mean one: an output without any gradient does not count.
_LEAST = 1e-6

#: float32 matrices `[n, n]` while a Hessian of outputs is factored, by the dtype of factors: the sorted one, its
#: factor, that in order, and its float32 form.
_MATRICES = {torch.float32: 3, torch.float64: 7}
#: float32 matrices `[rows, k]` meanwhile: weights and sorted weights, codes, errors.
_SORTED = 3
#: The same while losses are compared: also the new codes, and of the largest weight its error, products and their sum
#: in float64.
_COMPARED = 10


def step_bytes(k: int, outputs: Sequence[int], dtype: torch.dtype) -> list[tuple[int, int]]:
    """List the bytes of matrices `[k, k]` and `[n, n]`, and of copies of all rows, in each step of `refine`."""
    rows = 4 * k * sum(outputs)
    squares = 4 * (SQUARES[dtype] * k * k + sum(n * n for n in outputs))
    return [(squares + 4 * _MATRICES[dtype] * max(outputs) ** 2, _SORTED * rows), (squares, _COMPARED * rows)]


def refine(
    weights: Sequence[Tensor],
    plain: Sequence[Solution],
    outputs: Sequence[Tensor],
    h: Tensor,
    solve: Callable[[Tensor], Solution],
) -> list[Solution]:
    """Solve weights `[n, k]` that share the Hessian `h` `[k, k]` again, by the Hessians `[n, n]` of their outputs.

    `plain` has their solutions without these Hessians; `solve` solves any rows that way. A weight keeps the plain one
    unless `tr(D h D^T H_out)` falls. Facts: `output_loss` and `plain_output_loss`, the traces of the result and of
    `plain`. NumericError for a Hessian of outputs that cannot be factored.
    """
    with one_thread(h.device):
        rows = [_Rows(weight, output) for weight, output in zip(weights, outputs, strict=True)]
    for step in range(max(len(each.bounds) for each in rows)):
        active = [each for each in rows if step < len(each.bounds)]
        with one_thread(h.device):
            targets = [each.target(step) for each in active]
        found = split(solve(torch.cat(targets)), [len(target) for target in targets])
        for each, part in zip(active, found, strict=True):
            each.put(step, part)
    return [
        _better(weight, each.solution(weight, h, before), before, h, output)
        for weight, each, before, output in zip(weights, rows, plain, outputs, strict=True)
    ]


class _Rows:
    """The rows of one weight in the order of solving: rows with the most important outputs come first.

    `H_out = R R^T` with an upper triangular `R`. So the loss is the sum over rows `i` of the squares of
    `R_ii D_i + sum over j < i of R_ji D_j`: the errors of earlier rows move the target of row `i`.
    """

    def __init__(self, weight: Tensor, output: Tensor) -> None:
        n, dtype = len(weight), factor_dtype(weight.device)
        self.order = torch.argsort(output.diagonal(), descending=True, stable=True)
        h = output.to(dtype)[self.order][:, self.order]
        size = h.diagonal().clamp_min(_LEAST * float(h.diagonal().mean()) or 1.0).sqrt()
        h.div_(size).div_(size.unsqueeze(-1))
        h.diagonal().add_(DAMP)
        lower, failed = torch.linalg.cholesky_ex(h.flip(0, 1))
        if bool(failed):
            raise NumericError(
                "the Hessian of its outputs is not a covariance", Words("use", Setting("output_aware", False))
            )
        self._root = lower.flip(0, 1).mul_(size.unsqueeze(-1)).to(working_dtype(weight))
        self._weight = weight[self.order]
        self._errors = torch.zeros_like(self._weight, dtype=self._root.dtype)
        height = max(_LEAST_ROWS, -(-n // _STEPS))
        self.bounds = [(a, min(a + height, n)) for a in range(0, n, height)]
        self._parts: list[Solution] = []

    def target(self, step: int) -> Tensor:
        """Compute target rows for a step, so that they make up for the errors of earlier rows."""
        a, b = self.bounds[step]
        rows = self._weight[a:b]
        if not a:
            return rows
        carried = self._root[:a, a:b].T @ self._errors[:a]
        shift = torch.linalg.solve_triangular(self._root[a:b, a:b].T, carried, upper=False)
        moved = shift.add_(rows).to(rows.dtype)
        # A target too large for a float16 scale would end the run.
        return torch.where(moved.abs().amax(-1, keepdim=True) <= TALLEST, moved, rows)

    def put(self, step: int, part: Solution) -> None:
        """Take the solved rows of a step."""
        a, b = self.bounds[step]
        self._errors[a:b] = self._weight[a:b].to(self._errors.dtype) - part.tensor.dequantize(self._errors.dtype)
        self._parts.append(part)

    def solution(self, weight: Tensor, h: Tensor, plain: Solution) -> Solution:
        """Return all rows in the order of the weight, with losses against the weight itself."""
        found, place = join(self._parts), torch.argsort(self.order)
        zeros = None if found.tensor.zeros is None else found.tensor.zeros[place]
        tensor = QuantizedTensor(found.tensor.scheme, found.tensor.codes[place], found.tensor.scales[place], zeros)
        return replace(
            found,
            tensor=tensor,
            loss=row_losses(weight, tensor, h),
            rtn_loss=plain.rtn_loss,
            norm=plain.norm,
            guard_rows=found.guard_rows[place],
            facts={**found.facts, **scale_facts(tensor)},
            changes={name: counts[place] for name, counts in found.changes.items()},
        )


def _better(weight: Tensor, found: Solution, plain: Solution, h: Tensor, output: Tensor) -> Solution:
    """Return the solution with the lower trace, with the traces of both among its facts."""
    with one_thread(h.device):
        new, old = (_output_loss(weight, solution.tensor, h, output) for solution in (found, plain))
    chosen = found if new < old else plain
    facts = {**chosen.facts, "output_loss": min(new, old), "plain_output_loss": old}
    return replace(chosen, facts=facts)


def _output_loss(weight: Tensor, tensor: QuantizedTensor, h: Tensor, output: Tensor) -> float:
    dtype = working_dtype(weight)
    error = weight.to(dtype) - tensor.dequantize(dtype)
    return float((error @ h.to(dtype)).mul_(output.to(dtype) @ error).sum(dtype=torch.float64))
