"""The products of a mixture of experts with packed weights, as one operator: routed tokens in,
their sum out.

`torch.ops.quantkit.engine_experts` works as `engine_linear`. Weights are stacked `[experts, ...]`,
and a grouped kernel multiplies with all experts in one launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.errors import KernelError
from quantkit.inference.engine_linear import (
    LIBRARY,
    PREPARED,
    Prepared,
    as_matrix,
    decode,
    handle_of,
    load_kernel,
)
from quantkit.inference.kernel_weight import KernelWeight
from quantkit.kernels import LAUNCHERS
from quantkit.kernels.contract import check_packed
from quantkit.kernels.expert_steps import silu_multiply, sum_choices
from quantkit.kernels.grouped import GroupedKernel, route

#: Name -> function. Those of `UNGATED` get all rows of the first product, the others the gate's
#: half of them.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "relu2": lambda x: functional.relu(x).square(),
}
UNGATED = "_no_mul"


@dataclass(frozen=True)
class PreparedExperts:
    """One kind of layer of experts: the products before and after the activation, and how many
    experts there are.
    """

    first: Prepared
    second: Prepared
    experts: int
    activation: str

    @property
    def inner(self) -> int:
        """The inputs of the second product, without its padding."""
        return self.first.out if self.activation.endswith(UNGATED) else self.first.out // 2

    def activated(self, h: Tensor) -> Tensor:
        """Apply the activation to the first product `[rows, n]`: `[rows, k]`, with the padding of
        the second weight.
        """
        function, inner = FUNCTIONS[self.activation.removesuffix(UNGATED)], self.inner
        a = function(h[:, :inner])
        if not self.activation.endswith(UNGATED):
            a = a * h[:, inner : 2 * inner]
        return (
            a
            if inner == self.second.weight.k
            else functional.pad(a, (0, self.second.weight.k - inner))
        )


#: Handle -> layer of experts.
EXPERTS: list[PreparedExperts] = []


def prepare_experts(
    first: KernelWeight,
    second: KernelWeight,
    sizes: tuple[int, int],
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
    experts, device = (
        len(next(iter(first.tensors.values()))),
        next(iter(first.tensors.values())).device,
    )
    handles = [
        handle_of(
            weight.layout, weight.scheme.label, *weight.shape, out, tuple(weight.tensors), dtype
        )
        for weight, out in zip((first, second), sizes, strict=True)
    ]
    for handle, weight in zip(handles, (first, second), strict=True):
        expected, named = PREPARED[handle].weight, LAUNCHERS[weight.layout].named(weight.tensors)
        stacked = {
            name: (dtype, (experts, *shape)) for name, (dtype, shape) in expected.tensors.items()
        }
        check_packed(replace(expected, tensors=stacked), named, device)
    layer = EXPERTS[handle := _handle_of(*handles, experts, activation)]
    if device.type == "cuda":
        load_experts(layer, device)
    return handle


def load_experts(layer: PreparedExperts, device: torch.device) -> None:
    """Compile and load all kernels for a layer's products, with a note if that takes time."""
    for kernel in grouped(layer, device):
        for one in kernel.kernels:
            load_kernel(one, layer.first.dtype, device)
        kernel.load(layer.first.dtype, device)


@functools.cache
def grouped(layer: PreparedExperts, device: torch.device) -> tuple[GroupedKernel, GroupedKernel]:
    """Find the kernels of a layer's products; KernelError if there are none for these weights or
    this device.
    """
    first, second = (
        GroupedKernel.of(one.layout, one.scheme, layer.experts, one.weight.n, one.weight.k, device)
        for one in (layer.first, layer.second)
    )
    return first, second


@functools.cache
def _handle_of(first: int, second: int, experts: int, activation: str) -> int:
    EXPERTS.append(PreparedExperts(PREPARED[first], PREPARED[second], experts, activation))
    return len(EXPERTS) - 1


LIBRARY.define(
    "engine_experts(Tensor x, Tensor[] first, Tensor[] second, Tensor weights, Tensor ids, int "
    "handle, int out)"
    " -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _on_gpu(
    x: Tensor,
    first: list[Tensor],
    second: list[Tensor],
    weights: Tensor,
    ids: Tensor,
    handle: int,
    out: int,
) -> Tensor:
    return multiply_experts(_looked_up(handle, out), x, (first, second), weights, ids)


def multiply_experts(
    layer: PreparedExperts,
    x: Tensor,
    stacks: tuple[Sequence[Tensor], Sequence[Tensor]],
    weights: Tensor,
    ids: Tensor,
) -> Tensor:
    """Multiply each token of `x` `[m, k]` with its experts on a GPU, in one launch for each
    product: `[m, out]`.
    """
    if not len(x):
        return x.new_empty(0, layer.second.out)
    kernels = grouped(layer, x.device)
    (m, topk), (first, second) = ids.shape, (layer.first, layer.second)
    routing = route(ids.contiguous(), layer.experts, kernels[0].tile(m, topk))
    h = x.new_empty(m * topk, first.weight.n)
    kernels[0].launch(
        first.ordered(stacks[0]), as_matrix(x, first.weight.k), routing, h, gather=True
    )
    if layer.activation == "silu" and (first.weight.n, second.weight.k) == (
        first.out,
        first.out // 2,
    ):
        a = x.new_empty(m * topk, second.weight.k)
        silu_multiply(h, a)
    else:
        a = layer.activated(h)
    z = x.new_empty(m * topk, second.weight.n)
    kernels[1].launch(
        second.ordered(stacks[1]), a, routing, z, gather=False, weights=weights.float().contiguous()
    )
    y = x.new_empty(m, second.weight.n)
    sum_choices(z, y)
    return y[:, : second.out].contiguous()


def _on_cpu(
    x: Tensor,
    first: list[Tensor],
    second: list[Tensor],
    weights: Tensor,
    ids: Tensor,
    handle: int,
    out: int,
) -> Tensor:
    """Multiply the tokens of each expert with its decoded weights; the reference for the products
    on a GPU.
    """
    layer = _looked_up(handle, out)
    total = torch.zeros(len(x), out, dtype=torch.float32)
    for expert in range(layer.experts):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        h = _decoded(layer.first, x[token], first, expert)
        z = _decoded(layer.second, layer.activated(h), second, expert)
        total.index_add_(0, token, z.float() * weights[token, choice, None].float())
    return total.to(x.dtype)


def _decoded(one: Prepared, x: Tensor, stacked: Sequence[Tensor], expert: int) -> Tensor:
    tensors = {suffix: tensor[expert] for suffix, tensor in zip(one.names, stacked, strict=True)}
    return decode(x, tensors, None, one.layout, one.scheme, one.out)


def _fake(
    x: Tensor,
    first: list[Tensor],
    second: list[Tensor],
    weights: Tensor,
    ids: Tensor,
    handle: int,
    out: int,
) -> Tensor:
    return x.new_empty((x.shape[0], out))


def _looked_up(handle: int, out: int) -> PreparedExperts:
    if handle >= len(EXPERTS) or EXPERTS[handle].second.out != out:
        problem = f"no experts of {out} rows were prepared as {handle}"
        raise KernelError(problem, "prepare the weights in the same order")
    return EXPERTS[handle]


LIBRARY.impl("engine_experts", _on_gpu, "CUDA")
LIBRARY.impl("engine_experts", _on_cpu, "CPU")
torch.library.register_fake("quantkit::engine_experts", _fake, lib=LIBRARY)
