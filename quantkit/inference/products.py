"""Products with packed weights as one torch operator, and rows of packed tables as another. All
facts of a product that are known before the first token are looked up by a number, the handle.

`torch.ops.quantkit.multiply` multiplies with a linear, or with the experts of a layer whose weights
are stacked `[experts, ...]`. `torch.ops.quantkit.gather` decodes rows of embeddings. torch.compile
and CUDA graphs see one operator and no Python.
`packed_linear` uses it in a transformers model. For inference engines, `prepare` and
`prepare_experts` check packed weights and compile their kernels before the first token.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from threading import Lock, local
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from quantkit import kernels
from quantkit.core.formats import dtype_name
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme, Shape
from quantkit.errors import KernelError, LayoutError
from quantkit.kernels.contract import ACTIVATIONS, ALIGNMENT, Weight, check_addresses
from quantkit.kernels.grouped import GroupedKernel
from quantkit.kernels.hopper import HopperKernel
from quantkit.kernels.portable import PortableKernel
from quantkit.kernels.routing import route, silu_multiply, sum_choices
from quantkit.layouts import LAYOUTS
from quantkit.layouts.recast import Target, recast, target
from quantkit.progress import Progress


class KernelWeight(NamedTuple):
    """The packed tensors of a weight, by suffix, in a layout with a kernel; `shape` is `[n, k]`
    with its padding.
    """

    layout: str
    scheme: Scheme
    shape: Shape
    tensors: dict[str, Tensor]


def places(layout: str, scheme: Scheme, n: int, k: int) -> Iterator[tuple[str, Target]]:
    """Yield the layouts with a kernel that may hold an `[n, k]` weight: its own first, then the
    best first.
    """
    own = (layout,) if layout in kernels.MATMULS else ()
    for name in dict.fromkeys((*own, *kernels.preferred())):
        if (place := target(LAYOUTS[name], scheme, n, k, pad=True)) is not None:
            yield name, place


@functools.cache  # a model has thousands of experts
def places_of_experts(layout: str, scheme: Scheme, n: int, k: int) -> list[tuple[str, Target]]:
    """List the `places` that hold every weight of a scheme, independent of its data, the best
    first.
    """
    return [
        (name, place)
        for name, place in places(layout, scheme, n, k)
        if (place[0].symmetric, place[0].sparsity) == (scheme.symmetric, scheme.sparsity)
    ]


def pack_for_kernel(q: QuantizedTensor, layout: str, is_expert: bool = False) -> KernelWeight:
    """Pack a record of a weight in `layout` for the first of its `places` that its data allow;
    values stay the same.

    Experts of one scheme and shape get the same place, independent of their data. LayoutError, with
    the reason, if no kernel takes the weight.
    """
    why = f"no kernel takes {q.scheme.label}"
    for name, place in (places_of_experts if is_expert else places)(layout, q.scheme, *q.shape):
        try:
            moved = recast(q, *place)
            return KernelWeight(name, moved.scheme, moved.shape, LAYOUTS[name].pack(moved))
        except LayoutError as error:
            why = error.rule
    raise LayoutError(why)


#: Name -> function. Those of `UNGATED` get all rows of the first product, the others the gate's
#: half of them.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "relu2": lambda x: functional.relu(x).square(),
}
UNGATED = "_no_mul"
#: Codes that a CPU decodes at a time, and the memory of each thread for a decoded weight, by dtype.
CODES, _KEPT = 2**20, local()


@dataclass(eq=False)
class DecodedProduct:
    """A kind of product with weights of a scheme in a layout, which torch decodes at each call.

    `names` are the suffixes of the tensors that a call gives, `out` counts the rows before padding.
    """

    layout: str
    scheme: Scheme
    names: tuple[str, ...]
    out: int
    handle: int = field(default=-1, init=False)

    def decode(self, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
        """Multiply on any device and in any dtype, with the weight decoded to the dtype of `x`.

        LayoutError for tensors that hold no weight.
        """
        parts = dict(zip(self.names, tensors, strict=True))
        given = LAYOUTS[self.layout].unpacking(parts, self.scheme)
        if x.device.type == "cpu":
            weight = _kept_buffer(given.shape, x.dtype)
            for some, part in given.records(CODES):
                weight[some] = part.dequantize(x.dtype)
        else:
            weight = given.record().dequantize(x.dtype)
        return functional.linear(x, weight[: self.out, : x.shape[-1]].contiguous(), bias)


def _kept_buffer(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return a thread's memory for a decoded weight `[n, k]`, which the next weight overwrites."""
    size, key = prod(shape), dtype_name(dtype)
    held: Tensor | None = getattr(_KEPT, key, None)
    if held is None or held.numel() < size:
        with torch.inference_mode(False):
            held = torch.empty(size, dtype=dtype)
        setattr(_KEPT, key, held)
    return held[:size].view(shape)


