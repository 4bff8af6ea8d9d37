"""The options of a run besides its recipe: which revision, which device, and what becomes of the
output.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.keys import Count, Fraction, check, key
from quantkit.progress import Progress
from quantkit.recipes.keywords import Settings


class RunKeywords(Settings, total=False):
    """The fields of `RunOptions` as keywords of a function."""

    progress: Progress | None


@dataclass(frozen=True)
class RunOptions:
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
    )
    min_share: Fraction = key(
        "Leave with exit code 4 if the share of the decoder's weights that change is below it",
        default=0.9,
        section="Output",
    )
    progress: Progress | None = None

    def __post_init__(self) -> None:
        check(self)
