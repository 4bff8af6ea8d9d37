"""The options of GPTQ and of the scale search, as a recipe sets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quantkit.errors import RecipeError
from quantkit.names import Clip, Metric, Rule


@dataclass(frozen=True)
class Options:
    """Hold damping, column order, block width, scales and refinement of one GPTQ run.

    `damp_kind` "own" adds `damp` times each channel's own diagonal; "mean" adds `damp` times the mean diagonal, as
    published. `block` (columns) changes speed only. `on_unsolvable` decides whether a broken Hessian stops the run or
    falls back to RTN. `signed` allows negative scales for symmetric INT4 (ALGORITHMS 3). `descent` (passes)
    and `refit` refine the result of the sweep (ALGORITHMS 8). `prune` chooses the mask of a 2:4 weight, whose
    scales are static in any order (ALGORITHMS 9). `cap_tokens` limits the weight of tokens of extreme norm and
    outputs in the Hessian (ALGORITHMS 2). RecipeError for a value out of range.
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
    cap_tokens: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.damp <= 1:
            raise RecipeError(f"damp {self.damp} is not in (0, 1]", "use 0.01")
        if self.block < 1:
            raise RecipeError(f"gptq.block {self.block} is not positive", "use 128")
        if self.descent < 0:
            raise RecipeError(f"descent {self.descent} is negative", "use 0 for none, or 1 to 3 passes")
