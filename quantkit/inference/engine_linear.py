"""The product with a packed weight: everything that is known before the first token is looked up by
a number.

`prepare` checks a packed weight, compiles its kernels, and returns the number.
`torch.ops.quantkit.engine_linear` multiplies with it, for inference engines: torch.compile and CUDA
graphs see one operator. `packed_linear` uses the same product.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor
from torch.nn import functional

from quantkit import kernels
from quantkit.core.scheme import Scheme
from quantkit.core.tensors import dtype_name
from quantkit.errors import KernelError
from quantkit.kernels import loader
from quantkit.kernels.contract import ACTIVATIONS, ALIGNMENT, Weight, check_packed, check_sizes
from quantkit.kernels.hopper import HopperKernel
from quantkit.kernels.portable import PortableInstances, PortableKernel
from quantkit.layouts import LAYOUTS
from quantkit.progress import Progress


@dataclass(eq=False)
class Prepared:
    """A kind of product: weights `[n, k]` of a scheme in a layout, activations of one dtype.

    `names` are the suffixes of the tensors that a call gives; `order` sorts these as
    `weight.tensors`, None if they are sorted. The first `out` of n are returned. `checked` has the
    addresses of weights that were compared with `weight`.
    """

    layout: str
    scheme: Scheme
    weight: Weight
    names: tuple[str, ...]
    order: tuple[int, ...] | None
    out: int
    dtype: torch.dtype
    checked: set[tuple[int, ...]] = field(default_factory=set)

    def ordered(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Reorder tensors from the order of calls to the kernel's order."""
        return tensors if self.order is None else [tensors[i] for i in self.order]


#: Handle -> product.
PREPARED: list[Prepared] = []
_LOCK = Lock()


