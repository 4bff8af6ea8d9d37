"""The options of calibration text, as a recipe sets them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from quantkit.errors import RecipeError

#: Optional keys of the `calibration` section: a recipe without them has none of them in its file.
COLUMN_KEYS = ("text_column", "split")


@dataclass(frozen=True)
class Calib:
    """Name the calibration text: a data set, file or mixture, the number of sequences, their maximum length, the seed.

    `data` is a source, or a tuple of them with weights (`a.jsonl:0.5`). `text_column` is the key of records that have
    their text or conversation there, `split` the split of hub data sets. `lengths` is `own` (each document at its own
    length, ALGORITHMS 2) or `fixed` (windows of `max_length` tokens). `moe` says on which tokens an expert is
    calibrated: `routed` (those that the router sends to it) or `all` (of the layer). Data that were not `chosen`, but
    left to the default, may be replaced by the packaged text.
    RecipeError for a value out of range.
    """

    data: str | tuple[str, ...] = "c4"
    samples: int = 256
    max_length: int = 4096
    seed: int = 0
    lengths: Literal["own", "fixed"] = "own"
    moe: Literal["routed", "all"] = "routed"
    text_column: str | None = None
    split: str | None = None
    chosen: bool = field(default=False, compare=False)

    def to_mapping(self) -> dict[str, Any]:
        """Return the section of a recipe."""
        found = {key: getattr(self, key) for key in CALIBRATION_KEYS}
        found["data"] = self.data if isinstance(self.data, str) else list(self.data)
        return {key: value for key, value in found.items() if key not in COLUMN_KEYS or value is not None}

    def __post_init__(self) -> None:
        for name in ("samples", "max_length"):
            if getattr(self, name) < 1:
                raise RecipeError(f"calibration {name} is {getattr(self, name)}: use a positive number")
        if not 0 <= self.seed < 2**63:
            raise RecipeError(f"calibration seed is {self.seed}: use a number from 0 to 2^63 - 1")


#: Keys of the `calibration` section.
CALIBRATION_KEYS = tuple(f.name for f in dataclasses.fields(Calib) if f.name != "chosen")
