"""Fused linears: query, key and value projections, or gate and up, in one product.

For a small weight a kernel launch costs as much as the product. So sibling linears, found by their
names, are stacked into one packed weight if their layout allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from quantkit import kernels
from quantkit.engines.joined import SIBLINGS
from quantkit.inference.packed_linear import PackedLinear, PackedWeight
from quantkit.layouts import LAYOUTS
from quantkit.models.families import CROSS_ATTENTION
from quantkit.models.stored_rows import SharedProduct


class FusedLinear(PackedWeight, SharedProduct):
    """Sibling linears whose packed weights can be stacked into one; each sibling has it as a
    submodule.

    Once `is_fused`, it owns the stacked tensors as frozen parameters under the layout's names, and
    `n` is the sum over the parts. The model's state dict still has each part under its own name.
    """

    def __init__(self, parts: Sequence[PackedLinear]) -> None:
        super().__init__()
        self.parts = tuple(parts)  # empty once fused; torch registers no submodules from a tuple
        self.is_fused = False
        self.forget_products()
        for index, part in enumerate(parts):
            part.fused, part.index = self, index

    def fuse_on_gpu(self) -> bool:
        """Fuse the parts if a kernel multiplies with each of them; returns True if they
        are fused.
        """
        ready = all(
            kernels.unusable(part.device) is None and part.has_kernel() for part in self.parts
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
        first, parts = self.parts[0], self.parts
        layout = LAYOUTS[first.layout]
        unit, key = layout.STACKING_UNIT, _fusion_key(first)
        if unit is None or any(part.n % unit or _fusion_key(part) != key for part in parts):
            return False
        *starts, n = accumulate((part.n for part in parts), initial=0)
        #: The rows of each part that are no padding, and all its rows.
        self.rows = [
            slice(start, start + part.out_features)
            for part, start in zip(parts, starts, strict=True)
        ]
        self.stored_rows = [
            range(start, start + part.n) for part, start in zip(parts, starts, strict=True)
        ]
        self.readers = len(parts)
        tensors = layout.stack(first.scheme, [part.packed() for part in parts])
        bias = None if first.bias is None else first.bias.new_zeros(n)
        for part, rows in zip(parts, self.rows, strict=True):
            if bias is not None:
                bias[rows] = part.get_parameter("bias")
            part.drop_packed()
        self.set_packed(first.layout, first.scheme, (n, first.k), tensors, n)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.is_fused = True
        self.parts = ()  # a reference cycle would keep the GPU's memory after the model is deleted
        return True

    def packed_part(self, index: int) -> dict[str, Tensor]:
        """Slice the packed tensors of one part out of the stack, by suffix."""
        rows = self.stored_rows[index]
        return LAYOUTS[self.layout].cut(self.scheme, self.packed(), self.n, rows)

    def bias_part(self, index: int) -> Tensor | None:
        """Slice the bias `[out_features]` of one part; None without a bias."""
        return None if self.bias is None else self.bias.detach()[self.rows[index]]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedLinear:
        self.forget_products()
        super()._apply(fn, recurse)
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
