"""Sparse-MARLIN's kernel for Hopper: its tiles on paper, and what it does not take."""

from __future__ import annotations

import itertools

import pytest
import torch

from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import KernelError
from quantkit.kernels import marlin24_hopper as hopper
from quantkit.kernels.weights import marlin24_weight
from tests.kernels import sweeps
from tests.kernels.test_hopper import H200, LAYERS, TYPES, gpu

__all__ = ["gpu"]


def test_no_choice_has_columns_beyond_the_weight() -> None:
    """Zeros beyond it would be metadata that no product may see."""
    for (n, k), m, dtype, group in itertools.product(
        [*LAYERS, (128, 128), (384, 256)], (1, 7, 8, 9, 64, 300, 4096), TYPES, hopper.GROUPS
    ):
        tile = hopper.choose_tile(m, n, k, H200, dtype, group)
        assert hopper.instance(tile, dtype, group) in hopper.INSTANCES
        assert n % tile.columns == 0 and tile.cluster <= -(-k // 128)


def test_the_choice_is_near_the_best_of_the_sweep() -> None:
    """What an H200 took for every tile, shape and token count: the model must not have picked a slow one."""
    behind = sweeps.behind(
        "marlin24", "int4:g128:24", lambda m, n, k: hopper.choose_tile(m, n, k, H200, torch.float16, 128)
    )
    assert len(behind) == 9 * 8
    assert max(behind.values()) < 1.05 and sum(behind.values()) / len(behind) < 1.01, behind


@pytest.mark.gpu
def test_weights_that_fill_no_tile_are_an_error(gpu: None) -> None:
    n, k = 256, 160  # which no folder has, but the portable kernel takes
    scheme = Scheme.parse("int4:channel:24")
    parts = marlin24_weight(scheme, n, k, {})[0].tensors
    tensors = {name: torch.zeros(shape, dtype=dtype, device="cuda") for name, (dtype, shape) in parts.items()}
    x = torch.ones(2, k, dtype=torch.float16, device="cuda")
    with pytest.raises(KernelError, match="n and k to be multiples of 128"):
        hopper.matmul(x, tensors, scheme, n, k)
