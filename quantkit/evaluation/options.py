"""The options of evaluations, each declared once. This module imports no torch, so that `--help`
is quick.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from quantkit.keys import Checked, Count, Positive, TwoOrMore, option
from quantkit.names import Json
from quantkit.text.sources import FILES, NAMED, PACKAGED

Names = str | tuple[str, ...]
NAMES = "str | Iterable[str]"


@dataclass(frozen=True, kw_only=True)
class TextOptions(Checked):
    """The text of a perplexity or divergence, and how it is cut into windows."""

    data: str = option(
        f"Text: {', '.join(NAMED)}, or {FILES}",
        default="wikitext2",
        section="Basic",
        metavar="NAME|FILE",
        typed="str | Path",
    )
    tokens: TwoOrMore | None = option(
        "Read the text's first N tokens", default=None, usual="all", section="Basic", metavar="N"
    )
    window: TwoOrMore | None = option(
        "Tokens per window", default=None, usual="the model's context, at most 2048"
    )
    stride: Positive | None = option(
        "Tokens from one window to the next", default=None, usual="the window"
    )
    bos: bool | None = option(
        "Put the BOS token in front of every window",
        default=None,
        usual="as the tokenizer does",
    )

    @property
    def protocol(self) -> Json:
        """The options of `perplexity.cut`."""
        return {name: getattr(self, name) for name in ("window", "stride", "bos", "tokens")}


@dataclass(frozen=True, kw_only=True)
class TaskOptions(Checked):
    """Tasks of lm-eval, and how they are asked."""

    tasks: Names = option(
        "Tasks, groups or tags of lm-eval; zeroshot is ten usual ones",
        section="Basic",
        metavar="NAME,NAME",
        typed=NAMES,
    )
    data: str | None = option(
        "Folder with a folder of questions for each task",
        default=None,
        usual="the hub",
        section="Basic",
        metavar="DIR",
        typed="str | Path | None",
    )
    against: str | None = option(
        "Another checkpoint, compared in pairs on the same questions",
        default=None,
        section="Basic",
        metavar="CHECKPOINT",
        typed="str | Path | None",
    )
    limit: Positive | None = option(
        "Ask the first N questions of each task",
        default=None,
        usual="all",
        section="Basic",
        metavar="N",
    )
    shots: Count | None = option(
        "Examples before a question", default=None, usual="the task's", metavar="N"
    )
    chat_template: bool = option("Ask through the model's chat template", default=False)
    seed: Count = option("Seed that chooses the examples", default=1234, metavar="N")
    batch_size: Positive = option("Texts at a time", default=8, metavar="N")
    journal: str | None = option(
        "Keep finished parts in FILE, from which the same command continues",
        default=None,
        section="Output",
        metavar="FILE",
        typed="str | Path | None",
    )


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Checked):
    """Recipes to compare, and what judges their results."""

    recipes: Names = option(
        "Shipped recipes, YAML files, or schemes with a method, like fp6:g64:gptq",
        section="Basic",
        metavar="RECIPE,RECIPE",
        typed=NAMES,
    )
    device: str = option(
        "Where to compute: auto, cpu, cuda, cuda:1 ...", default="auto", section="Basic"
    )
    calib: Names = option(
        "Calibration texts as quantize takes them, each for rows of its own",
        default=PACKAGED,
        section="Calibration",
        metavar="SOURCE,NAME=SOURCE",
        typed=NAMES,
    )
    seeds: tuple[int, ...] = option(
        "Seeds of the draws of calibration text, like 0,1",
        default=(0,),
        section="Calibration",
        metavar="N,N",
        typed="Iterable[int]",
    )
    text: Names = option(
        "Texts for perplexity and KL divergence, as eval ppl takes them",
        default="wikitext2",
        metavar="SOURCE,NAME=SOURCE",
        typed=NAMES,
    )
    window: TwoOrMore | None = option(
        "Tokens per window", default=None, usual="the model's context, at most 2048"
    )
    tokens: TwoOrMore | None = option(
        "Read each text's first N tokens", default=None, usual="all", metavar="N"
    )
    tasks: Names = option(
        "Tasks, as eval tasks takes them", default="", metavar="NAME,NAME", typed=NAMES
    )
    data: str | None = option(
        "Folder with a folder of questions for each task",
        default=None,
        usual="the hub",
        metavar="DIR",
        typed="str | Path | None",
    )
    shots: Count | None = option(
        "Examples before a question", default=None, usual="the task's", metavar="N"
    )
    limit: Positive | None = option(
        "First N questions of each task", default=None, usual="all", metavar="N"
    )
    batch_size: Positive = option("Questions at a time", default=8, metavar="N")
    revision: str | None = option(
        "Branch, tag or commit of a hub model", default=None, section="Advanced"
    )
    trust_remote_code: bool = option(
        "Run Python code that comes with the model", default=False, section="Advanced"
    )


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(Checked):
    """How a checkpoint is proved."""

    device: str = option(
        "Where to compute: auto, cpu, cuda, cuda:1 ...", default="auto", section=""
    )
    unsealed: bool = option(
        "Accept codes that nothing can be compared with", default=False, section=""
    )
    engine: Literal["vllm"] | None = option(
        "Installed engine whose log-probabilities must be right", default=None, section=""
    )
    engine_args: Json | None = option(
        'Further arguments of the engine: \'{"quantization": "quantkit"}\'',
        default=None,
        section="",
        metavar="JSON",
        typed="Mapping[str, Any] | None",
    )
    trust_remote_code: bool = option(
        "Run Python code that comes with the model", default=False, section=""
    )


def listed(names: str | Iterable[str]) -> list[str]:
    """List names that are given with commas between them, or one by one; each once."""
    found = names.split(",") if isinstance(names, str) else names
    return list(dict.fromkeys(name.strip() for name in found if name.strip()))
