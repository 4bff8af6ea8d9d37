"""Weights and Hessians for the tests of the algorithms, ordinary and hostile ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from quantkit.algorithms.options import Options
from quantkit.core.quantized_tensor import QuantizedTensor

T = TypeVar("T")


def gauss(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def correlated(k: int, rank: int | None = None) -> Tensor:
    """Return a Hessian of correlated channels whose sizes span three orders of magnitude."""
    x = gauss(rank or 4 * k, k, seed=1) @ (gauss(k, k, seed=2) / k**0.5 + 0.2) * torch.exp(1.5 * gauss(k, seed=3))
    return x.T @ x * (2 / len(x))


def hostile(name: str, k: int) -> Tensor:
    if name.startswith("rank"):
        return correlated(k, rank={"rank 1": 1, "rank k/4": k // 4}[name])
    h = correlated(k)
    if name == "duplicates":
        h[:, 1::2], h[1::2] = h[:, ::2], h[::2]
        return (h + h.T) / 2
    factors = torch.ones(k, dtype=torch.float64)
    factors[17] = {"massive": 3000.0, "dead": 0.0}[name.split(" ")[0]]
    return h * factors * factors[:, None]


def loss(w: Tensor, value: QuantizedTensor | Tensor, h: Tensor) -> Tensor:
    d = w.double() - (value.dequantize(torch.float64) if isinstance(value, QuantizedTensor) else value.double())
    return ((d @ h.double()) * d).sum(1)


def broken_hessians(k: int) -> dict[str, Tensor]:
    nan, infinite, large, star = correlated(k), correlated(k), correlated(k), torch.eye(k, dtype=torch.float64)
    nan[3, 5] = nan[5, 3] = torch.nan
    infinite[2, 2] = torch.inf
    large[3, 5] = large[5, 3] = 2 * (large[3, 3] * large[5, 5]).sqrt()
    star[0, 1:] = star[1:, 0] = 0.9  # passes every test of two channels, and is far from positive
    negative = -torch.eye(k, dtype=torch.float64)
    return {"NaN": nan, "infinite": infinite, "diagonal allows": large, "damping 1": star, "negative": negative}


def damped(h: Tensor, options: Options) -> Tensor:
    diagonal = h.diagonal()
    unit = {
        "own": diagonal,
        "mean": diagonal.mean().expand(len(h)),
        "median": (diagonal / 32).clamp(min=diagonal.median().item()),
    }[options.damp_kind]
    return h + options.damp * unit.diag()


def is_24(weight: Tensor) -> bool:
    return bool(((weight != 0).view(len(weight), -1, 4).sum(-1) <= 2).all())


def on_threads(compute: Callable[[], T], counts: Sequence[int] = (1, 3)) -> list[T]:
    """Return a result for each number of threads."""
    before = torch.get_num_threads()
    found = []
    try:
        for count in counts:
            torch.set_num_threads(count)
            found.append(compute())
        return found
    finally:
        torch.set_num_threads(before)


FP_LABELS = ["fp6:channel", "fp5:channel", "fp6-e2m3:channel", "fp5-e2m2:channel"]
LABELS = ["int4:g32", "int4:g128", "int4:channel", "int4:g32:asym", "int4:channel:asym", *FP_LABELS]
