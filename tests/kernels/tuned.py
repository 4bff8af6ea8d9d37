"""Weights tuned by the kernel beside the same in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.algorithms import rtn
from quantkit.algorithms.block_tuning import TunedWeight
from quantkit.core.scheme import Scheme
from quantkit.kernels import gptq as kernels

#: Schemes, with a group that no number of lanes divides, and one wider than a warp takes at a time.
TUNED = ("int4:g32", "int4:g24:asym", "int4:channel", "int8:g128", "fp6:channel", "fp5:g32", "int4:g32:24")


def same_tuning(label: str, stored: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail unless a few steps by the kernel give the codes, scales and weights of steps in torch on a CPU."""
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(6, 384, generator=generator).to(stored)
    weight[3] = 0
    weight[5] *= 60000 / 8  # scales that would overflow
    start, _ = rtn.quantize(weight, Scheme.parse(label), signed=label == "int4:g32")
    gradients = [torch.randn(6, 384, generator=generator).to(torch.bfloat16) for _ in range(4)]

    def tuned(device: str, by_kernel: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        monkeypatch.setattr(kernels, "runs_on", lambda given: by_kernel)
        given = type(start)(
            start.scheme, *(x if x is None else x.to(device) for x in (start.codes, start.scales, start.zeros))
        )
        made = TunedWeight(weight.to(device), given)
        before = made.dense().clone()
        for number, gradient in enumerate(gradients):
            made.descend(gradient.to(device) if by_kernel else gradient.float(), 0.2 if number else 0.05)
        found = made.tensor()
        if by_kernel:
            assert torch.equal(made.dense(), found.dequantize(torch.bfloat16)), "the weight is not that of its record"
            assert not torch.equal(made.dense(), before)
        return found.codes.cpu(), found.scales.cpu(), made.dense().float().cpu(), start.codes

    codes, scales, dense, begun = tuned("cpu", by_kernel=False)
    first = tuned(device, by_kernel=True)
    again = tuned(device, by_kernel=True) if device == "cuda" else first
    assert all(map(torch.equal, first, again)), "two runs differ"
    assert (first[0] != codes).float().mean() < 2e-3, "codes differ by more than ties"
    torch.testing.assert_close(first[1], scales, rtol=2e-3, atol=0)
    same = first[0] == codes
    torch.testing.assert_close(first[2][same], dense[same], rtol=1e-2, atol=0)
    assert (codes != begun).float().mean() > 0.05
