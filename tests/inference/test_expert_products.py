"""The operator of experts for inference engines: values, routing to other ranks, torch.compile, and wrong operands."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from quantkit.errors import KernelError
from quantkit.inference import products
from quantkit.inference.products import (
    PRODUCTS,
    ExpertsProduct,
    KernelWeight,
    LinearProduct,
    load_experts,
    multiply,
    pack_for_kernel,
    prepare_experts,
)
from quantkit.kernels import LAUNCHERS, loader
from quantkit.layouts import LAYOUTS
from tests.inference.samples import gauss, values
from tests.kernels.fake_driver import FakeDriver
from tests.serving.samples import record

OPERATOR = torch.ops.quantkit.multiply
COUNT, HIDDEN, INNER = 5, 256, 128
KINDS = [("marlin", "int4:g128"), ("marlin24", "int4:g128:24"), ("tcfpx", "fp6:channel"), ("quick", "int4:g64:asym")]


def stacked(layout: str, label: str, n: int, k: int, seed: int) -> tuple[KernelWeight, Tensor]:
    """Pack the weights of all experts; returns them, and the decoded weights `[experts, n, k]`."""
    records = [record(label, n, k, seed + 10 * expert) for expert in range(COUNT)]
    packed = [pack_for_kernel(q, layout, is_expert=True) for q in records]
    tensors = {suffix: torch.stack([each.tensors[suffix] for each in packed]) for suffix in packed[0].tensors}
    return packed[0]._replace(tensors=tensors), torch.stack([q.dequantize() for q in records])


@functools.cache
def layer(
    layout: str, label: str, activation: str = "silu", inner: int = INNER
) -> tuple[int, list[Tensor], tuple[Tensor, Tensor]]:
    """Prepare a layer; returns the handle, its tensors, and the decoded weights of both products."""
    rows = inner if activation.endswith("_no_mul") else 2 * inner
    (first, w), (second, v) = stacked(layout, label, rows, HIDDEN, 0), stacked(layout, label, HIDDEN, inner, 5)
    handle = prepare_experts(first, second, (rows, HIDDEN), activation, torch.float16)
    return handle, [*first.tensors.values(), *second.tensors.values()], (w, v)


def routed(m: int, topk: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(COUNT, generator=draws)[:topk] for _ in range(m)]) if m else torch.empty(0, topk)
    return gauss(m, HIDDEN, seed=seed), torch.rand(m, topk, generator=draws), ids.int()


def reference(x: Tensor, weights: Tensor, ids: Tensor, both: tuple[Tensor, Tensor], activation: str = "silu") -> Tensor:
    """Add the outputs of each token's experts one by one, in float32."""
    functions = {"silu": silu, "gelu": gelu, "gelu_tanh": functools.partial(gelu, approximate="tanh")}
    out = torch.zeros(len(x), both[1].shape[1])
    for token, choice in ((t, c) for t in range(len(x)) for c in range(ids.shape[1])):
        expert = int(ids[token, choice])
        if expert < 0:
            continue
        h = linear(x[token], both[0][expert])
        if activation == "relu2_no_mul":
            a = h.relu() ** 2
        else:
            gate, up = h.chunk(2)
            a = functions[activation](gate) * up
        out[token] += weights[token, choice] * linear(a, both[1][expert])
    return out


def close(found: Tensor, wanted: Tensor, eps: float = 1e-5) -> bool:
    return float((found - wanted).norm()) <= eps * float(wanted.norm())


@pytest.mark.parametrize(("layout", "label"), KINDS)
def test_a_cpu_adds_the_outputs_of_each_tokens_experts(layout: str, label: str) -> None:
    handle, stacks, both = layer(layout, label)
    for m, topk in ((0, 2), (1, 1), (9, 2), (7, COUNT)):
        x, weights, ids = routed(m, topk)
        ids[5:7, 0] = -1  # an expert of another rank
        for wide in (ids, ids.long()):
            assert close(OPERATOR(x, stacks, [weights, wide], handle, HIDDEN), reference(x, weights, ids, both))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu2_no_mul"])
def test_each_activation_is_its_own(activation: str) -> None:
    handle, stacks, both = layer("tcfpx", "fp6:channel", activation)
    x, weights, ids = routed(6)
    found = OPERATOR(x, stacks, [weights, ids], handle, HIDDEN)
    assert close(found, reference(x, weights, ids, both, activation))


