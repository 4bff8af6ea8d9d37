"""Which modules of a model are linears: the one predicate that quantizing and loading share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.stored_tensors import Derived, Read


def is_linear(module: nn.Module) -> bool:
    """Return True if a module multiplies by its `weight` and adds its `bias`, and does nothing
    else.

    True for `nn.Linear`, subclasses that compute the same, and transformers' Conv1D, whose weight
    is `[k, n]`.
    """
    return is_transposed(module) or (
        isinstance(module, nn.Linear) and _computes_linear(type(module))
    )


def is_transposed(module: nn.Module) -> bool:
    """Return True for transformers' Conv1D, a linear with a weight `[k, n]`."""
    from transformers.pytorch_utils import Conv1D

    return type(module) is Conv1D


def reads_weight(owner: nn.Module, leaf: str) -> bool:
    """Return True if the forward of a module uses the weight of its linear `leaf` itself, or asks
    for its dtype.
    """
    return f"{leaf}.weight" in _source(type(owner).forward)


@functools.cache
def _source(forward: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(forward)
    except (OSError, TypeError):  # it has no file
        return ""


def size_of(linear: nn.Module) -> tuple[int, int]:
    """Return `(n, k)` of a linear."""
    rows, columns = linear.get_parameter("weight").shape
    return (columns, rows) if is_transposed(linear) else (rows, columns)


def replace_transposed(model: nn.Module, stored: dict[str, str], src: Checkpoint) -> None:
    """Replace each Conv1D of a model on the meta device by an `nn.Linear`, and present its weight
    in `src` as `[n, k]`.

    `stored` maps each state to its name in `src`. A weight that stays dense is written as it was
    stored, and a packed one is `[n, k]` in each layout.
    """
    packed = {f"{module}.weight" for module in src.modules()}
    derived: dict[str, Derived] = {}
    for path, module in list(model.named_modules()):
        name = stored.get(f"{path}.weight")
        if not is_transposed(module) or name is None:
            continue
        weight = module.get_parameter("weight")
        k, n = weight.shape
        owner, _, leaf = path.rpartition(".")
        bias = isinstance(module.bias, nn.Parameter)
        setattr(
            model.get_submodule(owner),
            leaf,
            nn.Linear(k, n, bias, device=weight.device, dtype=weight.dtype),
        )
        # An earlier model of the same source may have presented the weight already.
        if name not in packed and not src.is_presented_otherwise(name):
            derived[name] = _transposed(name, src)
    src.derive(derived)


def _transposed(name: str, src: Checkpoint) -> Derived:
    """Describe the transpose `[n, k]` of a stored matrix `[k, n]`."""
    k, n = src.shape(name)

    def compute(read: Read, index: int | slice | None) -> torch.Tensor:
        whole = read(name, None).T.contiguous()
        return whole if index is None else whole[index]

    return Derived(
        (n, k), src.dtype(name), (name,), compute, restore=lambda weight: weight.T.contiguous()
    )


def _computes_linear(cls: type[nn.Linear]) -> bool:
    """Return True if the forward of a class equals that of `nn.Linear` on a small example."""
    if cls.forward is nn.Linear.forward:
        return True
    weight, x = (
        torch.tensor([[1.0, -2.0], [3.0, 5.0], [-7.0, 11.0]]),
        torch.tensor([[[0.5, 2.0], [-1.0, 0.25]]]),
    )
    for bias in (None, torch.tensor([1.0, -1.0, 2.0])):
        example = SimpleNamespace(
            weight=weight, bias=bias, in_features=2, out_features=3, training=False
        )
        try:
            found = cls.forward(example, x)  # type: ignore[arg-type]
        except Exception:  # it needs more than a linear has
            return False
        if not isinstance(found, torch.Tensor) or not torch.equal(
            found, functional.linear(x, weight, bias)
        ):
            return False
    return True