@dataclass(eq=False)
class LinearProduct(DecodedProduct):
    """A kind of product that a kernel computes on a GPU.

    `order` sorts the tensors of a call as `weight.tensors`, None if they are sorted. `checked` has
    the addresses of tensors that were compared with `weight`.
    """

    weight: Weight
    order: tuple[int, ...] | None = None
    checked: set[tuple[int, ...]] = field(default_factory=set)

    def ordered(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Reorder tensors from the order of calls to the kernel's order."""
        return tensors if self.order is None else [tensors[i] for i in self.order]


@dataclass(eq=False)
class ExpertsProduct:
    """A kind of layer of experts: the products before and after the activation, and how many
    experts there are.
    """

    first: LinearProduct
    second: LinearProduct
    experts: int
    activation: str
    handle: int = field(default=-1, init=False)

    @property
    def out(self) -> int:
        """The rows of the second weights, without their padding."""
        return self.second.out

    def activated(self, h: Tensor, width: int) -> Tensor:
        """Apply the activation to the first product `[rows, n]`, and pad the result to `[rows,
        width]`.
        """
        function = FUNCTIONS[self.activation.removesuffix(UNGATED)]
        if self.activation.endswith(UNGATED):
            a = function(h[:, : self.first.out])
        else:
            inner = self.first.out // 2
            a = function(h[:, :inner]) * h[:, inner : 2 * inner]
        return functional.pad(a, (0, width - a.shape[1])) if width != a.shape[1] else a

    def multiply(self, x: Tensor, tensors: list[Tensor], weights: Tensor, ids: Tensor) -> Tensor:
        """Multiply each token of `x` `[m, k]` with its experts on a GPU, in one launch for each
        product: `[m, out]`.
        """
        if not len(x):
            return x.new_empty(0, self.out)
        first, second = grouped(self, x.device)
        count, (m, topk) = len(self.first.names), ids.shape
        n, k, width = first.weight.n, first.weight.k, second.weight.k
        routing = route(ids.contiguous(), self.experts, first.tile(m, topk))
        h = x.new_empty(m * topk, n)
        packed = self.first.ordered(tensors[:count])
        first.launch(packed, as_matrix(x, k), routing, h, gather=True)
        if self.activation == "silu" and n == self.first.out == 2 * width:
            a = x.new_empty(m * topk, width)
            silu_multiply(h, a)
        else:
            a = self.activated(h, width)
        z = x.new_empty(m * topk, second.weight.n)
        packed, weights = self.second.ordered(tensors[count:]), weights.float().contiguous()
        second.launch(packed, a, routing, z, gather=False, weights=weights)
        y = x.new_empty(m, second.weight.n)
        sum_choices(z, y)
        return y[:, : self.out].contiguous()

    def decode(self, x: Tensor, tensors: list[Tensor], weights: Tensor, ids: Tensor) -> Tensor:
        """Multiply the tokens of each expert with its decoded weights; the reference for the
        products on a GPU.
        """
        total = torch.zeros(len(x), self.out, dtype=torch.float32)
        count, inner = len(self.first.names), self.first.out
        width = inner if self.activation.endswith(UNGATED) else inner // 2
        for expert in range(self.experts):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            own = [tensor[expert] for tensor in tensors]
            h = self.first.decode(x[token], own[:count])
            z = self.second.decode(self.activated(h, width), own[count:])
            total.index_add_(0, token, z.float() * weights[token, choice, None].float())
        return total.to(x.dtype)


Product = TypeVar("Product", DecodedProduct, LinearProduct, ExpertsProduct)
#: Handle and `out` -> product.
PRODUCTS: dict[Shape, DecodedProduct | ExpertsProduct] = {}
_LOCK = Lock()


def has_kernel(layout: str, scheme: Scheme, shape: Shape, tensors: Mapping[str, Tensor]) -> bool:
    """Return True if a kernel of the layout takes these packed tensors, wherever they are."""
    try:
        weight = kernels.weight_of(layout, scheme, *shape)
    except KernelError:
        return False
    named = kernels.LAUNCHERS[layout].named(tensors)
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items()} == (
        weight.tensors
    )


