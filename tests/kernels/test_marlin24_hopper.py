"""Sparse-MARLIN's kernel for Hopper: its tiles on paper, and what it does not take."""

from __future__ import annotations

import itertools

import pytest
import torch

from quantkit.errors import KernelError
from quantkit.kernels import marlin24_hopper as hopper
from tests.kernels import sweeps
from tests.kernels.operands import weight
from tests.kernels.test_hopper import H200, LAYERS, TYPES, gpu
from tests.kernels.test_naive import on_gpu

__all__ = ["gpu"]

LABELS = ["int4:g128:24", "int4:channel:24"]


def test_no_choice_has_columns_beyond_the_weight() -> None:
    """Zeros beyond it would be metadata that no product may see."""
    for (n, k), m, dtype, group in itertools.product(
        [*LAYERS, (128, 128), (384, 256)], (1, 7, 8, 9, 64, 300, 4096), TYPES, hopper.GROUPS
    ):
        tile = hopper.choose_tile(m, n, k, H200, dtype, group)
        assert hopper.instance(tile, dtype, group) in hopper.INSTANCES
        assert n % tile.columns == 0 and tile.cluster <= -(-k // 128)


def test_the_choice_is_near_the_best_of_the_sweep() -> None:
    """With 1024 tokens clocks depend on what ran before, and on how tiles meet in the L2, which no figure knows."""
    behind = sweeps.behind("marlin24", lambda m, n, k: hopper.choose_tile(m, n, k, H200, torch.float16, 128))
    assert len(behind) == 9 * 7
    assert all(ratio < (1.05 if m < 1024 else 1.13) for (m, _, _), ratio in behind.items()), behind


@pytest.mark.gpu
def test_weights_that_fill_no_tile_are_an_error(gpu: None) -> None:
    tensors, q = on_gpu("marlin24", weight("int4:channel:24", 256, 160))
    x = torch.ones(2, 160, dtype=torch.float16, device="cuda")
    with pytest.raises(KernelError, match="n and k to be multiples of 128"):
        hopper.matmul(x, tensors, q.scheme, 256, 160)
