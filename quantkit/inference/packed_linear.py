"""A linear layer with a packed weight: a kernel multiplies with it, or torch decodes it at each
call.

Both cases go through one torch operator with a known output shape, see `products`. The operator
also accepts input that kernels refuse: leading dimensions, zero tokens, strided or unaligned
activations, padded weights.

Packed tensors are frozen parameters, because accelerate does not offload buffers to the CPU or the
disk.

For a small weight a kernel launch costs as much as the product. So sibling linears, found by their
names, such as query, key and value projections, or gate and up, are fused: they are stacked into
one packed weight if their layout allows it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from quantkit import kernels
from quantkit.core.formats import dtype_name
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme, Shape, Tensors
from quantkit.core.threads import grouped
from quantkit.engines.joined import SIBLINGS
from quantkit.errors import KernelError, LayoutError, in_python
from quantkit.inference.products import (
    decoded_product,
    has_kernel,
    linear_product,
    pack_for_kernel,
)
from quantkit.layouts import LAYOUTS
from quantkit.layouts.base import DAMAGED
from quantkit.layouts.recast import recast
from quantkit.models.families import CROSS_ATTENTION
from quantkit.models.stored_rows import SharedProduct


class DecodedWeight(Tensor):
    """A tensor `[n, k]` of a dtype on a device, whose values `decode` computes for each operation
    on it.

    Shape, dtype and device cost nothing: T5 asks for the dtype before every product.
    """

    _decode: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        decode: Callable[[], Tensor],
    ) -> DecodedWeight:
        made: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._decode = decode
        made._is_hf_initialized = True  # transformers leaves it unchanged
        return cast(DecodedWeight, made)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def plain(value: Any) -> Any:
            return value._decode() if isinstance(value, cls) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._decode())


class PackedWeight(nn.Module):
    """A packed weight, whose tensors are frozen parameters under the layout's own names, and a
    bias.

    `n` and `k` are the stored sizes, padding included. Casts such as `.half()` change only the
    bias. The weight has no gradient. `decoded` is None, or the weight without padding, which
    multiplies activations of its dtype. It is no state; proofs read the packed tensors.
    """

    decoded: Tensor | None = None
    suffixes: tuple[str, ...] = ()
    bias: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("bias", None)

    def set_packed(
        self,
        layout: str,
        scheme: Scheme,
        stored_size: Shape,
        tensors: Tensors,
        out: int,
    ) -> None:
        """Replace the packed tensors, and with them layout, scheme and stored size `[n, k]`, with
        `out` rows before padding.
        """
        for suffix in self.suffixes:
            delattr(self, suffix)
        self.layout, self.scheme, (self.n, self.k) = layout, scheme, stored_size
        self.suffixes, self.out, self.decoded = tuple(tensors), out, None
        product = (
            linear_product(layout, scheme, stored_size, self.suffixes, out)
            if has_kernel(layout, scheme, stored_size, tensors)
            else decoded_product(layout, scheme, self.suffixes, out)
        )
        self.handle = product.handle
        for suffix, tensor in tensors.items():
            self.register_parameter(suffix, nn.Parameter(tensor, requires_grad=False))

    def packed(self) -> dict[str, Tensor]:
        """List the packed tensors by suffix."""
        return {suffix: self.get_parameter(suffix).detach() for suffix in self.suffixes}

    def multiply(self, x: Tensor) -> Tensor:
        """Multiply activations `[..., k]` with the weight: `[..., out]`, bias included."""
        parameters, decoded = self._parameters, self.decoded
        bias = None if parameters["bias"] is None else parameters["bias"].to(x.dtype)
        is_inference = not (torch.is_grad_enabled() and x.requires_grad)
        if decoded is not None and decoded.dtype == x.dtype and is_inference:
            return nn.functional.linear(x, decoded, bias)
        tensors = [parameters[suffix] for suffix in self.suffixes]
        others = [] if bias is None else [bias]
        return cast(Tensor, torch.ops.quantkit.multiply(x, tensors, others, self.handle, self.out))

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return a packed tensor or the bias by its name."""
        found = self._parameters.get(target)
        return super().get_parameter(target) if found is None else found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedWeight:
        """Move or cast the bias; packed tensors are moved, but never cast."""
        packed = {id(self._parameters.get(name)) for name in self.suffixes}

        def move(tensor: Tensor) -> Tensor:
            # A cast of scales would change the weight, and a cast of float8 codes would destroy it.
            result = fn(tensor)
            if id(tensor) not in packed or result.dtype == tensor.dtype:
                return result
            return tensor.to(result.device)

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return self