@functools.cache
def decoded_product(
    layout: str, scheme: Scheme, names: tuple[str, ...], out: int
) -> DecodedProduct:
    """Register a kind of product that no kernel computes."""
    return _registered(DecodedProduct(layout, scheme, names, out))


@functools.cache
def linear_product(
    layout: str, scheme: Scheme, shape: Shape, names: tuple[str, ...], out: int
) -> LinearProduct:
    """Register a kind of product, without looking at a weight or a GPU.

    `shape` is `[n, k]` with padding, `out` the rows without it; `names` are the suffixes of tensors
    in the order of calls. KernelError if no kernel takes the weight.
    """
    weight, aliases = kernels.weight_of(layout, scheme, *shape), kernels.LAUNCHERS[layout].aliases
    named = [aliases.get(name, name) for name in names]
    if sorted(named) != sorted(weight.tensors) or not 1 <= out <= weight.n:
        wanted = ", ".join(weight.tensors)
        raise KernelError(
            f"the {layout} kernel takes {wanted} for {weight.n} rows, not {', '.join(names)} for "
            f"{out}"
        )
    order = tuple(named.index(name) for name in weight.tensors)
    is_sorted = order == tuple(sorted(order))
    return _registered(
        LinearProduct(layout, scheme, names, out, weight, None if is_sorted else order)
    )


@functools.cache
def experts_product(
    first: LinearProduct, second: LinearProduct, experts: int, activation: str
) -> ExpertsProduct:
    """Register a kind of layer of experts."""
    return _registered(ExpertsProduct(first, second, experts, activation))


def _registered(product: Product) -> Product:
    """Give a product its handle; handles count from 0."""
    with _LOCK:
        product.handle = len(PRODUCTS)
        PRODUCTS[product.handle, product.out] = product
    return product


def prepare(weight: KernelWeight, out: int, dtype: torch.dtype) -> int:
    """Check a packed weight with `out` rows before padding, and return the handle of its products.

    Calls give its tensors in their order here, and activations of `dtype`. Weights of one kind
    share a handle. On a GPU all kernels that its products may need are compiled and loaded, with a
    note if that takes time. KernelError for a weight or dtype that the layout's kernels do not
    take.
    """
    product = _taken(weight, out, dtype)
    packed = product.ordered([*weight.tensors.values()])
    device = packed[0].device
    check_addresses(product.weight, packed, device, product.checked)
    if device.type == "cuda":
        _kernel(product, dtype, device)
    return product.handle


def _taken(weight: KernelWeight, out: int, dtype: torch.dtype) -> LinearProduct:
    if dtype not in ACTIVATIONS:
        raise KernelError(f"the kernels take float16 and bfloat16, not {dtype_name(dtype)}")
    return linear_product(weight.layout, weight.scheme, weight.shape, tuple(weight.tensors), out)


