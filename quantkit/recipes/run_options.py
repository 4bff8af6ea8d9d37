"""The options of a run besides its recipe: which revision, which device, and what becomes of the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from quantkit.errors import RecipeError
from quantkit.progress import Progress


class Settings(TypedDict, total=False):
    """The fields of `RunOptions` as keywords of a function, but for the progress."""

    revision: str | None
    device: str
    resume: bool
    overwrite: bool
    trust_remote_code: bool
    act_budget: int | None
    min_share: float


class RunKeywords(Settings, total=False):
    """The fields of `RunOptions` as keywords of a function."""

    progress: Progress | None


@dataclass(frozen=True)
class RunOptions:
    """Hold the options of one run.

    `revision` is a branch, tag or commit of a hub model. `device` is `auto`, `cpu`, `cuda` or `cuda:1`. `act_budget` is
    the bytes of calibration activations held in RAM before they go to disk. `min_share` is the least share of the
    decoder's weights to quantize or prune; otherwise the run ends before any work. Without `progress` a run is quiet.
    RecipeError for a share or a number of bytes that is none.
    """

    revision: str | None = None
    device: str = "auto"
    resume: bool = False
    overwrite: bool = False
    trust_remote_code: bool = False
    act_budget: int | None = None
    min_share: float = 0.9
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.min_share <= 1:
            raise RecipeError(f"min_share is {self.min_share}: use a number from 0 to 1")
        if self.act_budget is not None and self.act_budget < 0:
            raise RecipeError(f"act_budget is {self.act_budget}: use a number of bytes, or None for all")
