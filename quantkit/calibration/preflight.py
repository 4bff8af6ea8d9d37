"""Refuse calibration sequences and devices that a run cannot use, divide documents over the ranks,
and begin a run on them.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.calibration.budget import split_documents
from quantkit.calibration.run import Run
from quantkit.calibration.stages import stages_of
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.memory_limits import release_heap
from quantkit.core.ranks import ALONE, Ranks
from quantkit.errors import Option, RecipeError, Setting, Words
from quantkit.models.block_runner import BlockRunner
from quantkit.models.devices import device_of
from quantkit.progress import Clock, Progress
from quantkit.recipes.goals import Goal
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import Recipe, goals_of
from quantkit.text.tokenizer import check_tokens


def check_sequences(recipe: Recipe, model: BlockRunner, sequences: Sequence[Tensor]) -> None:
    """Raise an error for calibration sequences that the model or a stage of the recipe cannot run
    on.
    """
    if not any(map(len, sequences)):
        method = (
            [Setting("method", "magnitude")]
            if recipe.layout is None
            else [Setting("method", "rtn")]
        )
        clip = [] if recipe.layout is None else [Setting("clip", "none")]
        raise RecipeError(
            "no calibration sequences", "give calibration data", Words("use", *method, *clip)
        )
    check_text(model, sequences)
    for stage in stages_of(recipe):
        stage.check(sequences)


def check_text(model: BlockRunner, sequences: Sequence[Tensor]) -> None:
    """Raise an error for calibration sequences that the model cannot run on."""
    longest = max(map(len, sequences))
    if longest > model.max_length:
        raise RecipeError(
            f"a calibration sequence has {longest} tokens, the model takes {model.max_length}",
            Words("use", Setting("max_length", model.max_length)),
        )
    embeddings = model.text.get_input_embeddings().get_parameter("weight")
    check_tokens(max(int(s.max()) for s in sequences), len(embeddings))


def require_devices(device: torch.device, here: Ranks) -> None:
    """Let each rank have its own GPU; RecipeError if two share one."""
    if here.count == 1:
        return
    here.device = device
    used: dict[tuple[str, str], int] = {}
    for rank, (machine, kind, name) in enumerate(
        here.exchange((platform.node(), device.type, str(device)))
    ):
        first = used.setdefault((machine, name), rank)
        if kind == "cuda" and first != rank:
            raise RecipeError(
                f"ranks {first} and {rank} would share {name}",
                Words("use", Option("device", "cuda"), ", and a GPU for each"),
            )


def on_own_device(device: str, here: Ranks) -> AbstractContextManager[object]:
    """Make the rank's GPU torch's current one, so that no rank allocates on another's."""
    if here.count == 1 or device_of(device).type == "cpu":
        return nullcontext()
    return torch.cuda.device(device)


def new_run(
    src: Checkpoint,
    recipe: Recipe,
    model: BlockRunner,
    sequences: Sequence[Tensor],
    work: Path,
    *,
    progress: Progress | None = None,
    act_budget: int | None = None,
    goals: Mapping[str, Goal | None] | None = None,
    beside: bool = False,
    ranks: Ranks = ALONE,
) -> Run:
    """Begin a run on this rank's part of all `sequences`, int64 `[t]`; all ranks are given the same
    arguments.

    `work` is the run's folder. Its files hold the activations after the last two blocks and, beyond
    `act_budget` bytes, the current activations. `goals` has the goal of each linear, None by the
    recipe. Raises as `check_sequences` and `split_documents`.
    """
    check_sequences(recipe, model, sequences)
    release_heap()  # of tokenizing, and of an earlier run in this process
    mine = split_documents([len(tokens) for tokens in sequences], ranks.count)[ranks.rank]
    # A copy of tokens in each forward would wait for a GPU.
    here = [tokens.to(model.device) for tokens in sequences[mine.start : mine.stop]]
    goals = goals_of(recipe, model.paths, model.kept_dense) if goals is None else goals
    progress, clock = progress or Progress(quiet=True), Clock(model.device)
    return Run(
        src,
        recipe,
        model,
        here,
        work,
        act_budget,
        progress,
        clock,
        goals,
        sequences,
        beside,
        ranks,
        mine.start,
    )


class SharedRun(NamedTuple):
    """Hold the values that the first rank of a calibrated run sends to the others."""

    recipe: Recipe
    sequences: Sequence[Tensor]
    work: Path
    done: Sequence[Mapping[str, Any]]

    def begin(self, model: BlockRunner, run: RunOptions, here: Ranks, **options: Any) -> Run:
        """Begin a rank's part, with the options of `new_run`."""
        return new_run(
            model.src,
            self.recipe,
            model,
            self.sequences,
            self.work,
            progress=run.progress,
            act_budget=run.act_budget,
            ranks=here,
            **options,
        )
