"""Fused linears: query, key and value projections, or gate and up, in one product.

For a small weight a kernel launch costs as much as the product. So sibling linears, found by their
names, are stacked into one packed weight if their layout allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from quantkit.engines.joined import SIBLINGS
from quantkit.inference.packed_linear import (
    PackedLinear,
    has_kernel_on,
    multiply_packed,
    without_casts,
)
from quantkit.layouts import LAYOUTS
from quantkit.models.families import CROSS_ATTENTION
from quantkit.models.stored_rows import SharedProduct


class FusedLinear(SharedProduct, nn.Module):
    """Sibling linears whose packed weights can be stacked into one; each sibling has it as a
    submodule.

    Once `is_fused`, it owns the stacked tensors as frozen parameters under the layout's names, and
    `n` is the sum over the parts. The model's state dict still has each part under its own name.
    """

    def __init__(self, parts: Sequence[PackedLinear]) -> None:
        super().__init__()
        self.parts = tuple(parts)  # empty once fused; torch registers no submodules from a tuple
        self.is_fused = False
        self.bias: nn.Parameter | None = None
        self.forget_products()
        for index, part in enumerate(parts):
            part.fused, part.index = self, index

    def fuse_on_gpu(self) -> bool:
        """Fuse the parts if a kernel multiplies with each of them; returns True if they
        are fused.
        """
        ready = all(
            has_kernel_on(part.layout, part.device) and part.has_kernel() for part in self.parts
        )
        if not self.is_fused and ready and self.fuse():
            # The freed blocks are too small for the next siblings, so torch would keep all weights
            # twice.
            torch.cuda.empty_cache()
        return self.is_fused

    def fuse(self) -> bool:
        """Stack the packed weights and free the parts' own; returns False if the parts differ in
        more than n.
        """
        first, unit = self.parts[0], LAYOUTS[self.parts[0].layout].STACKING_UNIT
        if unit is None or any(
            part.n % unit or _fusion_key(part) != _fusion_key(first) for part in self.parts
        ):
            return False
        self.layout, self.scheme, self.label, self.k = (
            first.layout,
            first.scheme,
            first.label,
            first.k,
        )
        self.suffixes, self.names = first.suffixes, first.names
        self.n = sum(part.n for part in self.parts)
        ends = [sum(part.n for part in self.parts[: i + 1]) for i in range(len(self.parts))]
        self.starts = tuple(end - part.n for part, end in zip(self.parts, ends, strict=True))
        self.sizes = tuple((part.n, part.out_features) for part in self.parts)
        self.readers = len(self.sizes)
        tensors = LAYOUTS[self.layout].stack(self.scheme, [part.packed() for part in self.parts])
        bias = None
        if first.bias is not None:
            bias = first.bias.new_zeros(self.n)
            for part, start in zip(self.parts, self.starts, strict=True):
                bias[start : start + part.out_features] = part.get_parameter("bias")
        for part in self.parts:
            part.drop_packed()
        for suffix, tensor in tensors.items():
            self.register_parameter(suffix, nn.Parameter(tensor, requires_grad=False))
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.is_fused = True
        self.parts = ()  # a reference cycle would keep the GPU's memory after the model is deleted
        return True

    def packed(self) -> dict[str, Tensor]:
        """List the stacked tensors by suffix."""
        return {suffix: self.get_parameter(suffix).detach() for suffix in self.suffixes}

    def packed_part(self, index: int) -> dict[str, Tensor]:
        """Slice the packed tensors of one part out of the stack, by suffix."""
        start = self.starts[index]
        rows = range(start, start + self.sizes[index][0])
        return LAYOUTS[self.layout].cut(self.scheme, self.packed(), self.n, rows)

    def bias_part(self, index: int) -> Tensor | None:
        """Slice the bias `[out_features]` of one part; None without a bias."""
        start = self.starts[index]
        return (
            None if self.bias is None else self.bias.detach()[start : start + self.sizes[index][1]]
        )

    def multiply(self, x: Tensor, index: int) -> Tensor:
        """Multiply activations with one part: `[..., out_features]`, a view of the product with all
        parts.
        """
        y = self.product(x, index)
        start = self.starts[index]
        return y[..., start : start + self.sizes[index][1]]

    def multiply_all(self, x: Tensor) -> Tensor:
        """Multiply activations with the stacked weight."""
        return multiply_packed(self, x, self.n)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedLinear:
        self.forget_products()
        super()._apply(without_casts(fn, self.suffixes if self.is_fused else (), self), recurse)  # type: ignore[no-untyped-call]
        return self

    def state_dict(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        """Add nothing to a state dict: each part adds its own tensors."""
        return kwargs.get("destination", {})


def fuse_linears(model: nn.Module) -> None:
    """Group the sibling linears of a model; a group is fused as soon as it is on a GPU."""
    for siblings in sibling_linears(model):
        FusedLinear(siblings).fuse_on_gpu()


def sibling_linears(model: nn.Module) -> Iterator[list[PackedLinear]]:
    """Yield groups of two or more packed linears that, by their names, share an input tensor.

    Cross attention is left out, because its queries come from another tensor than its keys and
    values.
    """
    for path, module in list(model.named_modules()):
        if "cross" in f"{path} {type(module).__name__}".lower() or CROSS_ATTENTION.search(
            f"{path}."
        ):
            continue
        for names in SIBLINGS:
            children = [getattr(module, name, None) for name in names]
            found = [
                child
                for child in children
                if isinstance(child, PackedLinear) and not child.is_fused
            ]
            while len(found) > 1:  # an override may give some of them another scheme
                alike = [part for part in found if _fusion_key(part) == _fusion_key(found[0])]
                found = [part for part in found if not any(part is other for other in alike)]
                if len(alike) > 1 and not any(
                    part.device.type == "meta" for part in alike
                ):  # meta means offloaded
                    yield alike


def _fusion_key(part: PackedLinear) -> tuple[object, ...]:
    """List the properties that fused linears must share."""
    bias = None if part.bias is None else (part.bias.dtype, part.bias.device)
    return part.layout, part.scheme, part.k, part.in_features, part.device, bias
