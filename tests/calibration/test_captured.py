"""Passes that a CUDA graph repeats have the results of the passes themselves; what cannot be captured still runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.calibration.backward import CAPTURED, Captured
from quantkit.core.quantized_tensor import QuantizedTensor
from tests.calibration.runs import small, solved


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the replays of graphs."""
    found, replay = list[int](), torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        found.append(1)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return found


def gradients(of: Tensor, waits: bool = False) -> Callable[[Tensor, Tensor], list[Tensor | None]]:
    """Make a function that returns the gradient of a sum by the weight `of`, and None."""

    def function(scale: Tensor, x: Tensor) -> list[Tensor | None]:
        leaf = of.detach().requires_grad_()
        if waits:
            assert float(scale) > 0
        (torch.tanh(x @ leaf).sum() * scale).backward()
        return [leaf.grad, None]

    return function


@pytest.mark.parametrize(
    ("function", "asks"),
    [
        (lambda x: [torch.tanh(x @ x).sum()], True),
        (lambda x: [x * float(x[0, 0])], False),
        (lambda x: [x[x > 0]], False),
        (lambda x: [x.nonzero()], False),
        (lambda x: [x.repeat_interleave((x[0] > 0).long(), 0)], False),
        (lambda x: [x.to("meta")], False),  # on another device
    ],
)
def test_a_pass_that_reads_what_it_computes_is_not_captured(function: Any, asks: bool) -> None:
    asked = list[Tensor]()

    def may(x: Tensor) -> bool:
        asked.append(x)
        return False

    calls, x = Captured(), torch.randn(4, 4)
    for _ in range(CAPTURED + 1):
        calls(function, may, x)
    assert len(asked) == asks


def test_gradients_through_choices_of_experts_are_not_captured() -> None:
    seen, calls = list[Tensor](), Captured()

    def of_an_expert(x: Tensor) -> list[Tensor | None]:
        leaf = x.detach().requires_grad_()
        leaf.tanh()[leaf.argmax(1) > 0].sum().backward()
        return [leaf.grad]

    for _ in range(CAPTURED):
        calls(of_an_expert, lambda x: bool(seen.append(x)), torch.randn(8, 4))
    assert not seen


@pytest.mark.gpu
@pytest.mark.parametrize(("waits", "may"), [(False, True), (True, True), (False, False)])
def test_repeated_calls_read_new_inputs_and_changed_weights(waits: bool, may: bool, replays: list[int]) -> None:
    weight, asked = torch.randn(16, 16, device="cuda"), list[torch.Size]()

    def allowed(x: Tensor) -> bool:
        asked.append(x.shape)
        return may

    calls, function = Captured(), gradients(weight, waits)
    for call in range(1, CAPTURED + 5):
        for rows in (4, 8) if call % 2 else (8,):
            given = torch.full((), float(call), device="cuda"), torch.randn(rows, 16, device="cuda")
            found, none = calls(function, allowed, *given)
            assert torch.equal(found, function(*given)[0]) and none is None
        weight.mul_(0.9)
    assert len(replays) == (5 if may and not waits else 0)
    assert set(asked) <= {torch.Size((8, 16))} and len(asked) == (0 if waits else 1)
    calls.close()
    assert torch.equal(calls(function, allowed, *given)[0], function(*given)[0]) and len(asked) == (0 if waits else 1)


@pytest.mark.gpu
def test_a_pass_that_waits_unseen_runs_without_a_graph(replays: list[int]) -> None:
    def waiting(x: Tensor) -> list[Tensor | None]:
        torch.cuda.current_stream().synchronize()
        return [x + 1]

    calls, x = Captured(), torch.ones(2, device="cuda")
    for _ in range(CAPTURED + 2):
        (found,) = calls(waiting, lambda x: True, x)
        assert found is not None and torch.equal(found, x + 1)
    assert not replays


@pytest.mark.gpu
def test_a_run_tuned_by_graphs_has_the_codes_of_one_without(
    tmp_path: Path, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small(tmp_path, hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    chosen = {"tune": 24, "output_aware": True}
    first, _ = solved(folder, "cuda", tmp_path / "graphs", **chosen)
    assert len(replays) == 2 * (24 - CAPTURED + 1)  # two blocks
    monkeypatch.setattr("quantkit.calibration.backward.CAPTURED", 100)
    second, _ = solved(folder, "cuda", tmp_path / "without", **chosen)
    assert len(replays) == 2 * (24 - CAPTURED + 1) and first.keys() == second.keys()
    for name, value in first.items():
        other = second[name]
        equal = value.equal(other) if isinstance(value, QuantizedTensor) else torch.equal(value, other)
        assert equal, name
