"""Rounding on a GPU gives the bytes of a CPU, though a sum has another order there: on a simulated GPU."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.calibration import budget
from quantkit.calibration.stages.solve import solve_uncalibrated
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import NumericError
from quantkit.recipes.recipe import from_mapping, pruning_from_mapping
from tests.simulated_gpu import CPU, CUDA, simulated_gpu

INTEGERS = ["int4:g128", "int4:g32:asym", "int4:channel", "int2:g64", "int8:g128:asym", "int4:g128:24", "int3:channel"]
FLOATS = ["fp6:channel", "fp5:channel", "fp6-e2m3:channel", "nvfp4", "mxfp4"]
#: Facts that are sums of numbers, or times.
SUMMED = {"relative_error", "seconds"}


def weight(dtype: torch.dtype, n: int = 192, k: int = 512) -> Tensor:
    """Make a weight with outliers, ties, groups of zeros, small groups and weights that vanish."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(n, k, generator=g) * 0.02
    w[32:64] *= torch.exp(1.5 * torch.randn(32, k, generator=g))
    w[64:80] = (w[64:80] * 100).round()
    w[80:88], w[88:96] = 0, 3.0
    w[96:104] *= torch.logspace(-9, -2, 8)[:, None]
    w[104:112, ::2] *= 2.0**-23
    return w.to(dtype)


def rounded(
    w: Tensor, label: str, clip: str, device: torch.device, pad: bool = False
) -> tuple[QuantizedTensor, dict[str, Any]]:
    """Round a weight as a run does, some rows at a time on a GPU."""
    recipe = from_mapping({"method": "rtn", "clip": clip, "pad": pad})
    [item] = solve_uncalibrated({"x": w}, Scheme.parse(label), recipe, device=device)
    assert isinstance(item.value, QuantizedTensor) and item.facts is not None
    return item.value, item.facts


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "PART", 80 * 512)


@pytest.mark.parametrize(
    ("label", "clip", "dtype"),
    [
        *product(INTEGERS + FLOATS, ["search"], [torch.bfloat16]),
        *product(["int4:g128", "int4:g32:asym", "fp6:channel", "nvfp4"], ["none"], [torch.bfloat16]),
        *product(["int4:g64", "fp6:channel", "nvfp4"], ["search"], [torch.float16, torch.float32, torch.float64]),
    ],
    ids=str,
)
def test_a_gpu_gives_the_record_and_the_counts_of_a_cpu(label: str, clip: str, dtype: torch.dtype) -> None:
    w = weight(dtype)
    here, facts = rounded(w, label, clip, CPU)
    with simulated_gpu():
        there, found = rounded(w, label, clip, CUDA)
    assert there.equal(here)
    assert {k: v for k, v in found.items() if k not in SUMMED} == {k: v for k, v in facts.items() if k not in SUMMED}
    assert found["relative_error"] == pytest.approx(facts["relative_error"], rel=1e-4)
    assert "zeroed" in facts or dtype == torch.float16


@pytest.mark.parametrize(
    ("label", "row", "value"),
    [
        ("int4:g128", 100, torch.nan),
        ("fp6:channel", 150, 6e4),
        ("int4:g128:asym", 150, 6e4),
        ("fp6:channel", 3, torch.inf),
    ],
)
def test_an_error_names_the_row_of_the_whole_weight(label: str, row: int, value: float) -> None:
    w = weight(torch.float32)
    w[row, 5], w[row, 6], w[row + 1, 6] = value, -value, value
    w *= 40 if value == 6e4 else 1
    with pytest.raises(NumericError) as here:
        rounded(w, label, "search", CPU)
    with pytest.raises(NumericError) as there, simulated_gpu():
        rounded(w, label, "search", CUDA)
    assert str(there.value) == str(here.value)


def test_padding_and_pruning_count_the_whole_weight() -> None:
    w = weight(torch.bfloat16, k=1024)[:, :1000]
    for label in ("int4:g128", "int4:g128:24"):
        here, facts = rounded(w, label, "search", CPU, pad=True)
        with simulated_gpu():
            there, found = rounded(w, label, "search", CUDA, pad=True)
        assert there.equal(here) and found["true_shape"] == [192, 1000]
        assert {**found, **dict.fromkeys(SUMMED)} == {**facts, **dict.fromkeys(SUMMED)}
    pruning = pruning_from_mapping({"method": "magnitude"})
    with simulated_gpu():
        two, one = (solve_uncalibrated({"x": w}, "2:4", pruning, device=place)[0] for place in (CUDA, CPU))
        assert isinstance(two.value, Tensor) and isinstance(one.value, Tensor)
        assert torch.equal(two.value.to(CPU), one.value)
    assert {**(two.facts or {}), **dict.fromkeys(SUMMED)} == {**(one.facts or {}), **dict.fromkeys(SUMMED)}


@pytest.mark.parametrize(
    ("label", "pad"), [("int4:g128", False), ("int4:g32:asym", True), ("fp6:channel", False), ("nvfp4", False)]
)
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_small_weights_together_are_those_of_each_alone(label: str, pad: bool, device: torch.device) -> None:
    whole, clip = weight(torch.bfloat16)[:, : 500 if pad else 512], "search"
    weights = {f"layers.{at}": whole[at : at + rows] for at, rows in ((0, 8), (30, 40), (80, 32))}
    recipe = from_mapping({"method": "rtn", "clip": clip, "pad": pad})
    with simulated_gpu():
        items = solve_uncalibrated(weights, Scheme.parse(label), recipe, "why", device)
    for (name, w), item in zip(weights.items(), items, strict=True):
        alone, facts = rounded(w, label, clip, CPU, pad)
        assert isinstance(item.value, QuantizedTensor) and item.value.equal(alone) and item.name == f"{name}.weight"
        found = {**(item.facts or {}), **dict.fromkeys(SUMMED)}
        assert found == {**facts, **dict.fromkeys(SUMMED), "reason": "why"}
        assert (item.facts or {})["relative_error"] == pytest.approx(facts["relative_error"], rel=1e-4)


def test_small_weights_together_are_pruned_as_each_alone() -> None:
    weights = {"a": weight(torch.bfloat16)[:40], "b": weight(torch.bfloat16)[100:]}
    pruning = pruning_from_mapping({"method": "magnitude"})
    with simulated_gpu():
        together = solve_uncalibrated(weights, "2:4", pruning, device=CUDA)
    for item, (name, w) in zip(together, weights.items(), strict=True):
        [alone] = solve_uncalibrated({name: w}, "2:4", pruning)
        assert isinstance(item.value, Tensor) and isinstance(alone.value, Tensor)
        assert torch.equal(item.value.to(CPU), alone.value) and item.name == alone.name


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_an_error_among_small_weights_names_its_own(device: torch.device) -> None:
    weights = {"a": weight(torch.float32), "b": weight(torch.float32)}
    weights["b"][7, 3] = torch.nan
    with pytest.raises(NumericError, match=r"^b: 1 of 98304 .*\[7, 3\]"), simulated_gpu():
        solve_uncalibrated(weights, Scheme.parse("int4:g128"), from_mapping({"method": "rtn"}), device=device)