def prepare_experts(
    first: KernelWeight,
    second: KernelWeight,
    sizes: Shape,
    activation: str,
    dtype: torch.dtype,
) -> int:
    """Check the stacked weights of a layer, and return the handle of its products.

    `first` has the rows of gates, then of up projections; for an `UNGATED` activation only of up
    projections. `sizes` are the rows of both weights without padding, `dtype` is the dtype of
    activations. On a GPU the kernels are compiled and loaded. KernelError for weights, an
    activation or a dtype that are not taken.
    """
    if activation.removesuffix(UNGATED) not in FUNCTIONS:
        raise KernelError(
            f"experts have the activation {activation}, quantkit has {', '.join(FUNCTIONS)}"
        )
    weights, device = (first, second), next(iter(first.tensors.values())).device
    products = [_taken(weight, out, dtype) for weight, out in zip(weights, sizes, strict=True)]
    experts = len(next(iter(first.tensors.values())))
    for product, weight in zip(products, weights, strict=True):
        check_addresses(
            product.weight.stacked(experts),
            product.ordered([*weight.tensors.values()]),
            device,
            set(),
        )
    layer = experts_product(products[0], products[1], experts, activation)
    if device.type == "cuda":
        load_experts(layer, dtype, device)
    return layer.handle


def load_experts(layer: ExpertsProduct, dtype: torch.dtype, device: torch.device) -> None:
    """Compile and load all kernels for a layer's products, with a note if that takes time."""
    for kernel in grouped(layer, device):
        for one in kernel.kernels:
            load_kernel(one, dtype, device)
        kernel.load(dtype, device)


@functools.cache
def grouped(layer: ExpertsProduct, device: torch.device) -> tuple[GroupedKernel, GroupedKernel]:
    """Find the kernels of a layer's products; KernelError if there are none for these weights or
    this device.
    """
    first, second = (
        GroupedKernel.of(one.layout, one.scheme, layer.experts, one.weight.n, one.weight.k, device)
        for one in (layer.first, layer.second)
    )
    return first, second


@functools.cache
def _kernel(
    product: LinearProduct, dtype: torch.dtype, device: torch.device
) -> HopperKernel | PortableKernel | None:
    """Load the kernel for products with activations of a dtype, None if they are decoded."""
    if kernels.unusable(device) is not None:
        return None
    if dtype not in ACTIVATIONS:
        warnings.warn(
            f"the kernels take float16 and bfloat16: with {dtype_name(dtype)} activations packed "
            "weights are decoded at each call, which is exact and slow; load the model with "
            "dtype=torch.bfloat16 or torch.float16",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    weight, launcher = product.weight, kernels.LAUNCHERS[product.layout]
    kernel = launcher.fastest(product.scheme, weight.n, weight.k, device)
    load_kernel(kernel, dtype, device)
    return kernel


@functools.cache
def load_kernel(
    kernel: HopperKernel | PortableKernel, dtype: torch.dtype, device: torch.device
) -> None:
    """Compile and load the instances of a kernel, with a note if they are not in the cache on the
    disk.
    """
    anew = kernels.loader.uncompiled(kernel.source, kernel.instances_by_dtype[dtype], device)
    if anew:
        Progress().note(
            f"{len(anew)} kernels of {kernel.source}.cu are compiled for {device}, once on this "
            "machine: this may take a minute"
        )
    kernel.load(dtype, device)


def as_matrix(x: Tensor, k: int) -> Tensor:
    """Reshape activations for a kernel: `[m, k]` with the padding, contiguous, at an aligned
    address.
    """
    x = functional.pad(x, (0, k - x.shape[-1])) if x.shape[-1] != k else x
    rows = x.view(-1, k) if x.is_contiguous() and x.numel() else x.reshape(-1, k).contiguous()
    return rows.clone() if rows.data_ptr() % ALIGNMENT else rows


def multiply(
    x: Tensor, tensors: list[Tensor], others: list[Tensor], handle: int, out: int
) -> Tensor:
    """Multiply activations on a GPU with a weight that was prepared: `[..., out]`, contiguous.

    `others` are the bias `[out]` of a linear, if it has one; of experts, weights and numbers `[m,
    topk]`. `x` `[..., k]` may have no padding, no rows, any strides and any address. KernelError
    for a kind of weight that was not prepared.
    """
    product = PRODUCTS.get((handle, out)) or _unprepared(handle, out)
    if isinstance(product, ExpertsProduct):
        return product.multiply(x, tensors, *others)
    if not isinstance(product, LinearProduct):
        return product.decode(x, tensors, *others)
    weight, kernel = product.weight, _kernel(product, x.dtype, x.device)
    if kernel is None:
        return product.decode(x, tensors, *others)
    packed = tensors if product.order is None else [tensors[i] for i in product.order]
    if tuple([tensor.data_ptr() for tensor in packed]) not in product.checked:
        check_addresses(weight, packed, x.device, product.checked)
    shape, n, k = x.shape, weight.n, weight.k
    if len(shape) != 2 or shape[1] != k or not x.is_contiguous() or x.data_ptr() % ALIGNMENT:
        x = as_matrix(x, k)
    y = x.new_empty((x.shape[0], n))
    if y.shape[0]:
        bias = others[0] if others else None
        bias = functional.pad(bias, (0, n - out)) if bias is not None and n != out else bias
        kernel.launch(weight, x, packed, bias, y)
    y = y[:, :out].contiguous() if n != out else y
    return y if len(shape) == 2 else y.view(*shape[:-1], out)


def _on_cpu(
    x: Tensor, tensors: list[Tensor], others: list[Tensor], handle: int, out: int
) -> Tensor:
    product = PRODUCTS.get((handle, out)) or _unprepared(handle, out)
    return product.decode(x, tensors, *others)


def _fake(x: Tensor, tensors: list[Tensor], others: list[Tensor], handle: int, out: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out))


