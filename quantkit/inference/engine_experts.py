"""The products of a mixture of experts with packed weights, as one operator: routed tokens in, their sum out.

`prepare_experts` checks the packed weights of a layer and compiles its kernels. `torch.ops.quantkit.engine_experts`
multiplies, for inference engines: torch.compile and CUDA graphs see one operator. Weights are stacked `[experts, ...]`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.errors import KernelError
from quantkit.inference.engine_linear import LIBRARY, PREPARED, Prepared, decode, launch, prepare
from quantkit.inference.kernel_weight import KernelWeight

#: Name -> function. Those of `UNGATED` get all rows of the first product, the others the gate's half of them.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "relu2": lambda x: functional.relu(x).square(),
}
UNGATED = "_no_mul"


@dataclass(frozen=True)
class PreparedExperts:
    """One kind of layer of experts: the products before and after the activation, and how many experts there are."""

    first: Prepared
    second: Prepared
    experts: int
    activation: str

    @property
    def inner(self) -> int:
        """The inputs of the second product, without its padding."""
        return self.first.out if self.activation.endswith(UNGATED) else self.first.out // 2

    def activated(self, h: Tensor) -> Tensor:
        """Apply the activation to the first product `[rows, n]`: `[rows, k]`, with the padding of the second weight."""
        function, inner = FUNCTIONS[self.activation.removesuffix(UNGATED)], self.inner
        a = function(h[:, :inner])
        if not self.activation.endswith(UNGATED):
            a = a * h[:, inner : 2 * inner]
        return a if inner == self.second.weight.k else functional.pad(a, (0, self.second.weight.k - inner))


#: Handle -> layer of experts.
EXPERTS: list[PreparedExperts] = []


def prepare_experts(
    first: KernelWeight, second: KernelWeight, sizes: tuple[int, int], activation: str, dtype: torch.dtype
) -> int:
    """Check the stacked weights of a layer, and return the handle of its products.

    `first` has the rows of gates and then those of up projections, of up projections alone for an `UNGATED` activation.
    `sizes` are the rows of both weights that are no padding, `dtype` is that of activations. On a GPU the kernels are
    compiled and loaded. KernelError for weights, an activation or a dtype that are not taken.
    """
    if activation.removesuffix(UNGATED) not in FUNCTIONS:
        raise KernelError(f"experts have the activation {activation}, quantkit has {', '.join(FUNCTIONS)}")
    (experts,) = {len(tensor) for weight in (first, second) for tensor in weight.tensors.values()}
    handles = []
    for weight, out in zip((first, second), sizes, strict=True):
        for tensor in weight.tensors.values():
            if not tensor.is_contiguous():
                raise KernelError("the tensors of experts are stacked contiguously")
        one = {suffix: tensor[-1] for suffix, tensor in weight.tensors.items()}
        handles.append(prepare(weight.layout, weight.scheme.label, *weight.shape, out, one, dtype))
    return _handle_of(*handles, experts, activation)


@functools.cache
def _handle_of(first: int, second: int, experts: int, activation: str) -> int:
    EXPERTS.append(PreparedExperts(PREPARED[first], PREPARED[second], experts, activation))
    return len(EXPERTS) - 1


LIBRARY.define(
    "engine_experts(Tensor x, Tensor[] first, Tensor[] second, Tensor weights, Tensor ids, int handle, int out)"
    " -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def multiply_one_by_one(
    x: Tensor, first: list[Tensor], second: list[Tensor], weights: Tensor, ids: Tensor, handle: int, out: int
) -> Tensor:
    """Multiply all tokens with each expert, and add what is routed to it: nothing here depends on the ids' values."""
    layer = _looked_up(handle, out)
    x, weights = x.contiguous(), weights.float()
    total = torch.zeros(len(x), out, dtype=torch.float32, device=x.device)
    for expert in range(layer.experts if len(x) else 0):
        mine = ids == expert
        h = _product(layer.first, x, first, expert)
        z = _product(layer.second, layer.activated(h), second, expert)[:, :out]
        share = (weights * mine).sum(1, keepdim=True)
        # What overflows for a token of other experts must not reach it.
        total += torch.where(mine.any(1, keepdim=True), z * share, 0.0)
    return total.to(x.dtype)


def _product(one: Prepared, x: Tensor, stacked: Sequence[Tensor], expert: int) -> Tensor:
    """Multiply rows `[m, k]` with the weight of one expert, `[m, n]` with its padding."""
    if x.shape[1] != one.weight.k:
        x = functional.pad(x, (0, one.weight.k - x.shape[1]))
    y = x.new_empty(len(x), one.weight.n)
    tensors = stacked if one.order is None else [stacked[i] for i in one.order]
    launch(one, x, [tensor[expert] for tensor in tensors], None, y)
    return y


def _on_cpu(
    x: Tensor, first: list[Tensor], second: list[Tensor], weights: Tensor, ids: Tensor, handle: int, out: int
) -> Tensor:
    """Multiply the tokens of each expert with its decoded weights; the reference for the products on a GPU."""
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
    x: Tensor, first: list[Tensor], second: list[Tensor], weights: Tensor, ids: Tensor, handle: int, out: int
) -> Tensor:
    return x.new_empty((x.shape[0], out))


def _looked_up(handle: int, out: int) -> PreparedExperts:
    if handle >= len(EXPERTS) or EXPERTS[handle].second.out != out:
        problem = f"no experts of {out} rows were prepared as {handle}"
        raise KernelError(problem, "prepare the weights in the same order")
    return EXPERTS[handle]


LIBRARY.impl("engine_experts", multiply_one_by_one, "CUDA")
LIBRARY.impl("engine_experts", _on_cpu, "CPU")
torch.library.register_fake("quantkit::engine_experts", _fake, lib=LIBRARY)
