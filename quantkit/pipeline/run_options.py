"""The options of a run besides its recipe: which revision, which device, and what becomes of the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from quantkit.progress import Progress


class RunKeywords(TypedDict, total=False):
    """The fields of `RunOptions` as keywords of a function."""

    revision: str | None
    device: str
    resume: bool
    overwrite: bool
    trust_remote_code: bool
    act_budget: int | None
    progress: Progress | None


@dataclass(frozen=True)
class RunOptions:
    """Hold the options of one run.

    `revision` is a branch, tag or commit of a hub model. `device` is `auto`, `cpu`, `cuda` or `cuda:1`. `act_budget` is
    the bytes of calibration activations held in RAM before they go to disk. Without `progress` a run is quiet.
    """

    revision: str | None = None
    device: str = "auto"
    resume: bool = False
    overwrite: bool = False
    trust_remote_code: bool = False
    act_budget: int | None = None
    progress: Progress | None = None
