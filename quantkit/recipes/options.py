"""The options beside the schema of recipes: calibration text, device and output, a size to fit; and
those of commands that plan, repack, load or write on.

This module imports no torch, so that `--help` is quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from quantkit.engines.tables import GPUS
from quantkit.errors import Option, RecipeError, Setting, Words
from quantkit.keys import Checked, Count, Fraction, Positive, check, key, option
from quantkit.progress import QUIET, Progress
from quantkit.text.conversations import RESERVED
from quantkit.text.sources import PACKAGED

Sources = Annotated[tuple[str, ...], Meta(min_length=1)]
#: The name of the source's own dtype among schemes, such as 16 bits.
DENSE = "dense"
#: Lets a target choose the scheme of embeddings or a head.
AUTO = "auto"


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
    tokens: Positive | None = key(
        "Tokens after which no further sequence is drawn",
        default=None,
        usual="without a GPU ten minutes' work, else none",
        keyword="calib_tokens",
        may_lack=True,
        more="Without a GPU and without `samples`, two cores get as many as they calibrate on in "
        "about ten minutes, at least 16,384, and `max_length` is 512 or more. The model's shapes "
        "alone decide.",
        when="More for accuracy, if time allows.",
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
        more="Two names with a comma between them are those of questions and answers. Usual pairs, "
        "such as instruction and output, need no name.",
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
        "the chat template. Records without text are always left out, and counted.",
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
    def sources(self) -> Sources:
        """The sources of `data`, also if it is a single one."""
        return (self.data,) if isinstance(self.data, str) else self.data


@dataclass(frozen=True)
class RunOptions(Checked):
    """Hold the options of one run. Without `progress` it is quiet. RecipeError for a value out of
    range.
    """

    revision: str | None = key(
        "Branch, tag or commit of a hub model",
        default=None,
        usual="its main branch",
        section="Advanced",
    )
    device: str = key(
        "Where to compute: auto, cpu, cuda, cuda:1 ...",
        default="auto",
        level="shown",
        section="Basic",
    )
    resume: bool = key(
        "Continue the interrupted run that left OUT.partial-*",
        default=False,
        level="shown",
        section="Output",
    )
    overwrite: bool = key(
        "Replace OUT when the new folder is complete",
        default=False,
        level="shown",
        section="Output",
    )
    trust_remote_code: bool = key(
        "Run Python code that comes with the model", default=False, section="Advanced"
    )
    act_budget: Count | None = key(
        "Bytes of calibration activations kept in RAM, like 8GB; more go to disk",
        default=None,
        usual="all",
        section="Advanced",
        metavar="BYTES",
    )
    min_share: Fraction = key(
        "Leave with exit code 4 if the share of the decoder's weights that change is below it",
        default=0.9,
        section="Output",
        metavar="X",
    )
    progress: Progress = QUIET


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
        metavar="BYTES",
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
        metavar="NAMES",
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


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Checked):
    """Hold the options of a plan for another machine."""

    gpu: str | None = option(
        "GPU on which --target will run",
        default=None,
        usual="the one here",
        section="Output",
        choices=tuple(GPUS),
    )
    gpu_memory: Positive | None = option(
        "Memory of the GPU that will quantize, if it is not here, like 80GB",
        default=None,
        section="Advanced",
        metavar="BYTES",
    )
    probe: bool = key(
        "Measure a part of a long run to estimate its duration",
        default=True,
        usual="probe",
        section="Advanced",
    )


@dataclass(frozen=True, kw_only=True)
class PackOptions(Checked):
    """Hold the options for a checkpoint that does not fit the other layout, and for its files."""

    pad: bool = option("Fill weights up with zeros to shapes that the layout holds", default=False)
    requantize: bool = option(
        "Round again what has no lossless way (lossy; it is reported)", default=False
    )
    requantize_scales: bool = option(
        "Round scales that are no float16 values, keep codes (reported)", default=False
    )
    max_shard_size: int = option(
        "Most bytes of one weight file",
        default=2**31,
        usual="2GiB",
        section="Output",
        metavar="BYTES",
    )
    overwrite: bool = option(
        "Replace OUT when the new folder is complete", default=False, section="Output"
    )
    trust_remote_code: bool = option("Run Python code that comes with the model", default=False)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Checked):
    """Hold the options of every command that runs a checkpoint."""

    device: str = option(
        "Where to compute: auto, cpu, cuda, cuda:1 ...", default="auto", section="Basic"
    )
    revision: str | None = option(
        "Branch, tag or commit of a hub model", default=None, section="Advanced"
    )
    trust_remote_code: bool = option(
        "Run Python code that comes with the model", default=False, section="Advanced"
    )
    check: bool = option(
        "Read files that differ from their recorded hashes",
        default=True,
        negated=True,
        section="Advanced",
    )


@dataclass(frozen=True, kw_only=True)
class WriteOptions(Checked):
    """Hold how a model writes on after a prompt."""

    chat: bool = option("Answer PROMPT, through the model's chat template", default=False)
    max_new_tokens: Positive = option("Most tokens to write", default=64)
    temperature: Annotated[float, Meta(ge=0)] | None = option(
        "Draw tokens; below 1 the likelier", default=None, usual="0", metavar="X"
    )
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = option(
        "Draw from the likeliest tokens that sum to this probability",
        default=None,
        usual="1",
        metavar="X",
    )
    seed: int | None = option("Seed of the draws", default=None, usual="0")
