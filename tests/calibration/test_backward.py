"""Gradients in a fixed order of sums: what is tried again, and what the caller's torch is left with."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from quantkit.calibration.backward import backward, in_fixed_order
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.errors import CheckpointError
from quantkit.progress import Progress, Recorder
from tests.calibration.runs import small, solved

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
        backward(model, cast(torch.Tensor, Seen.apply(x)).sum())  # type: ignore[no-untyped-call]

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
    assert fused and first.keys() == second.keys()
    for name, value in first.items():
        other = second[name]
        if isinstance(value, QuantizedTensor):
            assert isinstance(other, QuantizedTensor) and value.equal(other), name
        else:
            assert torch.equal(value, other), name
