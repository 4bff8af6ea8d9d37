"""The stages of a calibrated run. A new stage is a module here, and its entry in `stages_of`."""

from __future__ import annotations

from quantkit.calibration.stages.base import Stage
from quantkit.calibration.stages.gradients import Gradients
from quantkit.calibration.stages.solve import Solve
from quantkit.calibration.stages.statistics import Hessians, RowSums
from quantkit.calibration.stages.tune import Tune
from quantkit.recipes.recipe import Recipe


def stages_of(recipe: Recipe, before_solving: Stage | None = None) -> list[Stage]:
    """Compose the stages of a recipe in their order. `between` comes between Hessians
    and solving.
    """
    solving = [RowSums(), Hessians(), *([before_solving] if before_solving else []), Solve()]
    if not recipe.tune:
        return solving
    gradients = Gradients() if recipe.output_aware else None
    return [*([gradients] if gradients else []), *solving, Tune(recipe.tune, gradients)]
