"""Sparse-MARLIN's kernel for Hopper: the choice of its tiles, and the weights that it does not take."""

from __future__ import annotations

import itertools

import torch

from quantkit.core.scheme import Scheme
from quantkit.kernels import marlin24
from quantkit.kernels.hopper import choose_tile
from tests.kernels import sweeps
from tests.kernels.test_hopper import H200, LAYERS, TYPES


def test_no_choice_has_columns_beyond_the_weight() -> None:
    """Zeros beyond it are not valid metadata."""
    for (n, k), m, dtype, group in itertools.product(
        [*LAYERS, (128, 128), (384, 256)], (1, 7, 8, 9, 64, 300, 4096), TYPES, marlin24.HOPPER
    ):
        kernel = marlin24.HOPPER[group]
        tile = choose_tile(kernel, dtype, m, n, k, H200)
        assert kernel.instance(dtype, tile) in kernel.instances
        assert n % tile.columns == 0 and tile.cluster <= -(-k // 128)


def test_the_choice_is_near_the_best_of_the_sweep() -> None:
    """The sweep has the time of every tile on an H200, for each shape and token count; none chosen may be slow."""
    behind = sweeps.behind(
        "marlin24", "int4:g128:24", lambda m, n, k: choose_tile(marlin24.HOPPER[128], torch.float16, m, n, k, H200)
    )
    assert len(behind) == 9 * 8
    assert max(behind.values()) < 1.05 and sum(behind.values()) / len(behind) < 1.01, behind


def test_weights_that_do_not_fill_their_tiles_go_to_the_portable_kernel() -> None:
    scheme = Scheme.parse("int4:channel:24")
    for n, k, fits in ((256, 128, True), (256, 160, False), (192, 128, False)):
        assert (marlin24.LAUNCHER.kernels(scheme, n, k).hopper is not None) is fits
