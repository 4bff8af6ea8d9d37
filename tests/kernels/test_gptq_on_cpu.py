"""The kernels of coordinate descent and of tuning, run by an ordinary C++ compiler, against the same steps in torch.

So the arithmetic, the indices and the arguments are tested where there is no GPU. Only the order of sums differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from quantkit.kernels import driver, gptq as kernels, loader
from tests.kernels import emulation
from tests.kernels.gptq_steps import (
    CASES,
    FOURS,
    TUNED,
    fours,
    problem,
    same_rows,
    same_tuning,
    solved,
    solved_fours,
)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, instances: tuple[str, ...], device: torch.device) -> dict[str, Any]:
        return {instance: (name, instances, instance) for instance in instances}

    def launch(
        function: tuple[str, tuple[str, ...], str],
        grid: tuple[int],
        block: tuple[int],
        args: Sequence[Any],
        shared: int = 0,
    ) -> None:
        emulation.launch(*function, (*grid, 1), *block, args)

    monkeypatch.setattr(loader, "load", load)
    monkeypatch.setattr(driver, "launch", launch)


@pytest.mark.parametrize("case", [case for case in CASES if case[1] < 100], ids=str)
def test_the_kernel_moves_codes_as_torch_does(case: tuple[str, int, int, str]) -> None:
    name, n, b, kind = case
    given, expected = problem(name, n, b, kind), solved(name, problem(name, n, b, kind))
    found = solved(name, problem(name, n, b, kind), kernels.descend_block)
    same_rows(expected, found)
    assert torch.isfinite(found.e).all() and (n == 1 or not torch.equal(found.v, given.v))


@pytest.mark.parametrize("case", [case for case in FOURS if case[1] < 100], ids=str)
def test_the_kernel_moves_fours_as_torch_does(case: tuple[str | None, int, int, str]) -> None:
    given, expected = fours(*case), solved_fours(case[0], fours(*case))
    found = solved_fours(case[0], fours(*case), kernels.descend_fours)
    same_rows(expected, found)
    assert torch.isfinite(found.e).all() and (case[1] == 1 or not torch.equal(found.v != 0, given.v != 0))
    assert int((found.v != 0).view(-1, 4, case[1]).sum(1).max()) <= 2


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("label", TUNED)
def test_a_step_of_tuning_is_that_of_torch(label: str, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    same_tuning(label, stored, "cpu", monkeypatch)
