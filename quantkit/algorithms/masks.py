"""2:4 masks that are known before any rounding: by magnitude, and by wanda's score
(ALGORITHMS 9).
"""

from __future__ import annotations

from torch import Tensor

from quantkit.algorithms.hessian import live_diagonal
from quantkit.core import sparsity
from quantkit.errors import Command, NumericError, RecipeError, Setting, Words
from quantkit.names import Rule


def fixed_mask(weight: Tensor, rule: Rule, h: Tensor | None) -> Tensor:
    """Return the mask bool `[n, k]` of `weight` by `rule`: magnitude, or wanda with the Hessian `h`
    `[k, k]`.

    RecipeError as `check_fixed`, and for wanda without a Hessian. NumericError if every channel is
    dead.
    """
    check_fixed(rule)
    if rule == "wanda" and h is None:
        raise RecipeError(
            "wanda needs calibration data",
            "give a calibration set",
            Words("use", Setting("prune_method", "magnitude")),
        )
    if rule == "magnitude" or h is None:
        return sparsity.weight_mask(weight)
    diagonal, dead = live_diagonal(h)
    if bool(dead.all()):
        raise NumericError(
            "no input channel ever moved in calibration",
            "use other text, or magnitude instead of wanda",
        )
    return sparsity.weight_mask(weight, diagonal)


def check_fixed(rule: Rule) -> None:
    """Raise RecipeError if a rule needs more than rounding."""
    if rule == "sparsegpt":
        sparsegpt = Setting("method", "sparsegpt")
        raise RecipeError(
            "sparsegpt moves the weights that stay, rounding does not",
            Words("use", Setting("method", "gptq")),
            Words(
                Setting("prune_method", "magnitude"),
                "on what",
                Command("prune", sparsegpt),
                "wrote",
            ),
        )
