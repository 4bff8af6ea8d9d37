"""The options of calibration text, as a recipe sets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quantkit.errors import RecipeError


@dataclass(frozen=True)
class Calib:
    """Name the calibration text: a data set or file, the number of sequences, their maximum length, the seed.

    `lengths` is `own` (each document at its own length, ALGORITHMS 2) or `fixed` (windows of `max_length` tokens).
    `moe` says on which tokens an expert is calibrated: `routed` (those that the router sends to it) or `all` (of the
    layer).
    RecipeError for a value out of range.
    """

    data: str = "c4"
    samples: int = 256
    max_length: int = 4096
    seed: int = 0
    lengths: Literal["own", "fixed"] = "own"
    moe: Literal["routed", "all"] = "routed"

    def __post_init__(self) -> None:
        for name in ("samples", "max_length"):
            if getattr(self, name) < 1:
                raise RecipeError(f"calibration {name} is {getattr(self, name)}: use a positive number")
        if not 0 <= self.seed < 2**63:
            raise RecipeError(f"calibration seed is {self.seed}: use a number from 0 to 2^63 - 1")
