"""A run that is resumed elsewhere is refused where its bytes would be others."""

from __future__ import annotations

from typing import Any

from quantkit.recipes.identity import difference

RUN: dict[str, Any] = {"quantkit": "1", "torch": "2", "transformers": "5", "recipe": {}, "recipe_sha256": "a"}
RUN |= {"device": "some GPU", "compute_dtype": "bfloat16", "solver": "kernels", "source": {}, "calibration": "b"}


def test_a_gpu_run_is_not_continued_by_another_solver() -> None:
    assert difference(RUN, RUN) is None
    found = difference(RUN, {**RUN, "solver": "torch"})
    assert found == "the solver was kernels and is now torch: install or remove CuPy as then, or use --overwrite"


def test_a_journal_that_does_not_name_the_solver_is_of_a_version_without_kernels() -> None:
    before = {key: value for key, value in RUN.items() if key != "solver"}
    assert difference(before, {**RUN, "solver": "torch"}) is None
    assert "the solver was torch" in str(difference(before, RUN))


def test_tuning_is_not_continued_on_a_cpu_that_multiplies_in_another_dtype() -> None:
    before = {**RUN, "device": "cpu", "tuning_dtype": "bfloat16"}
    assert difference(before, before) is None
    found = difference(before, {**before, "tuning_dtype": "float32"})
    assert found == (
        "the dtype of tuning was bfloat16 and is now float32: continue on a CPU like that one, or use --overwrite"
    )
