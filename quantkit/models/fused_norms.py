"""Compute RMS norms by torch's own kernel where gradients flow through a block on a GPU.

The model's code passes over the hidden states ten times in a norm, and some fifteen times in its
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from quantkit.models.modules import is_norm

#: The code of a model may round to bfloat16 before it multiplies with the weight, and once more.
ROUNDING = 2**-6
#: A norm and its epsilon.
Norm = tuple[nn.Module, float]


def rms_norms(block: nn.Module) -> list[Norm]:
    """Find the norms of a loaded block that compute an RMS norm, up to rounding."""
    norms = [(module, _epsilon(module)) for module in block.modules() if is_norm(module)]
    return [
        (module, epsilon) for module, epsilon in norms if epsilon and _is_rms_norm(module, epsilon)
    ]


@contextmanager
def fused(norms: Iterable[Norm]) -> Iterator[None]:
    """Run `norms` as one kernel each, which rounds once."""
    with ExitStack() as stack:
        for module, epsilon in norms:
            module.forward = partial(_run, module, epsilon, module.forward)
            stack.callback(delattr, module, "forward")
        yield


def _epsilon(module: nn.Module) -> float | None:
    """Return a norm's only number that is called epsilon, if it has a weight and nothing else."""
    found = [
        value for name, value in vars(module).items() if "eps" in name and isinstance(value, float)
    ]
    is_plain = [name for name, _ in module.named_parameters()] == [
        "weight"
    ] and "forward" not in vars(module)
    return found[0] if len(found) == 1 and is_plain else None


@torch.no_grad()
def _is_rms_norm(module: nn.Module, epsilon: float) -> bool:
    """Compare outputs for large inputs, and for inputs so small that epsilon counts; the mean of
    all is not zero.
    """
    weight = module.get_parameter("weight")
    sizes = torch.tensor([1.0, epsilon**0.5], device=weight.device)
    x = torch.arange(weight.numel(), device=weight.device).sin().add(1.0).view(weight.shape)
    x = (sizes.view(-1, *[1] * weight.ndim) * x).to(weight.dtype)
    try:
        own = module(x)
    except Exception:  # it takes more than one tensor
        return False
    return own.shape == x.shape and torch.allclose(
        own, rms_norm(x, weight.shape, weight, epsilon).to(own.dtype), rtol=ROUNDING, atol=0
    )


def _run(
    module: nn.Module, epsilon: float, forward: Callable[..., Tensor], *given: Any, **named: Any
) -> Tensor:
    weight = module.get_parameter("weight")
    if len(given) != 1 or named or given[0].dtype != weight.dtype:
        return forward(*given, **named)
    with torch.autocast(weight.device.type, enabled=False):  # it would compute in float32
        return rms_norm(given[0], weight.shape, weight, epsilon)
