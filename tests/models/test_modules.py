"""Fused RMS norms: no other norm is replaced, and outputs and gradients are those of the code of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.block_runner import BlockRunner
from quantkit.models.modules import fused, is_norm, rms_norms
from tests.tiny_models import write_model


class GatedNorm(nn.Module):
    """An RMS norm that may take a gate, as Mamba's do, and whose weight may be one `more`, as Gemma's is."""

    def __init__(self, more: float = 0.0, **numbers: float) -> None:
        super().__init__()
        self.weight, self.more = nn.Parameter(torch.linspace(-1, 1, 64), requires_grad=False), more
        self.eps = 1e-5
        vars(self).update(numbers)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        x = x if gate is None else x * gate
        return (self.weight + self.more) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "gemma2", "opt"])
def test_only_norms_with_the_output_of_an_rms_norm_are_replaced(family: str, tmp_path: Path) -> None:
    model = BlockRunner(Checkpoint(write_model(family, tmp_path / "model")), device="cpu")
    model.weights.load_block(0)
    block = model.module.get_submodule(model.blocks[0])
    norms, found = [module for module in block.modules() if is_norm(module)], rms_norms(block)
    # Gemma multiplies with one more than the weight, and OPT's norms subtract the mean.
    assert [module for module, _ in found] == ([] if family in ("gemma2", "opt") else norms)
    for norm, _ in found:
        x = torch.randn(3, 5, norm.get_parameter("weight").numel(), requires_grad=True)
        expected = norm(x)
        (slope,) = torch.autograd.grad(expected.cos().sum(), x)
        with torch.autocast("cpu", torch.bfloat16), fused(found):
            assert "forward" in vars(norm)
            output = norm(x)
        assert "forward" not in vars(norm)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(torch.autograd.grad(output.cos().sum(), x)[0], slope)


@pytest.mark.parametrize(
    ("numbers", "count"), [({}, 1), ({"more": 1.0}, 0), ({"other_eps": 1e-6}, 0), ({"eps": 0.0}, 0)], ids=str
)
def test_a_norm_that_differs_keeps_its_code(numbers: dict[str, Any], count: int) -> None:
    assert len(rms_norms(nn.Sequential(GatedNorm(**numbers)))) == count


def test_a_norm_that_subtracts_the_mean_keeps_its_code_at_any_width() -> None:
    # With 288 channels, the sines of 1 to 288 have nearly no mean, which would hide that it is subtracted.
    norms = nn.Sequential(*(nn.LayerNorm(width, bias=False) for width in range(8, 513, 8)))
    assert rms_norms(norms) == []


def test_a_gate_or_another_dtype_reaches_the_code_of_the_norm() -> None:
    norm = GatedNorm()
    x, gate, half = torch.randn(4, 64), torch.rand(4, 64), torch.randn(4, 64).to(torch.bfloat16)
    expected = norm(x, gate), norm(x, gate=gate), norm(half)
    with fused(rms_norms(nn.Sequential(norm))):
        found = norm(x, gate), norm(x, gate=gate), norm(half)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
