"""The options of GPTQ and of the scale search, as a recipe sets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from quantkit.keys import Count, Positive, check, key
from quantkit.names import Clip, Metric, Rule


@dataclass(frozen=True)
class Options:
    """Hold damping, column order, block width, scales and refinement of one GPTQ run; RecipeError
    for a value out of range.

    `prune` chooses the mask of a 2:4 weight, whose scales are static in any order (ALGORITHMS 9).
    The others are as a recipe describes them.
    """

    damp: Annotated[float, Meta(gt=0, le=1)] = key(
        "Damping of the Hessian",
        default=1.0,
        usual="1.0, for 2:4 0.3, by another unit than the median 0.01",
        pruning=True,
        more="It keeps weights near the source where the text says little, so that other texts do "
        "not suffer. If a factorisation fails, ten times as much is tried, with a warning.",
        when="0.1 to follow the MARLIN paper.",
    )
    damp_kind: Literal["median", "own", "mean"] = key(
        "Damping by the median channel's diagonal, by each channel's own, or by the mean one",
        default="median",
        pruning=True,
        when="`mean` to reproduce published GPTQ.",
    )
    block: Positive = key(
        "Columns that are solved together",
        default=128,
        level="key",
        pruning=True,
        more="A matter of speed and memory.",
        when="Rarely.",
    )
    act_order: Literal["static", "off"] = key(
        "Columns of large activations first, or columns in their order",
        default="static",
        pruning=True,
        more="Groups stay as they are.",
        when="`off` to reproduce published GPTQ.",
    )
    clip: Clip = "search"
    metric: Metric = "block"
    on_unsolvable: Literal["stop", "rtn"] = key(
        "If no damping suffices: fail, or round that linear and report it",
        default="stop",
        when="`rtn` so that one bad layer does not stop the run.",
    )
    signed: bool = False
    refit: bool = key(
        "Solve for the scales once more when the codes are fixed",
        default=False,
        more="Scales of NVFP4 and MXFP4 stay.",
        usual="true for symmetric integers, else false",
        when="`false` to save time.",
    )
    descent: Count = key(
        "Passes that move single codes after GPTQ",
        default=0,
        usual="3 for symmetric integers, nvfp4 and mxfp4, else 0",
        when="0 to save time. 1 to 3 for accuracy with other formats.",
    )
    prune: Rule = "sparsegpt"
    first_token: Annotated[float, Meta(ge=0, le=100)] = key(
        "Weight of a document's first token in Hessians of normalised inputs, in parts of the "
        "document's length",
        default=0.1,
        level="key",
        pruning=True,
        more="At least 1. See [algorithms.md](algorithms.md) 2. Searches and masks that use the "
        "Hessian change, too.",
        when="0 to reproduce published GPTQ.",
    )

    def __post_init__(self) -> None:
        check(self, "gptq")
