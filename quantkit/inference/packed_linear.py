"""A linear layer with a packed weight: a kernel multiplies with it, or torch decodes it at each
call.

Both cases go through one torch operator with a known output shape, so torch.compile sees a single
node and no Python. The operator also accepts input that kernels refuse: leading dimensions, zero
tokens, strided or unaligned activations, padded weights.

Packed tensors are frozen parameters, because accelerate does not offload buffers to the CPU or the
disk.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from quantkit import kernels
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.core.tensors import dtype_name
from quantkit.errors import KernelError, LayoutError, in_python
from quantkit.inference.engine_linear import PREPARED, decode, handle_of, multiply
from quantkit.inference.kernel_weight import pack_for_kernel
from quantkit.kernels.contract import ACTIVATIONS
from quantkit.layouts import LAYOUTS
from quantkit.layouts.base import Stored
from quantkit.layouts.recast import recast


class DecodedWeight(Tensor):
    """A tensor `[n, k]` of a dtype on a device, whose values `decode` computes for each operation
    on it.

    Shape, dtype and device cost nothing: T5 asks for the dtype before every product.
    """

    _decode: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        decode: Callable[[], Tensor],
    ) -> DecodedWeight:
        made: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._decode = decode
        made._is_hf_initialized = True  # transformers leaves it as it is
        found: DecodedWeight = made
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def plain(value: Any) -> Any:
            return value._decode() if isinstance(value, cls) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._decode())


class PackedLinear(nn.Module):
    """An `nn.Linear` whose packed tensors are frozen parameters under the layout's own names.

    `n` and `k` are the stored sizes, padding included; `out_features` and `in_features` are the
    true sizes. Casts such as `.half()` change only the bias; `weight` decodes to `dense_dtype`,
    unless a packed tensor has that name and no code of the model `reads_weight`. A move from a CPU
    to a GPU repacks the weight for a kernel. It has no gradient. A layer that is fused with its
    siblings is part `index` of `fused`, a `FusedLinear` that owns all their tensors. Then `packed`
    makes copies, and the state dict holds copies on the CPU.
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
        self.dense_dtype = torch.float32
        self.reads_weight = False
        self.fused: Any = None
        self.index = 0
        self.set_packed(layout, scheme, stored_size, tensors)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def set_packed(
        self,
        layout: str,
        scheme: Scheme,
        stored_size: tuple[int, int],
        tensors: Mapping[str, Tensor],
    ) -> None:
        """Replace the packed tensors, and with them layout, scheme and stored size `[n, k]`."""
        for suffix in self.suffixes:
            delattr(self, suffix)
        self.layout, self.scheme, (self.n, self.k) = layout, scheme, stored_size
        self.suffixes, self.names, self.label = tuple(tensors), ",".join(tensors), scheme.label
        for suffix, tensor in tensors.items():
            self.register_parameter(suffix, nn.Parameter(tensor, requires_grad=False))

    def packed(self) -> dict[str, Tensor]:
        """List the packed tensors by suffix."""
        if self.is_fused:
            return dict(self.fused.packed_part(self.index))
        return {suffix: self.get_parameter(suffix).detach() for suffix in self.suffixes}

    @property
    def is_fused(self) -> bool:
        """Whether `fused` owns the packed tensors and the bias."""
        return self.fused is not None and bool(self.fused.is_fused)

    def drop_packed(self) -> None:
        """Free the packed tensors and the bias, once `fused` owns them."""
        for suffix in self.suffixes:
            delattr(self, suffix)
        self.bias = None

    def record(self) -> QuantizedTensor:
        """Unpack the weight without its padding, except for the columns that complete the last
        group.
        """
        q = LAYOUTS[self.layout].unpack(self.packed(), self.scheme)
        return recast(q, q.scheme, (self.out_features, q.scheme.padded_k(self.in_features)))

    def is_multiplied_on(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return True if a kernel multiplies activations of this dtype on this device, False if
        torch decodes.
        """
        return has_kernel_on(self.layout, device) and dtype in ACTIVATIONS and self.has_kernel()

    def has_kernel(self) -> bool:
        """Return True if the layout's kernel accepts the packed tensors, wherever they are."""
        owner = self.fused if self.is_fused else self
        return _kernel_accepts(self.layout, self.label, owner.n, self.k, owner.packed())

    @property
    def weight(self) -> Tensor:
        """Decode the weight, for models that use the weight of a linear itself, or ask for its
        dtype or device.
        """
        suffixes = self.__dict__.get("suffixes", ())
        stored = self._parameters.get("weight")
        if not suffixes or (stored is None and "weight" in suffixes):
            raise AttributeError("weight")
        if stored is not None and not self.reads_weight:
            return stored
        return DecodedWeight(
            (self.out_features, self.in_features), self.dense_dtype, self.device, self._decoded
        )

    def _decoded(self) -> Tensor:
        if self.device.type == "meta":
            return torch.empty(
                self.out_features, self.in_features, dtype=self.dense_dtype, device="meta"
            )
        return self.record().dequantize(self.dense_dtype)[:, : self.in_features]

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return a packed tensor or the bias by its name."""
        found = self._parameters.get(target)
        return super().get_parameter(target) if found is None else found

    @property
    def device(self) -> torch.device:
        """The device of the packed tensors."""
        owner: nn.Module = self.fused if self.is_fused else self
        return owner.get_parameter(self.suffixes[0]).device

    def prepare_kernel(self) -> str | None:
        """Repack the weight for a kernel if it is on a GPU; returns the reason if no kernel can
        multiply there.
        """
        if self.device.type != "cuda":
            return None
        return kernels.unusable(self.device) or self.repack()

    def repack(self) -> str | None:
        """Recast the weight, on its device, to the best layout with a kernel; its values stay the
        same.

        Returns None if a kernel accepts the result. Otherwise it returns the reason, and the weight
        is unchanged.
        """
        if self.has_kernel():
            return None
        q = self.record()
        try:
            found = pack_for_kernel(q, self.layout)
        except LayoutError as error:
            return error.rule
        self.set_packed(found.layout, found.scheme, found.shape, found.tensors)
        return None

    def forward(self, input: Tensor) -> Tensor:
        """Compute `input [..., k] @ weight.T + bias`, `[..., n]`, in the floating dtype
        of `input`.
        """
        if input.shape[-1] != self.in_features or not input.is_floating_point():
            raise KernelError(
                f"a packed linear of {self.in_features} inputs got {dtype_name(input.dtype)} "
                f"{list(input.shape)}",
                f"give it floating activations [..., {self.in_features}]",
            )
        if self.is_fused:
            product: Tensor = self.fused.multiply(input, self.index)
            return product
        return multiply_packed(self, input, self.out_features)

    def extra_repr(self) -> str:
        padded = (
            f", stored as {[self.n, self.k]}"
            if (self.n, self.k) != (self.out_features, self.in_features)
            else ""
        )
        biased = (self.fused if self.is_fused else self).bias is not None
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={biased}"
        return f"{sizes}, {self.layout}, {self.label}{padded}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        before = self.device
        super()._apply(without_casts(fn, () if self.is_fused else self.suffixes, self), recurse)  # type: ignore[no-untyped-call]
        if before.type == "cpu":
            if (why := self.prepare_kernel()) is not None:
                _warn_decoded(why)
            elif self.fused is not None:
                self.fused.fuse_on_gpu()
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_fused:
            # On the CPU, because a GPU may be too small for a second model.
            states = self.packed() | (
                {} if self.fused.bias is None else {"bias": self.fused.bias_part(self.index)}
            )
            destination |= {
                prefix + name: tensor.to("cpu", copy=True) for name, tensor in states.items()
            }


def multiply_packed(layer: Any, x: Tensor, out: int) -> Tensor:
    """Multiply activations with the weight of a `PackedLinear` or a `FusedLinear`: `[..., out]`,
    bias included.
    """
    tensors = [layer._parameters[suffix] for suffix in layer.suffixes]
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    product: Tensor = torch.ops.quantkit.packed_linear(
        x, tensors, bias, layer.names, layer.layout, layer.label, out, layer.n, layer.k
    )
    return product


def without_casts(
    fn: Callable[[Tensor], Tensor], names: Collection[str], module: nn.Module
) -> Callable[[Tensor], Tensor]:
    """Wrap `fn`, which moves or casts tensors, so that a module's packed tensors `names` are moved,
    but never cast.
    """
    packed = {id(module.get_parameter(name)) for name in names}

    def move(tensor: Tensor) -> Tensor:
        # A cast of scales would change the weight, and a cast of float8 codes would destroy it.
        result = fn(tensor)
        return (
            result
            if id(tensor) not in packed or result.dtype == tensor.dtype
            else tensor.to(result.device)
        )

    return move


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
    """Multiply activations with a packed weight and add `bias` `[out]`, of the same dtype: `[...,
    out]`.

    `names` has the suffixes of `tensors`, joined by commas; the weight is `[n, k]` with its
    padding. A kernel of the layout multiplies if it accepts these operands on this device.
    Otherwise torch multiplies with the weight decoded to the dtype of `x`. LayoutError for tensors
    that hold no weight.
    """
    parts = dict(zip(names.split(","), tensors, strict=True))
    if has_kernel_on(layout, x.device) and _kernel_accepts(layout, scheme, n, k, parts):
        if x.dtype in ACTIVATIONS:
            handle = handle_of(layout, scheme, n, k, out, tuple(parts), x.dtype)
            return multiply(PREPARED[handle], x, tensors, bias)
        _warn_dtype(x.dtype)
    return decode(x, parts, bias, layout, _scheme(scheme), out)


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
def has_kernel_on(layout: str, device: torch.device) -> bool:
    """Return True if the layout has a kernel that runs on the device."""
    return kernels.missing(layout, device) is None


def _kernel_accepts(layout: str, scheme: str, n: int, k: int, parts: Mapping[str, Tensor]) -> bool:
    """Return True if the layout has a kernel and the tensors have the dtypes and shapes that it
    reads.
    """
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
    reason = in_python(why)
    warnings.warn(
        f"packed weights are decoded at each call, which is slow: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )


@functools.cache
def _warn_dtype(dtype: torch.dtype) -> None:
    warnings.warn(
        f"the kernels take float16 and bfloat16: with {dtype_name(dtype)} activations packed "
        "weights are decoded at "
        "each call, which is exact and slow; load the model with dtype=torch.bfloat16 or "
        "torch.float16",
        RuntimeWarning,
        stacklevel=2,
    )