class RowByRow:
    """A grouped kernel: the product of each row with the weight of its expert, zeros for rows without one."""

    def __init__(self, one: LinearProduct) -> None:
        assert one.weight is not None
        self.one, self.weight = one, one.weight

    def tile(self, m: int, topk: int) -> int:
        return 16

    def launch(
        self, tensors: Sequence[Tensor], x: Tensor, routing: Any, y: Tensor, *, gather: bool, weights: Any = None
    ) -> None:
        rows, topk = routing.ids.numel(), routing.ids.shape[1]
        assert x.shape == (len(routing.ids) if gather else rows, self.weight.k) and x.is_contiguous()
        assert y.shape == (rows, self.weight.n) and (routing.experts, routing.tile) == (COUNT, 16)
        for row, expert in enumerate(routing.ids.flatten().tolist()):
            own = [tensor[expert] for tensor in tensors]
            y[row].zero_()
            if expert >= 0:
                names = dict(zip(self.weight.tensors, own, strict=True))
                packed = [names[LAUNCHERS[self.one.layout].aliases.get(name, name)] for name in self.one.names]
                whole = replace(self.one, out=self.weight.n)
                y[row] = whole.decode(x[row // topk if gather else row][None], packed)[0]
            if weights is not None:
                y[row] *= weights.flatten()[row]


@pytest.mark.parametrize(
    ("layout", "label", "activation", "inner"),
    [
        ("marlin", "int4:g128", "silu", INNER),
        ("marlin", "int4:channel", "silu", 96),
        ("tcfpx", "fp6:channel", "gelu", INNER),
        ("tcfpx", "fp6:channel", "relu2_no_mul", INNER),
    ],
)
def test_grouped_kernels_get_padded_rows_and_weights_once(
    layout: str, label: str, activation: str, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    def silu_multiply(h: Tensor, a: Tensor) -> None:
        steps.append("silu")
        a.copy_(silu(h.chunk(2, 1)[0]) * h.chunk(2, 1)[1])

    monkeypatch.setattr(products, "silu_multiply", silu_multiply)
    monkeypatch.setattr(products, "sum_choices", lambda z, y: y.copy_(z.view(len(y), -1, y.shape[1]).sum(1)))
    monkeypatch.setattr(
        products, "route", lambda ids, experts, tile: SimpleNamespace(ids=ids, experts=experts, tile=tile)
    )
    handle, stacks, both = layer(layout, label, activation, inner)
    monkeypatch.setattr(products, "grouped", lambda one, device: (RowByRow(one.first), RowByRow(one.second)))
    x, weights, ids = routed(9)
    ids[2, 0], ids[3] = -1, -1
    found = multiply(x, stacks, [weights, ids], handle, HIDDEN)
    assert found.shape == (9, HIDDEN) and found.is_contiguous()
    assert close(found, reference(x, weights, ids, both, activation))
    assert multiply(x[:0], stacks, [weights[:0], ids[:0]], handle, HIDDEN).shape == (0, HIDDEN)
    assert steps == ["silu"] * (activation == "silu" and inner == INNER)


@pytest.mark.parametrize("m", [0, 3])
def test_the_operator_of_experts_passes_the_checks_of_torch(m: int) -> None:
    handle, stacks, _ = layer("marlin", "int4:g128")
    x, weights, ids = routed(m)
    torch.library.opcheck(OPERATOR.default, (x.half(), stacks, [weights, ids], handle, HIDDEN))


def test_layers_of_one_kind_share_a_handle_and_others_do_not() -> None:
    first = layer("marlin", "int4:g128")[0]
    layer.cache_clear()
    assert layer("marlin", "int4:g128")[0] == first
    others = [layer("tcfpx", "fp6:channel")[0], layer("marlin", "int4:g128", "gelu")[0]]
    assert len({first, *others}) == 3
    for wrong, out in ((first, 64), (len(PRODUCTS), HIDDEN)):
        x, weights, ids = routed(1)
        with pytest.raises(KernelError, match=f"no weight of {out} rows was prepared as {wrong}"):
            OPERATOR(x, layer("marlin", "int4:g128")[1], [weights, ids], wrong, out)


def test_experts_that_kernels_would_read_wrongly_are_refused_in_one_line() -> None:
    first, _ = stacked("marlin", "int4:g128", 256, HIDDEN, 0)
    second, _ = stacked("marlin", "int4:g128", HIDDEN, INNER, 0)
    across = {suffix: tensor.transpose(0, 1).contiguous().transpose(0, 1) for suffix, tensor in second.tensors.items()}
    for says, given in {
        "the activation swigluoai, quantkit has silu": (second, "swigluoai", torch.float16),
        "must be contiguous": (second._replace(tensors=across), "silu", torch.float16),
        "float16 and bfloat16, not float32": (second, "silu", torch.float32),
        "must have shape": (second._replace(shape=(HIDDEN, 256)), "silu", torch.float16),
    }.items():
        with pytest.raises(KernelError, match=says) as caught:
            prepare_experts(first, given[0], (256, HIDDEN), *given[1:])
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["marlin_portable", "routing", "expert_steps"])
def test_a_kernel_of_experts_that_does_not_compile_ends_the_start_in_one_line(
    source: str, fake_gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first token; the slow way is no answer to it."""

    def loaded(name: str, instances: Sequence[str], index: int) -> Any:
        if name == source:
            raise KernelError(f"{name}.cu does not compile for sm_90a with NVRTC 13.0: error: expected a ;")
        return real(name, instances, index)

    real = loader.loaded
    monkeypatch.setattr(loader, "loaded", loaded)
    monkeypatch.setattr("quantkit.kernels.grouped.unusable", lambda device: None)
    one = PRODUCTS[layer("marlin", "int4:g128")[0], HIDDEN]
    assert isinstance(one, ExpertsProduct)
    products.grouped.cache_clear()
    with pytest.raises(KernelError, match=f"^{source}.cu does not compile") as caught:
        load_experts(one, torch.float16, torch.device("cpu"))
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(loader, "loaded", real)
    load_experts(one, torch.float16, torch.device("cpu"))
    products.grouped.cache_clear()


def test_all_experts_are_packed_in_one_layout_whatever_their_data() -> None:
    """A weight that happens to be symmetric, or sparse, would have a layout of its own."""
    q = values("int4:g128:asym", 128, 256)
    q.zeros.fill_(8)  # type: ignore[union-attr]
    q.codes.clamp_(1, 15)
    assert (pack_for_kernel(q, "awq").layout, pack_for_kernel(q, "awq", is_expert=True).layout) == ("marlin", "quick")
    sparse = LAYOUTS["marlin24"].unpack(LAYOUTS["marlin24"].pack(values("int4:g128:24")), values("int4:g128:24").scheme)
    dense = type(q)(values("int4:g128").scheme, sparse.codes, sparse.scales)
    assert pack_for_kernel(dense, "gptq").layout == "marlin24"
    assert pack_for_kernel(dense, "gptq", is_expert=True).layout == "marlin"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("layout", "label"), KINDS)
def test_a_gpu_computes_experts_as_float32_in_a_graph_with_other_ids(
    gpu: None, layout: str, label: str, dtype: torch.dtype
) -> None:
    (first, w), (second, v) = (stacked(layout, label, n, k, 0) for n, k in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
    first, second = (
        each._replace(tensors={suffix: tensor.cuda() for suffix, tensor in each.tensors.items()})
        for each in (first, second)
    )
    handle = prepare_experts(first, second, (2 * INNER, HIDDEN), "silu", dtype)
    for m in (1, 17, 300):
        x, weights, ids = (each.cuda() for each in routed(m))
        x, own = x.to(dtype) / 16, ids.clone()
        weights, tensors = weights.float(), [*first.tensors.values(), *second.tensors.values()]

        def call(x: Tensor = x, weights: Tensor = weights, own: Tensor = own, tensors: Any = tensors) -> Tensor:
            return OPERATOR(x, tensors, [weights, own], handle, HIDDEN)

        eager = call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call()
        for step in (3, 4, 5, 1):  # in the last turn no row has an expert
            _, others, numbers = routed(m, seed=step)
            weights.copy_(others)
            own.copy_(numbers)
            own[step // 2 :: step] = -1
            y.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            wanted = reference(x.float().cpu(), weights.cpu(), own.cpu(), (w, v))
            assert close(y.float().cpu(), wanted, 4e-3 if dtype is torch.float16 else 3e-2), (m, step)
            assert torch.equal(call(), y)
        assert eager.shape == y.shape
