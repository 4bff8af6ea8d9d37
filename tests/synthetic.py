"""The synthetic layer of ALGORITHMS 14: inputs with outlier channels and correlations.

Its losses differ between the variants. On a benign random layer every search and every order gives the same loss.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.algorithms import gptq, rtn
from quantkit.algorithms.options import Options
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme

#: Held-out loss relative to plain RTN, as ALGORITHMS 14 states it (mean of the draws of seeds 0 and 1).
EXPECTED = {
    "RTN mse": 0.74,
    "RTN block": 0.13,
    "GPTQ natural absmax": 0.40,
    "MARLIN (mean 0.1)": 0.10,
    "static absmax": 0.18,
    "static block": 0.05,
}


@dataclass(frozen=True)
class Layer:
    """Hold a weight float64 `[n, k]`, the Hessian `[k, k]` of its calibration tokens, and that of held-out tokens."""

    weight: Tensor
    h: Tensor
    held_out: Tensor

    def loss(self, tensor: QuantizedTensor) -> float:
        """Return the error of the layer's outputs on the held-out tokens."""
        d = self.weight - tensor.dequantize(torch.float64)
        return float(((d @ self.held_out) * d).sum())


@functools.cache
def layer(seed: int, n: int = 128, k: int = 1024) -> Layer:
    """Draw the layer of ALGORITHMS 14 (there n = 512, k = 1024) from its own generator. Tests must not change it."""
    generator = torch.Generator().manual_seed(seed)

    def gauss(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    decay = torch.arange(1, k + 1, dtype=torch.float64) ** -0.4
    mix = (gauss(k, k) * decay) @ gauss(k, k) / k + 0.05 * torch.eye(k, dtype=torch.float64)
    channels = torch.exp(0.7 * gauss(k))
    channels[torch.randperm(k, generator=generator)[:6]] *= 20

    def hessian(tokens: int) -> Tensor:
        x = (gauss(tokens, k) @ mix.T) * torch.exp(0.3 * gauss(tokens, 1)) * channels
        return 2 / tokens * x.T @ x

    weight = gauss(n, k) * 0.02 * (1 + 0.3 * gauss(n, 1).abs())
    weight[torch.rand(n, k, generator=generator) < 0.002] *= 5
    return Layer(weight / channels.clamp(0.3, 3).sqrt(), hessian(6144), hessian(4096))


def table(layer: Layer) -> dict[str, float]:
    """Return the held-out loss of each variant of INT4 g128, relative to plain RTN."""
    scheme = Scheme.parse("int4:g128")
    w, h = layer.weight, layer.h
    plain = layer.loss(rtn.quantize(w, scheme)[0])
    block, _ = rtn.quantize(w, scheme, clip="search", metric="block", hessian=h)
    results = {"RTN mse": rtn.quantize(w, scheme, clip="search")[0], "RTN block": block}
    variants = {
        "GPTQ natural absmax": Options(act_order="off", clip="none", damp=0.01, damp_kind="mean"),  # the published loop
        "MARLIN (mean 0.1)": Options(act_order="off", damp=0.1, damp_kind="mean"),
        "static absmax": Options(damp=0.3, clip="none"),
        "static block": Options(damp=0.3),
    }
    results |= {name: gptq.quantize(w, scheme, h, options).tensor for name, options in variants.items()}
    return {name: layer.loss(tensor) / plain for name, tensor in results.items()}