def _unprepared(handle: int, out: int) -> NoReturn:
    raise KernelError(
        f"no weight of {out} rows was prepared as {handle}", "prepare the weights in the same order"
    )


def gather(
    rows: Tensor,
    tensors: list[Tensor],
    names: list[str],
    layout: str,
    scheme: str,
    k: int,
    dtype: torch.dtype,
) -> Tensor:
    """Decode the rows with the numbers `rows`, int64 `[...]`, of a packed table `[n, k]`: `[...,
    k]`, without waiting for a GPU.

    `names` are the suffixes of `tensors` in the layout, `scheme` is a label.
    """
    if not rows.numel():
        return _fake_rows(rows, tensors, names, layout, scheme, k, dtype)
    parts = dict(zip(names, tensors, strict=True))
    found = LAYOUTS[layout].gather(_scheme(scheme), parts, rows.reshape(-1), k)
    return found.to(dtype).view(*rows.shape, k)


def _fake_rows(
    rows: Tensor,
    tensors: list[Tensor],
    names: list[str],
    layout: str,
    scheme: str,
    k: int,
    dtype: torch.dtype,
) -> Tensor:
    return rows.new_empty((*rows.shape, k), dtype=dtype)


def _backward(ctx: Any, gradient: Tensor) -> Any:
    raise KernelError("packed weights have no gradient", "load the model that was quantized")


_scheme = functools.cache(Scheme.parse)
OPERATOR, ROWS = "quantkit::multiply", "quantkit::gather"
LIBRARY = torch.library.Library("quantkit", "FRAGMENT")  # the operator is gone with it
LIBRARY.define(
    "multiply(Tensor x, Tensor[] tensors, Tensor[] others, int handle, int out) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "gather(Tensor rows, Tensor[] tensors, str[] names, str layout, str scheme, int k, "
    "ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("gather", gather, "CompositeExplicitAutograd")
LIBRARY.impl("multiply", multiply, "CUDA")
LIBRARY.impl("multiply", _on_cpu, "CPU")
torch.library.register_fake(OPERATOR, _fake, lib=LIBRARY)
torch.library.register_fake(ROWS, _fake_rows, lib=LIBRARY)
torch.library.register_autograd(OPERATOR, _backward, lib=LIBRARY)
