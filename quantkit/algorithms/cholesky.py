"""What GPTQ may be asked for, and the one factorisation of a damped Hessian that all of it rests on (ALGORITHMS 5.1).

With each channel divided by the root of its diagonal, damping is a number added to a correlation matrix, and no massive
channel can drown the others. The order of the columns is decided here, since the factor depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quantkit.algorithms.hessian import live_diagonal, precise, upper_factor
from quantkit.algorithms.rtn import Clip, Metric
from quantkit.core import sparsity
from quantkit.core.sparsity import QUAD, Rule
from quantkit.errors import NumericError, RecipeError

_LEAST_DAMP_FLOAT32 = 1e-3  # below it a float32 factor loses its digits (ALGORITHMS 5.1)


@dataclass(frozen=True)
class Options:
    """What a recipe may set: damping, block of columns, order, scales; RecipeError for a value out of range.

    `damp_kind` "own" adds `damp` times each channel's own diagonal, "mean" times the mean diagonal (the published
    form). `block` is a matter of speed. `on_unsolvable` says whether a broken Hessian stops the run or means RTN.
    `signed` gives symmetric INT4 scales a sign (ALGORITHMS 3); `descent` passes over the columns and a `refit` of the
    scales follow the sweep (ALGORITHMS 8). `prune` chooses the mask of a 2:4 weight (ALGORITHMS 9), whose scales are
    static in any order.
    """

    damp: float = 0.01
    damp_kind: Literal["own", "mean"] = "own"
    block: int = 128
    act_order: Literal["static", "off"] = "static"
    clip: Clip = "search"
    metric: Metric = "block"
    on_unsolvable: Literal["stop", "rtn"] = "stop"
    signed: bool = False
    refit: bool = False
    descent: int = 0
    prune: Rule = "sparsegpt"

    def __post_init__(self) -> None:
        if not 0 < self.damp <= 1:
            raise RecipeError(f"gptq.damp {self.damp} is not in (0, 1]: use 0.01")
        if self.block < 1:
            raise RecipeError(f"gptq.block {self.block} is not positive: use 128")
        if self.descent < 0:
            raise RecipeError(f"gptq.descent {self.descent} is negative: use 0 for none, or 1 to 3 passes")


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


def factorize(h: Tensor, options: Options, sparse: bool = False) -> Factor:
    """Factor the damped Hessian `h` `[k, k]`, in float64 where the device is good at it (ALGORITHMS 5.1).

    `sparse` keeps the columns of a quad together and sorts quads, as 2:4 weights need it (ALGORITHMS 9). A failing
    factorisation is tried again with ten times the damping, up to 1; `rungs` says so. NumericError if that is not
    enough, if no channel ever moved, if `h` is not finite or cannot be a covariance, or if `damp` is too small for
    float32; LayoutError if `sparse` and 4 does not divide k.
    """
    h = h.to(precise(h.device))
    if h.dtype == torch.float32 and options.damp < _LEAST_DAMP_FLOAT32:
        raise NumericError(f"gptq.damp {options.damp} is too small for float32 on this GPU: use 0.001 or more")
    diagonal, dead = live_diagonal(h)
    if bool(dead.all()):
        raise NumericError("no input channel ever moved in calibration: use other text, --skip, or on_unsolvable: rtn")
    if options.act_order == "static":
        units = diagonal.view(sparsity.quads(len(diagonal)) if sparse else -1, QUAD if sparse else 1)
        first = torch.argsort(units.sum(-1), descending=True, stable=True) * units.shape[1]
        order = (first.unsqueeze(-1) + torch.arange(units.shape[1], device=h.device)).flatten()
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