class PackedLinear(PackedWeight):
    """An `nn.Linear` with a packed weight: a kernel multiplies with it, or torch decodes it.

    `out_features` and `in_features` are the sizes without padding. `weight` decodes to
    `dense_dtype`, unless a packed tensor has that name and no code of the model `reads_weight`. A
    move from a CPU to a GPU repacks the weight for a kernel. A layer that is fused with its
    siblings is part `index` of `fused`, a `FusedLinear` that owns all their tensors. Then `packed`
    makes copies, and the state dict holds copies on the CPU.
    """

    def __init__(
        self,
        layout: str,
        scheme: Scheme,
        stored_size: Shape,
        true_size: Shape,
        tensors: Tensors,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = true_size
        self.dense_dtype = torch.float32
        self.reads_weight = False
        self.fused: FusedLinear | None = None
        self.index = 0
        self.set_packed(layout, scheme, stored_size, tensors, self.out_features)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def _owner(self) -> PackedWeight:
        """The module that owns the packed tensors and the bias."""
        return self.fused if self.fused is not None and self.fused.is_fused else self

    def packed(self) -> dict[str, Tensor]:
        """List the packed tensors by suffix."""
        owner = self._owner
        return owner.packed_part(self.index) if isinstance(owner, FusedLinear) else super().packed()

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

    def has_kernel(self) -> bool:
        """Return True if the layout's kernel accepts the packed tensors, wherever they are."""
        owner = self._owner
        return has_kernel(self.layout, self.scheme, (owner.n, self.k), owner.packed())

    @property
    def weight(self) -> Tensor:
        """Decode the weight, for models that use the weight of a linear itself, or ask for its
        dtype or device.
        """
        stored = self._parameters.get("weight")
        if not self.suffixes or (stored is None and "weight" in self.suffixes):
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

    def keep_decoded(self, dtype: torch.dtype) -> None:
        """Decode the weight to a dtype once, for all products with activations of that dtype."""
        with torch.inference_mode(False):
            self.decoded = self.record().dequantize(dtype)[:, : self.in_features].contiguous()

    @property
    def device(self) -> torch.device:
        """The device of the packed tensors."""
        return self._owner.get_parameter(self.suffixes[0]).device

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
        try:
            found = pack_for_kernel(self.record(), self.layout)
        except LayoutError as error:
            return error.rule
        self.set_packed(*found, self.out_features)
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
        fused = self.fused
        if fused is None or not fused.is_fused:
            return self.multiply(input)
        return fused.product(input, self.index)[..., fused.rows[self.index]]

    def extra_repr(self) -> str:
        stored = [self.n, self.k]
        padded = f", stored as {stored}" if stored != [self.out_features, self.in_features] else ""
        kind = f"bias={self._owner.bias is not None}, {self.layout}, {self.scheme.label}{padded}"
        return f"in_features={self.in_features}, out_features={self.out_features}, {kind}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        before, decoded, self.decoded = self.device, self.decoded, None
        super()._apply(fn, recurse)
        if decoded is not None and self.device.type == before.type:
            self.keep_decoded(fn(decoded[:0]).dtype)
        if before.type == "cpu":
            if (why := self.prepare_kernel()) is not None:
                _warn_decoded(why)
            elif self.fused is not None:
                self.fused.fuse_on_gpu()
        return self

    def _load_from_state_dict(self, *args: Any, **more: Any) -> None:
        super()._load_from_state_dict(*args, **more)
        if self.decoded is not None:
            self.keep_decoded(self.decoded.dtype)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if isinstance(owner := self._owner, FusedLinear):
            states = self.packed()
            if owner.bias is not None:
                states["bias"] = owner.bias.detach()[owner.rows[self.index]]
            # On the CPU, because a GPU may be too small for a second model.
            destination |= {
                prefix + name: tensor.to("cpu", copy=True) for name, tensor in states.items()
            }


class PackedEmbedding(PackedLinear):
    """An `nn.Embedding` with a packed weight `[n, k]`: it gathers the rows of the tokens, and
    decodes these to `dense_dtype`, on any device.

    `table` is the module in whose place it stands, without a weight of its own. Its forward may
    scale the rows.
    """

    def __init__(self, table: nn.Embedding, *packed: Any) -> None:
        super().__init__(*packed)
        self.table, self.dense_dtype = table, table.weight.dtype
        del table.weight
        table.register_buffer("weight", torch.empty(0), persistent=False)
        table.padding_idx = None  # which only gradients and random weights heed

    def show_dtype(self) -> None:
        """Put an empty parameter of `dense_dtype` before the packed tensors, because transformers
        takes a model's dtype from its first floating parameter. It is not saved.
        """
        if self.device.type != "meta":
            empty = torch.empty(0, dtype=self.dense_dtype, device=self.device)
            self._parameters = {
                "dtype_of_rows": nn.Parameter(empty, requires_grad=False),
                **self._parameters,
            }

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(f"{prefix}dtype_of_rows", None)

    def forward(self, input: Tensor) -> Tensor:
        """Look up the rows of token numbers `[...]`: `[..., k]`."""
        rows = self.rows(input.reshape(-1))
        if type(self.table).forward is nn.Embedding.forward:
            return rows.view(*input.shape, self.in_features)
        # Its own code gets the rows found, as a weight of which it takes each row once.
        places = torch.arange(len(rows), device=rows.device).view(input.shape)
        return cast(Tensor, functional_call(self.table, {"weight": rows}, (places,)))

    def rows(self, numbers: Tensor) -> Tensor:
        """Decode the rows with these numbers, int64 `[t]`: `[t, k]`."""
        tensors = self.packed()
        table = ([*tensors.values()], [*tensors], self.layout, self.scheme.label, self.k)
        found = torch.ops.quantkit.gather(numbers, *table, self.dense_dtype)
        return cast(Tensor, found[:, : self.in_features])

    def prepare_kernel(self) -> str | None:
        """Check the packed tensors, since gathering reads no shape. It needs no kernel."""
        if self.device.type != "meta":
            found = LAYOUTS[self.layout].check_tensors(self.packed(), self.scheme)
            if found != (self.n, self.k):
                raise LayoutError(
                    f"its tensors are those of {list(found)}, not of {[self.n, self.k]}", DAMAGED
                )
        return None

    def keep_decoded(self, dtype: torch.dtype) -> None:
        """Do nothing: a pass needs few rows."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedEmbedding:
        super()._apply(fn, recurse)
        self.dense_dtype = fn(torch.empty(0, dtype=self.dense_dtype)).dtype
        return self


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
        for index, part in enumerate(parts):
            part.fused, part.index = self, index

    def fuse_on_gpu(self) -> None:
        """Fuse the parts if a kernel multiplies with each of them."""
        ready = all(
            kernels.unusable(part.device) is None and part.has_kernel() for part in self.parts
        )
        if not self.is_fused and ready and self.fuse():
            # The freed blocks are too small for the next siblings, so torch would keep all weights
            # twice.
            torch.cuda.empty_cache()

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
        return LAYOUTS[self.layout].cut(self.scheme, self.packed(), self.n, self.stored_rows[index])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedLinear:
        self.cached = self.traced = None
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
                if isinstance(child, PackedLinear) and child._owner is child
            ]
            # An override may give some of them another scheme. Those on meta are offloaded.
            for alike in grouped((_fusion_key(part), part) for part in found).values():
                if len(alike) > 1 and alike[0].device.type != "meta":
                    yield alike


def _fusion_key(part: PackedLinear) -> tuple[object, ...]:
    """List the properties that fused linears must share."""
    bias = None if part.bias is None else (part.bias.dtype, part.bias.device)
    return part.layout, part.scheme, part.k, part.in_features, part.device, bias


@functools.cache
def _warn_decoded(why: str) -> None:
    warnings.warn(
        f"packed weights are decoded at each call, which is slow: {in_python(why)}",
        RuntimeWarning,
        stacklevel=2,
    )
