"""The stages of a calibrated run. A new stage is a module here, and its entry in `stages_of`."""

from __future__ import annotations

from quantkit.calibration.stages.base import Stage
from quantkit.calibration.stages.gradients import Gradients
from quantkit.calibration.stages.solve import Solve
from quantkit.calibration.stages.statistics import Hessians, RowSums
from quantkit.calibration.stages.tune import Tune
from quantkit.recipes.recipe import Recipe


def stages_of(recipe: Recipe, before_solving: Stage | None = None) -> list[Stage]:
    """Compose the stages of a recipe in their order; `before_solving` comes behind Hessians."""
    gradients = Gradients() if recipe.tune and recipe.output_aware else None
    tune = Tune(recipe.tune, gradients) if recipe.tune else None
    stages = (gradients, RowSums(), Hessians(), before_solving, Solve(), tune)
    return [stage for stage in stages if stage is not None]