def prepare(
    layout: str,
    label: str,
    n: int,
    k: int,
    out: int,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> int:
    """Check a packed weight `[n, k]` with `out` rows before padding, and return the handle of its
    products.

    `label` is the scheme, `tensors` are by suffix in the order of later calls, `dtype` is the dtype
    of activations. On a GPU all kernels that its products may need are compiled and loaded, with a
    note if that takes time. Handles count from 0 in order of preparation; weights of one kind share
    one. KernelError for a weight or dtype that the layout's kernels do not take.
    """
    handle = handle_of(layout, label, n, k, out, tuple(tensors), dtype)
    one, device = PREPARED[handle], next(iter(tensors.values())).device
    _check(one, [*tensors.values()], device)
    if device.type == "cuda":
        _kernel(one, device)
    return handle


@functools.cache
def handle_of(
    layout: str, label: str, n: int, k: int, out: int, names: tuple[str, ...], dtype: torch.dtype
) -> int:
    """Return the handle for a kind of product, see `prepare`, without looking at a
    weight or a GPU.
    """
    if layout not in kernels.LAUNCHERS:
        raise KernelError(kernels.none_for(layout))
    if dtype not in ACTIVATIONS:
        raise KernelError(f"the kernels take float16 and bfloat16, not {dtype_name(dtype)}")
    launcher, scheme = kernels.LAUNCHERS[layout], Scheme.parse(label)
    weight = launcher.weight(scheme, n, k)
    check_sizes(weight)
    named = [launcher.aliases.get(name, name) for name in names]
    if sorted(named) != sorted(weight.tensors) or not 1 <= out <= n:
        wanted = ", ".join(weight.tensors)
        raise KernelError(
            f"the {layout} kernel takes {wanted} for {n} rows, not {', '.join(names)} for {out}"
        )
    order = [named.index(name) for name in weight.tensors]
    with _LOCK:
        kept = None if order == sorted(order) else tuple(order)
        PREPARED.append(Prepared(layout, scheme, weight, names, kept, out, dtype))
        return len(PREPARED) - 1


def multiply(one: Prepared, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """Multiply activations `[..., k]` on a GPU by a kernel, and add `bias` `[out]`: `[..., out]`,
    contiguous.

    `x` may have no padding, no rows, any strides and any address. KernelError for a kind of weight
    or a dtype that was not prepared.
    """
    weight, shape, device = one.weight, x.shape, x.device
    n, k = weight.n, weight.k
    if x.dtype is not one.dtype:
        asked, ready = dtype_name(x.dtype), dtype_name(one.dtype)
        raise KernelError(
            f"a weight prepared for {ready} got {asked} activations", f"prepare it for {asked}"
        )
    packed = one.ordered(tensors)
    if tuple([tensor.data_ptr() for tensor in packed]) not in one.checked:
        _check(one, tensors, device)
    if len(shape) != 2 or shape[1] != k or not x.is_contiguous() or x.data_ptr() % ALIGNMENT:
        x = as_matrix(x, k)
    y = x.new_empty((x.shape[0], n))
    if y.shape[0]:
        bias = functional.pad(bias, (0, n - one.out)) if bias is not None and n != one.out else bias
        _kernel(one, device).launch(weight, x, packed, bias, y)
    y = y[:, : one.out].contiguous() if n != one.out else y
    return y if len(shape) == 2 else y.view(*shape[:-1], one.out)


def decode(
    x: Tensor,
    tensors: Mapping[str, Tensor],
    bias: Tensor | None,
    layout: str,
    scheme: Scheme,
    out: int,
) -> Tensor:
    """Multiply as `multiply` does, on any device and in any dtype, with the weight decoded to the
    dtype of `x`.
    """
    weight = LAYOUTS[layout].unpack(tensors, scheme).dequantize(x.dtype)
    return functional.linear(x, weight[:out, : x.shape[-1]].contiguous(), bias)


def as_matrix(x: Tensor, k: int) -> Tensor:
    """Reshape activations for a kernel: `[m, k]` with the padding, contiguous, at an aligned
    address.
    """
    x = functional.pad(x, (0, k - x.shape[-1])) if x.shape[-1] != k else x
    rows = x.view(-1, k) if x.is_contiguous() and x.numel() else x.reshape(-1, k).contiguous()
    return rows.clone() if rows.data_ptr() % ALIGNMENT else rows


def _check(one: Prepared, tensors: Sequence[Tensor], device: torch.device) -> None:
    """Check the tensors of a weight; KernelError if the kernels would read them wrongly."""
    packed = one.ordered(tensors)
    check_packed(one.weight, dict(zip(one.weight.tensors, packed, strict=True)), device)
    if len(one.checked) > 4096:  # weights that move between devices
        one.checked.clear()
    one.checked.add(tuple([tensor.data_ptr() for tensor in packed]))


@functools.cache
def _kernel(one: Prepared, device: torch.device) -> HopperKernel | PortableKernel:
    kernel = kernels.LAUNCHERS[one.layout].fastest(one.scheme, one.weight.n, one.weight.k, device)
    load_kernel(kernel, one.dtype, device)
    return kernel


@functools.cache
def load_kernel(
    kernel: HopperKernel | PortableInstances, dtype: torch.dtype, device: torch.device
) -> None:
    """Compile and load the instances of a kernel, with a note if they are not in the cache on the
    disk.
    """
    anew = loader.uncompiled(kernel.source, kernel.instances_by_dtype[dtype], device)
    if anew:
        Progress().note(
            f"{len(anew)} kernels of {kernel.source}.cu are compiled for {device}, once on this "
            "machine: "
            "this may take a minute"
        )
    kernel.load(dtype, device)


LIBRARY = torch.library.Library("quantkit", "FRAGMENT")  # the operator is gone with it
LIBRARY.define(
    "engine_linear(Tensor x, Tensor[] tensors, Tensor? bias, int handle, int out) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _on_gpu(x: Tensor, tensors: list[Tensor], bias: Tensor | None, handle: int, out: int) -> Tensor:
    return multiply(_looked_up(handle, out), x, tensors, bias)


def _on_cpu(x: Tensor, tensors: list[Tensor], bias: Tensor | None, handle: int, out: int) -> Tensor:
    one = _looked_up(handle, out)
    return decode(x, dict(zip(one.names, tensors, strict=True)), bias, one.layout, one.scheme, out)


def _fake(x: Tensor, tensors: list[Tensor], bias: Tensor | None, handle: int, out: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out))


def _looked_up(handle: int, out: int) -> Prepared:
    if handle >= len(PREPARED) or PREPARED[handle].out != out:
        raise KernelError(
            f"no weight of {out} rows was prepared as {handle}",
            "prepare the weights in the same order",
        )
    return PREPARED[handle]


LIBRARY.impl("engine_linear", _on_gpu, "CUDA")
LIBRARY.impl("engine_linear", _on_cpu, "CPU")
torch.library.register_fake("quantkit::engine_linear", _fake, lib=LIBRARY)
