"""The options of calibration text, as a recipe sets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from quantkit.errors import RecipeError, Setting, Words
from quantkit.keys import Count, Positive, check, key
from quantkit.text.conversations import RESERVED
from quantkit.text.sources import PACKAGED, SELF

Sources = Annotated[tuple[str, ...], Meta(min_length=1)]


@dataclass(frozen=True)
class Calib:
    """Name the calibration text: a data set, file or mixture, the number of sequences, their
    maximum length, the seed.

    `data` is a source, or a tuple of them with weights (`a.jsonl:0.5`). RecipeError for a value out
    of range.
    """

    data: str | Sources = key(
        "Calibration text",
        default=PACKAGED,
        level="shown",
        keyword="calib",
        typed="str | Path | Iterable[str | Path] | None",
        more="A source, or a list of sources with weights ([below](#calibration-data)).",
        when="Always: use text or conversations like the model's use.",
    )
    samples: Positive = key(
        "Calibration sequences",
        default=256,
        level="shown",
        when="128 for speed. More for many experts or with `descent`.",
    )
    max_length: Positive = key(
        "Their longest length in tokens",
        default=4096,
        level="shown",
        more="The model's own limit is kept.",
        when="Shorter to save memory and time.",
    )
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = key(
        "Seed of the draw of calibration text", default=0, when="To see how much the draw matters."
    )
    lengths: Literal["own", "fixed"] = key(
        "Documents whole, or windows of max_length tokens from the joined text",
        default="own",
        when="`fixed` for text of short lines.",
    )
    moe: Literal["routed", "all"] = key(
        "Calibrate experts on the tokens that reach them, or on all of their layer",
        default="routed",
        keyword="moe_calibration",
        more="An expert that fewer tokens reach than it has input channels takes all.",
        when="With little text and many experts.",
    )
    text_column: str | None = key(
        "Key of the text or messages in records",
        default=None,
        usual="text, messages or conversations",
        may_lack=True,
        when="If your records have another name for it.",
    )
    split: str | None = key(
        "Split of a hub data set",
        default=None,
        usual="train",
        may_lack=True,
        when="If the data set has other splits.",
    )
    template_args: dict[str, Any] | None = key(
        "Arguments of the chat template, as JSON or KEY=VALUE",
        default=None,
        usual="none",
        level="option",
        section="Calibration",
        typed="Mapping[str, Any] | None",
        may_lack=True,
        more="In a file a mapping. `tools` and `chat_template_kwargs` of a record go before them.",
        when="To calibrate a model as it will be used: `enable_thinking=false`, "
        "`reasoning_effort=high`.",
    )
    skip_bad_records: Count = key(
        "Most broken records of a source that are left out; more are refused",
        default=0,
        level="option",
        section="Calibration",
        may_lack=True,
        more="A record is broken if it is no JSON, breaks the form of messages, or is refused by "
        "the chat template. "
        "Records without text are always left out, and counted.",
        when="For large data sets with a few faults.",
    )

    def __post_init__(self) -> None:
        check(self, "calibration")
        if wrong := [name for name in self.template_args or () if name in RESERVED]:
            raise RecipeError(
                Words(
                    Setting("template_args"),
                    f"has {wrong[0]}, which is no argument of a chat template",
                ),
                "drop it",
            )

    @property
    def is_written(self) -> bool:
        """Whether the model writes a part of the text."""
        return any(
            each.partition(":")[0] == SELF
            for each in ([self.data] if isinstance(self.data, str) else self.data)
        )
