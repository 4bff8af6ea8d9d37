"""QUICK's kernel for Hopper: its tiles on paper, short ends of k, and what it does not take."""

from __future__ import annotations

import itertools

import pytest
import torch

from quantkit.errors import KernelError
from quantkit.kernels import quick_hopper as hopper
from tests.kernels import sweeps
from tests.kernels.operands import weight
from tests.kernels.test_hopper import H200, LAYERS, TYPES, agrees, gpu
from tests.kernels.test_naive import on_gpu

__all__ = ["gpu"]


def test_the_choice_is_a_tile_that_exists_and_has_a_step_for_each_of_its_blocks() -> None:
    for (n, k), m, dtype, group in itertools.product(
        [*LAYERS, (128, 32), (128, 128), (384, 448)], (1, 7, 8, 9, 64, 300, 4096), TYPES, hopper.GROUPS
    ):
        tile = hopper.choose_tile(m, n, k, H200, dtype, group)
        assert hopper.instance(tile, dtype, group) in hopper.INSTANCES
        assert tile.cluster <= -(-k // 128)


def test_the_choice_is_near_the_best_of_the_sweep() -> None:
    """What an H200 took for every tile, shape and token count: the model must not have picked a slow one."""
    behind = sweeps.behind(
        "quick", "int4:g128:asym", lambda m, n, k: hopper.choose_tile(m, n, k, H200, torch.float16, 128)
    )
    assert len(behind) == 9 * 8
    assert max(behind.values()) < 1.05 and sum(behind.values()) / len(behind) < 1.01, behind


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("label", "k"), [("int4:g32:asym", 32), ("int4:g32:asym", 160), ("int4:g64:asym", 64), ("int4:g64", 448)]
)
def test_ends_of_k_that_fill_no_step(gpu: None, label: str, k: int) -> None:
    for m, dtype in itertools.product((1, 20, 150), TYPES):
        agrees("quick", label, 384, k, m, dtype, None, bias=True)


@pytest.mark.gpu
def test_groups_that_no_step_is_whole_ones_of_are_an_error(gpu: None) -> None:
    tensors, q = on_gpu("quick", weight("int4:g256:asym", 256, 512))
    x = torch.ones(2, 512, dtype=torch.float16, device="cuda")
    with pytest.raises(KernelError, match="groups of 128, 64 or 32, not 256"):
        hopper.matmul(x, tensors, q.scheme, 256, 512)
