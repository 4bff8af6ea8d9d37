"""A linear layer whose weight stays as it is packed: a kernel multiplies with it, or it is decoded for each call.

One torch operator stands between the layer and both ways, with a shape that is known without running it: so
torch.compile sees one product and no Python behind it. Everything that the kernels refuse and a layer must take is seen
to here: leading dimensions, no tokens at all, activations that are no contiguous or aligned matrix, padded weights.

The packed tensors are frozen parameters and not buffers, since accelerate moves no buffers to the CPU or the disk.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantkit import kernels
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.core.tensors import dtype_name
from quantkit.errors import KernelError, LayoutError
from quantkit.kernels.contract import ACTIVATIONS, ALIGNMENT
from quantkit.layouts import LAYOUTS
from quantkit.layouts.base import Stored
from quantkit.layouts.recast import restated, target

#: Layouts with a kernel, the one that reads the fewest bytes for a weight before others that hold it too.
PREFERRED = ("marlin24", "tcfpx", "marlin", "quick")


class PackedLinear(nn.Module):
    """`nn.Linear` with its weight in a layout: each packed tensor is a frozen parameter under the layout's own name.

    `layout`, `scheme`, and `n`, `k` as stored, padding included; `out_features` and `in_features` are the true sizes.
    Casts (`.to(dtype)`, `.half()`) change the bias alone; moved from a CPU to a GPU, it settles there. No gradient.

    United with others (`joint.Joint`), it is the part `index` of `joint`, which has all their tensors. `packed` and the
    state have copies then, the state's in the CPU's memory, and are otherwise as before.
    """

    def __init__(
        self,
        layout: str,
        scheme: Scheme,
        stored_size: tuple[int, int],
        true_size: tuple[int, int],
        tensors: Mapping[str, Tensor],
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = true_size
        self.suffixes: tuple[str, ...] = ()
        self.joint: Any = None
        self.index = 0
        self.hold(layout, scheme, stored_size, tensors)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def hold(self, layout: str, scheme: Scheme, stored_size: tuple[int, int], tensors: Mapping[str, Tensor]) -> None:
        """Take another packed form of the weight in the place of the present one."""
        for suffix in self.suffixes:
            delattr(self, suffix)
        self.layout, self.scheme, (self.n, self.k) = layout, scheme, stored_size
        self.suffixes, self.names, self.label = tuple(tensors), ",".join(tensors), scheme.label
        for suffix, tensor in tensors.items():
            self.register_parameter(suffix, nn.Parameter(tensor, requires_grad=False))

    def packed(self) -> dict[str, Tensor]:
        """Return suffix -> packed tensor."""
        if self.is_united:
            return dict(self.joint.packed_of(self.index))
        return {suffix: self.get_parameter(suffix).detach() for suffix in self.suffixes}

    @property
    def is_united(self) -> bool:
        """Whether the packed tensors are those of `joint`."""
        return self.joint is not None and bool(self.joint.united)

    def let_go(self) -> None:
        """Free the packed tensors and the bias, which `joint` has from now on."""
        for suffix in self.suffixes:
            delattr(self, suffix)
        self.bias = None

    def record(self) -> QuantizedTensor:
        """Return what the packed tensors hold, without the padding but with the columns that the last group needs."""
        q = LAYOUTS[self.layout].unpack(self.packed(), self.scheme)
        return restated(q, q.scheme, (self.out_features, q.scheme.padded_k(self.in_features)))

    def is_multiplied_on(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether a kernel multiplies activations of a dtype on a device, rather than the weight is decoded."""
        return by_kernel(self.layout, device) and dtype in ACTIVATIONS and self.has_kernel()

    def has_kernel(self) -> bool:
        """Return whether the packed tensors are such as a kernel takes, on a device where it can be run."""
        held = self.joint if self.is_united else self
        return _fits(self.layout, self.label, held.n, self.k, held.packed())

    @property
    def device(self) -> torch.device:
        """Where the packed tensors are."""
        held: nn.Module = self.joint if self.is_united else self
        return held.get_parameter(self.suffixes[0]).device

    def settle(self) -> str | None:
        """On a GPU, have a kernel multiply with the weight, see `repack`; returns why none can there, else None."""
        if self.device.type != "cuda":
            return None
        return kernels.missing(PREFERRED[0], self.device) or self.repack()

    def repack(self) -> str | None:
        """Restate the weight, on its device, in the best layout that has a kernel; its values stay the same.

        Returns None if a kernel will multiply with it, else why none can, and the weight stays as it is.
        """
        if self.has_kernel():
            return None
        q = self.record()
        why = f"no kernel takes {q.scheme.label}"
        for layout in (self.layout, *PREFERRED) if self.layout in kernels.MATMULS else PREFERRED:
            place = target(LAYOUTS[layout], q.scheme, *q.shape, pad=True)
            if place is None:
                continue
            try:
                moved = restated(q, *place)
                self.hold(layout, moved.scheme, moved.shape, LAYOUTS[layout].pack(moved))
            except LayoutError as error:
                why = str(error).split(": ")[0]
                continue
            return None
        return why

    def forward(self, input: Tensor) -> Tensor:
        """Return `input [..., k] @ weight.T + bias`, `[..., n]`, in the dtype of `input`, any that is floating."""
        if input.shape[-1] != self.in_features or not input.is_floating_point():
            raise KernelError(
                f"a packed linear of {self.in_features} inputs got {dtype_name(input.dtype)} {list(input.shape)}: give "
                f"it floating activations [..., {self.in_features}]"
            )
        if self.is_united:
            found: Tensor = self.joint.multiply(input, self.index)
            return found
        return multiplied(self, input, self.out_features)

    def extra_repr(self) -> str:
        padded = f", stored as {[self.n, self.k]}" if (self.n, self.k) != (self.out_features, self.in_features) else ""
        biased = (self.joint if self.is_united else self).bias is not None
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={biased}"
        return f"{sizes}, {self.layout}, {self.label}{padded}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        before = self.device
        super()._apply(only_moved(fn, () if self.is_united else self.suffixes, self), recurse)  # type: ignore[no-untyped-call]
        if before.type == "cpu":
            if (why := self.settle()) is not None:
                _warn_decoded(why)
            elif self.joint is not None:
                self.joint.settle()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_united:
            # In the CPU's memory, since a GPU may have no room for a second model.
            states = self.packed() | ({} if self.joint.bias is None else {"bias": self.joint.bias_of(self.index)})
            destination |= {prefix + name: tensor.to("cpu", copy=True) for name, tensor in states.items()}


