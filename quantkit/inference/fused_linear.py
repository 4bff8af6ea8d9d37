"""Linears that are given one tensor, multiplied at once: queries, keys and values, or the two halves of a gate.

A launch takes as long as a small weight, so the packed weights of such linears are stacked where their layout allows
it, in the place of their own. Which linears they are is guessed by their names, and decided anew at every call by the
tensor that they are given: the first multiplies it with all weights, and keeps what the others will ask for. One that
is given another tensor multiplies by itself, with all weights too, which is right and slow. Products are views of one
tensor: nothing is copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quantkit.inference.packed_linear import PackedLinear, by_kernel, multiplied, only_moved
from quantkit.kernels import driver
from quantkit.layouts.stacking import UNITS, cut, stack

#: Names of linears of one module that models give one tensor; some of a row may be missing.
SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)


class Held(NamedTuple):
    """A product `y` with a tensor that `x` refers to, `when` it was made, and the parts that have not asked for it."""

    x: Callable[[], Tensor | None]
    when: tuple[int, ...]
    y: Tensor
    left: frozenset[int]


class Joint(nn.Module):
    """Linears that may become one; it is a submodule of each, and has their packed tensors when they are `united`.

    Then they are frozen parameters `[n, k]` under the layout's names, `n` being the sum of those of the parts. In the
    state of a model they are found under the names of the parts, as before.
    """

    def __init__(self, parts: Sequence[PackedLinear]) -> None:
        super().__init__()
        self.parts = tuple(parts)  # until they are one; in a tuple they are no submodules
        self.united = False
        self.bias: nn.Parameter | None = None
        self._held: Held | None = None
        self._traced: tuple[Tensor, Tensor, tuple[int, ...]] | None = None
        for index, part in enumerate(parts):
            part.joint, part.index = self, index

    def settle(self) -> bool:
        """Unite the parts if all are on one GPU, where a kernel multiplies with them; returns whether they are one."""
        ready = all(by_kernel(part.layout, part.device) and part.has_kernel() for part in self.parts)
        if not self.united and ready and self.unite():
            # What the parts had is too small for the next family: the GPU would hold all weights twice.
            torch.cuda.empty_cache()
        return self.united

    def unite(self) -> bool:
        """Stack the weights of the parts, unless more than n differs, and free theirs; returns whether it did."""
        first, unit = self.parts[0], UNITS.get(self.parts[0].layout)
        if unit is None or any(part.n % unit or _kind(part) != _kind(first) for part in self.parts):
            return False
        self.layout, self.scheme, self.label, self.k = first.layout, first.scheme, first.label, first.k
        self.suffixes, self.names = first.suffixes, first.names
        self.n = sum(part.n for part in self.parts)
        ends = [sum(part.n for part in self.parts[: i + 1]) for i in range(len(self.parts))]
        self.starts = tuple(end - part.n for part, end in zip(self.parts, ends, strict=True))
        self.sizes = tuple((part.n, part.out_features) for part in self.parts)
        tensors = stack(self.layout, self.scheme, [part.packed() for part in self.parts])
        bias = None
        if first.bias is not None:
            bias = first.bias.new_zeros(self.n)
            for part, start in zip(self.parts, self.starts, strict=True):
                bias[start : start + part.out_features] = part.get_parameter("bias")
        for part in self.parts:
            part.let_go()
        for suffix, tensor in tensors.items():
            self.register_parameter(suffix, nn.Parameter(tensor, requires_grad=False))
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.united = True
        self.parts = ()  # a circle of modules would keep the GPU's memory after the model is gone
        return True

    def packed(self) -> dict[str, Tensor]:
        """Return suffix -> packed tensor of all parts."""
        return {suffix: self.get_parameter(suffix).detach() for suffix in self.suffixes}

    def packed_of(self, index: int) -> dict[str, Tensor]:
        """Return suffix -> packed tensor of one part, in new memory."""
        start = self.starts[index]
        return cut(self.layout, self.scheme, self.packed(), self.n, range(start, start + self.sizes[index][0]))

    def bias_of(self, index: int) -> Tensor | None:
        """Return the bias of one part."""
        start = self.starts[index]
        return None if self.bias is None else self.bias.detach()[start : start + self.sizes[index][1]]

    def multiply(self, x: Tensor, index: int) -> Tensor:
        """Return the product of activations and one part, `[..., out_features]`, a view of that of all parts."""
        y = self._while_traced(x, index) if torch.compiler.is_compiling() else self._product(x, index)
        start = self.starts[index]
        return y[..., start : start + self.sizes[index][1]]

    def _product(self, x: Tensor, index: int) -> Tensor:
        """Return the product of all parts: the one that is held for this part, or a new one to be held for others."""
        held, when = self._held, _when(x)
        if held is not None and held.x() is x and held.when == when and index in held.left:
            left, y, same = held.left - {index}, held.y, held.x
        else:
            left, y = frozenset(range(len(self.sizes))) - {index}, multiplied(self, x, self.n)
            same = weakref.ref(x, self._forget)  # if nobody asks for it, it goes with x
        self._held = Held(same, when, y, left) if left else None
        return y

    def _forget(self, dead: object) -> None:
        if self._held is not None and self._held.x is dead:
            self._held = None

    def _while_traced(self, x: Tensor, index: int) -> Tensor:
        """As `_product`, in what torch.compile can follow: while it traces, tensors stand for values of one call."""
        traced = self._traced
        if traced is not None and traced[0] is x and index in traced[2]:
            y, left = traced[1], tuple(i for i in traced[2] if i != index)
        else:
            y, left = multiplied(self, x, self.n), tuple(i for i in range(len(self.sizes)) if i != index)
        self._traced = (x, y, left) if left else None
        return y

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Joint:
        self._held = self._traced = None
        super()._apply(only_moved(fn, self.suffixes if self.united else (), self), recurse)  # type: ignore[no-untyped-call]
        return self

    def state_dict(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        """Return nothing of its own: each part says what it has."""
        return kwargs.get("destination", {})


def join(model: nn.Module) -> None:
    """Find the linears of a model that are given one tensor, and unite those that are on a GPU, one family at a time.

    Those that are elsewhere are united when they are moved to one.
    """
    for family in families(model):
        Joint(family).settle()


def families(model: nn.Module) -> Iterator[list[PackedLinear]]:
    """Yield the packed linears beside each other that are given one tensor, as their names say, if two or more.

    Attention to another sequence is left out, where queries are of one tensor, keys and values of another.
    """
    for path, module in list(model.named_modules()):
        if "cross" in f"{path} {type(module).__name__}".lower():
            continue
        for names in SIBLINGS:
            children = [getattr(module, name, None) for name in names]
            found = [child for child in children if isinstance(child, PackedLinear) and not child.is_united]
            while len(found) > 1:  # an override may have given some another scheme
                alike = [part for part in found if _kind(part) == _kind(found[0])]
                found = [part for part in found if not any(part is other for other in alike)]
                if len(alike) > 1 and not any(part.device.type == "meta" for part in alike):  # these are offloaded
                    yield alike


def _kind(part: PackedLinear) -> tuple[object, ...]:
    """What linears must have in common to be one."""
    bias = None if part.bias is None else (part.bias.dtype, part.bias.device)
    return part.layout, part.scheme, part.k, part.in_features, part.device, bias


def _when(x: Tensor) -> tuple[int, ...]:
    """What is another if a tensor may have other values, or a product with it may not be there yet.

    Writes in place are counted, but for those in inference mode; each stream has its own time; and what is captured in
    a CUDA graph is not there outside of it.
    """
    version = -1 if x.is_inference() else x._version
    return (version, *driver.stream_state(x.device)[:2]) if x.is_cuda else (version,)
