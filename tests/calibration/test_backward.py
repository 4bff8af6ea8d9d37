"""Gradients in a fixed order of sums, and CUDA graphs: what is tried again, and what is not captured."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from quantkit.calibration.backward import CAPTURED, Captured, in_fixed_order, strictly
from quantkit.errors import CheckpointError
from quantkit.progress import Progress, Recorder
from tests.calibration.runs import same, small, solved

REFUSED = "cumsum_cuda_kernel does not have a deterministic implementation, but you set ..."


def on_gpu() -> Any:
    return SimpleNamespace(device=torch.device("cuda"), fuses_attention=True, text=torch.nn.Identity())


def quiet() -> Recorder:
    return Recorder(Progress(quiet=True))


def settings() -> tuple[bool, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
    )


def test_a_gradient_without_a_fixed_order_is_computed_again_with_plain_attention() -> None:
    model, before, seen = on_gpu(), settings(), list[tuple[bool, bool]]()

    def task() -> str:
        seen.append((torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()))
        if len(seen) == 1:
            raise RuntimeError(REFUSED)
        return "done"

    recorder = quiet()
    assert in_fixed_order(model, recorder, task) == "done"
    assert ["Identity has a gradient without a fixed order" in line for line in recorder.take()] == [True]
    assert seen == [(True, True), (False, True)] and not model.fuses_attention
    assert in_fixed_order(model, quiet(), task) == "done" and seen[2] == (False, True)
    assert settings() == before


def test_another_error_is_not_tried_again_and_leaves_all_settings() -> None:
    model, before, calls = on_gpu(), settings(), list[int]()

    def task() -> None:
        calls.append(1)
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        in_fixed_order(model, quiet(), task)
    assert len(calls) == 1 and model.fuses_attention and settings() == before


def test_torch_may_refuse_gradients_only_where_flash_attention_needs_it() -> None:
    model, strict = on_gpu(), list[bool]()

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            strict.append(not torch.is_deterministic_algorithms_warn_only_enabled())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            strict.append(not torch.is_deterministic_algorithms_warn_only_enabled())
            return gradient

    def task() -> None:
        x = torch.ones(2, requires_grad=True)
        loss = cast(torch.Tensor, Seen.apply(x)).sum()  # type: ignore[no-untyped-call]
        with strictly(model):
            loss.backward()

    in_fixed_order(model, quiet(), task)
    model.fuses_attention = False
    in_fixed_order(model, quiet(), task)
    assert strict == [False, True, False, False]


@pytest.mark.parametrize("chosen", [{"tune": 2}, {"tune": 2, "output_aware": True}], ids=["tune", "output-aware"])
def test_a_model_whose_code_has_no_gradient_is_refused_in_one_line(
    chosen: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def writes_in_place(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x.sigmoid().mul_(norm.weight).sigmoid_().mul_(norm.weight)

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaRMSNorm.forward", writes_in_place)
    with pytest.raises(
        CheckpointError, match=r"has no gradient \(.*\): use --set (tune=0 and --set )?output_aware"
    ) as error:
        solved(small(tmp_path), "cpu", tmp_path / "work", **chosen)
    assert "\n" not in str(error.value)


@pytest.mark.gpu
def test_a_tuned_run_on_a_gpu_has_the_same_bits_again_by_flash_attention(tmp_path: Path) -> None:
    folder = small(tmp_path, hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    found = []
    for number in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found.append(solved(folder, "cuda", tmp_path / str(number), tune=4, output_aware=True))
    (first, fused), (second, _) = found
    assert fused and same(first, second)


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


def of_an_expert(x: Tensor) -> list[Tensor | None]:
    """Compute a gradient through the choice of an expert."""
    leaf = x.detach().requires_grad_()
    leaf.tanh()[leaf.argmax(1) > 0].sum().backward()
    return [leaf.grad]


@pytest.mark.parametrize(
    ("function", "asks"),
    [
        (of_an_expert, False),
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
    assert len(replays) == 2 * (24 - CAPTURED + 1) and same(first, second)
