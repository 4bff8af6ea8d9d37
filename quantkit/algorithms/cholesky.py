"""Triangular factors of Hessians: `R R^T = H` turns the loss `delta H delta^T` into the squared
length of `delta R`.

The upper factor is the lower Cholesky factor of the matrix with both axes reversed. `factorize`
first divides each channel by the root of its diagonal. Damping is then added to a correlation
matrix, and a massive channel cannot drown the others (ALGORITHMS 5.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.algorithms.hessian import live_diagonal
from quantkit.algorithms.numerics import factor_dtype
from quantkit.algorithms.options import Options
from quantkit.core import sparsity
from quantkit.core.sparsity import QUAD
from quantkit.core.threads import one_thread
from quantkit.errors import NumericError, Setting, Words

_LEAST_DAMP_FLOAT32 = 1e-3  # below it a float32 factor loses its digits (ALGORITHMS 5.1)

#: float32 matrices `[k, k]` in `factorize`, by the dtype of factors: the sum, H, its copy, scratch,
#: the factor.
_MATRICES = {torch.float32: 5, torch.float64: 8}


@dataclass(frozen=True, eq=False)
class Factor:
    """Hold the factor of a damped Hessian: `r` upper triangular `[k, k]`, rows and columns in
    processing `order`.

    `order` int64 `[k]` is the processing order of the columns. `diagonal` `[k]`, in natural order,
    is the damped diagonal. `damp` is the damping that sufficed, `rungs` lists all tried values.
    `dead` bool `[k]` marks channels whose input was always zero.
    """

    r: Tensor
    order: Tensor
    diagonal: Tensor
    dead: Tensor
    damp: float
    rungs: tuple[float, ...]

    def unit(self, dtype: torch.dtype) -> Tensor:
        """Return `V`: `R` with each column divided by its diagonal, `[k, k]`. The sweep needs
        nothing else.
        """
        return (self.r / self.r.diagonal()).to(dtype)


def factor_bytes(k: int, dtype: torch.dtype) -> int:
    """Compute the bytes of matrices `[k, k]` in `factorize`, the Hessian's sum included; factors
    have `dtype`.
    """
    return _MATRICES[dtype] * 4 * k * k


def factorize(h: Tensor, options: Options, sparse: bool = False) -> Factor:
    """Factor the damped Hessian `h` `[k, k]`, in float64 where the device computes it fast
    (ALGORITHMS 5.1).

    `sparse` sorts groups of four columns for 2:4 weights (ALGORITHMS 9). A failing factorisation is
    repeated with ten times the damping, up to 1; `rungs` records this. NumericError if no damping
    suffices, every channel is dead, `h` is not finite or no covariance, or `damp` is too small for
    float32. LayoutError if `sparse` and 4 does not divide k.
    """
    dtype = factor_dtype(h.device)
    if dtype == torch.float32 and options.damp < _LEAST_DAMP_FLOAT32:
        raise NumericError(
            f"gptq.damp {options.damp} is too small for float32 on this GPU", "use 0.001 or more"
        )
    diagonal, dead = live_diagonal(h.to(dtype))  # a copy that is free again
    if bool(dead.all()):
        ways = Words("use other text,", Setting("skip"), ", or on_unsolvable: rtn")
        raise NumericError("no input channel ever moved in calibration", ways)
    order = _processing_order(diagonal, options, sparse)
    scale = diagonal[order].sqrt()
    correlation = (
        h.index_select(0, order)
        .index_select(1, order)
        .to(dtype)
        .div_(scale)
        .div_(scale.unsqueeze(-1))
    )
    low, high = correlation.aminmax()
    if max(-low, high) > 1.01:
        raise NumericError(
            "the Hessian is no covariance: an entry exceeds what its diagonal allows: calibrate "
            "anew"
        )
    rungs: list[float] = []
    while not rungs or rungs[-1] < 1:
        rungs.append(min(10 * rungs[-1], 1.0) if rungs else options.damp)
        extra = rungs[-1] * (
            diagonal if options.damp_kind == "own" else diagonal.mean().expand_as(diagonal)
        )
        correlation.diagonal().copy_(1 + (extra / diagonal)[order])
        r = _upper_factor(correlation)
        if r is not None:
            return Factor(
                r.mul_(scale.unsqueeze(-1)), order, diagonal + extra, dead, rungs[-1], tuple(rungs)
            )
    raise NumericError(
        "the Hessian is no covariance: it is indefinite even with damping 1: calibrate anew"
    )


def factorize_blocks(blocks: Tensor, diagonals: Tensor) -> Tensor:
    """Return upper triangular float64 `R` with `R R^T = block` for `blocks` `[m, g, g]`.

    A block's diagonal is taken from `diagonals` `[m, g]`. A block may be singular, so 1e-7 of each
    channel's own diagonal is added. Rounding errors in the sums may need more. NumericError if 1e-2
    is not enough.
    """
    scale = diagonals.double().sqrt()
    # A single block may be as wide as the weight, so extra copies are avoided.
    correlation = (
        blocks.to(torch.float64, copy=True).div_(scale.unsqueeze(1)).div_(scale.unsqueeze(2))
    )
    factors: Tensor | None = None
    left = torch.arange(len(blocks), device=blocks.device)
    for i in range(6):
        correlation.diagonal(dim1=1, dim2=2).fill_(1 + 1e-7 * 10**i)
        with one_thread(blocks.device):
            lower, failed = torch.linalg.cholesky_ex(
                (correlation if factors is None else correlation[left]).flip(1, 2)
            )
        upper = lower.flip(1, 2)
        del lower
        factors = upper if factors is None else factors.index_copy_(0, left, upper)
        left = left[failed != 0]
        if not len(left):
            return factors.mul_(scale.unsqueeze(2))
    raise NumericError("the Hessian is indefinite and so not a covariance: calibrate anew")


def _processing_order(diagonal: Tensor, options: Options, sparse: bool) -> Tensor:
    """Return the columns int64 `[k]` in the order of `act_order`, four at a time if
    `sparse`.
    """
    if options.act_order == "off":
        return torch.arange(len(diagonal), device=diagonal.device)
    units = diagonal.view(sparsity.quads(len(diagonal)) if sparse else -1, QUAD if sparse else 1)
    first = torch.argsort(units.sum(-1), descending=True, stable=True) * units.shape[1]
    return (first.unsqueeze(-1) + torch.arange(units.shape[1], device=diagonal.device)).flatten()


def _upper_factor(matrix: Tensor) -> Tensor | None:
    """Return upper triangular `R` with `R R^T = matrix` `[k, k]`, or None if the matrix is not
    positive definite.
    """
    with one_thread(matrix.device):
        lower, failed = torch.linalg.cholesky_ex(matrix.flip(0, 1))
    return None if bool(failed) else lower.flip(0, 1)