def multiplied(held: Any, x: Tensor, out: int) -> Tensor:
    """Return the product `[..., out]` of activations with what a `PackedLinear` or a `Joint` holds, bias included."""
    tensors = [getattr(held, suffix) for suffix in held.suffixes]
    bias = None if held.bias is None else held.bias.to(x.dtype)
    product: Tensor = torch.ops.quantkit.packed_linear(
        x, tensors, bias, held.names, held.layout, held.label, out, held.n, held.k
    )
    return product


def only_moved(fn: Callable[[Tensor], Tensor], names: Collection[str], module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return `fn`, which moves or casts, as it is done to packed tensors `names` of a module: they are moved alone."""
    packed = {id(module.get_parameter(name)) for name in names}

    def moved(tensor: Tensor) -> Tensor:
        # A cast of scales would change the weight, and one of codes in float8 all of it.
        found = fn(tensor)
        return found if id(tensor) not in packed or found.dtype == tensor.dtype else tensor.to(found.device)

    return moved


@torch.library.custom_op("quantkit::packed_linear", mutates_args=())
def packed_linear(
    x: Tensor,
    tensors: list[Tensor],
    bias: Tensor | None,
    names: str,
    layout: str,
    scheme: str,
    out: int,
    n: int,
    k: int,
) -> Tensor:
    """Return the product `[..., out]` of activations and a packed weight, plus `bias` `[out]` of their dtype.

    `names` are the suffixes of `tensors`, with commas; the weight is `[n, k]` with its padding. By the layout's kernel
    where it takes these operands on this device, else by torch with the weight decoded to the dtype of `x`. LayoutError
    for tensors that hold no weight.
    """
    parts = dict(zip(names.split(","), tensors, strict=True))
    if by_kernel(layout, x.device) and _fits(layout, scheme, n, k, parts):
        if x.dtype in ACTIVATIONS:
            rows = _matrix(x, k)
            if not len(rows):
                return x.new_empty((*x.shape[:-1], out))
            bias = functional.pad(bias, (0, n - out)) if bias is not None and n != out else bias
            y = kernels.MATMULS[layout](rows, parts, _scheme(scheme), n, k, bias)
            return (y if n == out else y[:, :out]).reshape(*x.shape[:-1], out)
        _warn_of(x.dtype)
    weight = LAYOUTS[layout].unpack(parts, _scheme(scheme)).dequantize(x.dtype)
    return functional.linear(x, weight[:out, : x.shape[-1]].contiguous(), bias)


@packed_linear.register_fake
def _(
    x: Tensor,
    tensors: list[Tensor],
    bias: Tensor | None,
    names: str,
    layout: str,
    scheme: str,
    out: int,
    n: int,
    k: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out))


@functools.cache
def by_kernel(layout: str, device: torch.device) -> bool:
    """Return whether the kernel of a layout can be run on a device."""
    return kernels.missing(layout, device) is None


def _matrix(x: Tensor, k: int) -> Tensor:
    """Return activations as the kernels take them: `[m, k]` with the padding, contiguous, at an aligned address."""
    rows = functional.pad(x, (0, k - x.shape[-1])) if x.shape[-1] != k else x
    rows = rows.reshape(-1, k).contiguous()
    return rows.clone() if rows.data_ptr() % ALIGNMENT else rows


def _fits(layout: str, scheme: str, n: int, k: int, parts: Mapping[str, Tensor]) -> bool:
    """Return whether tensors are, in dtype and shape, those that the kernel of their layout takes."""
    if layout not in kernels.MATMULS:
        return False
    found = {suffix: (tensor.dtype, tuple(tensor.shape)) for suffix, tensor in parts.items()}
    return found == _stored(layout, scheme, n, k)


@functools.cache
def _stored(layout: str, scheme: str, n: int, k: int) -> Stored:
    return LAYOUTS[layout].stored(_scheme(scheme), n, k)


@functools.cache
def _scheme(label: str) -> Scheme:
    return Scheme.parse(label)


@functools.cache
def _warn_decoded(why: str) -> None:
    warnings.warn(f"packed weights are decoded at each call, which is slow: {why}", RuntimeWarning, stacklevel=2)


@functools.cache
def _warn_of(dtype: torch.dtype) -> None:
    warnings.warn(
        f"the kernels take float16 and bfloat16: with {dtype_name(dtype)} activations packed weights are decoded at "
        "each call, which is exact and slow; load the model with dtype=torch.bfloat16 or torch.float16",
        RuntimeWarning,
        stacklevel=2,
    )
