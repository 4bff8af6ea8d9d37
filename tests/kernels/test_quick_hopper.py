"""QUICK's kernel for Hopper: the choice of its tiles, short ends of k, and the groups that it does not take."""

from __future__ import annotations

import itertools

import pytest
import torch

from quantkit.core.scheme import Scheme
from quantkit.kernels import quick
from quantkit.kernels.hopper import choose_tile
from tests.kernels import sweeps
from tests.kernels.test_hopper import H200, LAYERS, TYPES, agrees, gpu

__all__ = ["gpu"]


def test_the_chosen_tile_exists_and_has_a_step_for_each_block() -> None:
    for (n, k), m, dtype, group in itertools.product(
        [*LAYERS, (128, 32), (128, 128), (384, 448)], (1, 7, 8, 9, 64, 300, 4096), TYPES, quick.HOPPER
    ):
        kernel = quick.HOPPER[group]
        tile = choose_tile(kernel, dtype, m, n, k, H200)
        assert kernel.instance(dtype, tile) in kernel.instances
        assert tile.cluster <= -(-k // 128)


def test_the_choice_is_near_the_best_of_the_sweep() -> None:
    """The sweep has the time of every tile on an H200, for each shape and token count; none chosen may be slow."""
    behind = sweeps.behind(
        "quick", "int4:g128:asym", lambda m, n, k: choose_tile(quick.HOPPER[128], torch.float16, m, n, k, H200)
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


def test_groups_that_do_not_divide_a_step_go_to_the_portable_kernel() -> None:
    for label, fits in (("int4:g128:asym", True), ("int4:g32", True), ("int4:g256:asym", False), ("int4:g96", False)):
        assert (quick.LAUNCHER.kernels(Scheme.parse(label), 256, 768).hopper is not None) is fits
