"""The options of a run that chooses a scheme for each linear, so that the output fits a size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from quantkit.errors import Option, RecipeError, Words
from quantkit.keys import Positive, check, key

#: The name of 16 bits, or of whatever dtype the source has, among schemes.
DENSE = "dense"


@dataclass(frozen=True)
class FitOptions:
    """Hold the size that an output must fit, and the schemes to choose from. RecipeError for a
    value out of range.

    `target` is the program that must open the output, None for any.
    """

    target_size: Positive | None = key(
        "Most bytes of OUT, like 4.6GB: chooses a scheme for each linear",
        default=None,
        level="shown",
        section="Output",
    )
    target_bits: Annotated[float, Meta(gt=0, le=32)] | None = key(
        "The same by the mean bits of a quantized weight, with scales, like 4.5",
        default=None,
        section="Output",
    )
    allowed: str | None = key(
        "Formats or schemes to choose from for a target, like int4,int6:g64,dense",
        default=None,
        usual="all that the layout and the program take",
        section="Output",
    )
    target: str | None = key(
        "Program that must open the folder of a target size",
        default=None,
        usual="any",
        section="Output",
        choices=("vllm", "sglang", "transformers", "quantkit"),
        table="quantkit.engines.tables:TARGETS",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.target_size is not None and self.target_bits is not None:
            raise RecipeError(
                "a size and a number of bits are two targets",
                "give one",
                subject=Option("target_bits"),
            )
        if self.allowed is not None and not self.is_asked:
            raise RecipeError(
                "there is no target to fit",
                Words("add", Option("target_size")),
                subject=Option("allowed"),
            )

    @property
    def is_asked(self) -> bool:
        """Whether there is a target."""
        return self.target_size is not None or self.target_bits is not None
