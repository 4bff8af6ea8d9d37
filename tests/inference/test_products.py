"""The operator of products: values, torch.compile, handles, and operands that kernels would read wrongly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.core.formats import INT4
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import KernelError
from quantkit.inference.products import PRODUCTS, KernelWeight, multiply, prepare
from quantkit.kernels import LAUNCHERS, proof
from quantkit.kernels.hopper import HopperKernel
from quantkit.layouts import LAYOUTS
from quantkit.layouts.recast import recast
from tests.inference.samples import KERNELS, gauss, values
from tests.kernels.fake_driver import FakeDriver
from tests.kernels.operands import weight

OPERATOR = torch.ops.quantkit.multiply
Packed = dict[str, Tensor]
Calls = tuple[list[Callable[[], Tensor]], list[Tensor]]


def ready(
    layout: str, label: str, n: int = 128, k: int = 256, dtype: torch.dtype = torch.float16, out: int = 0
) -> tuple[int, Packed, QuantizedTensor]:
    """Prepare a weight; returns the handle, its tensors and its record."""
    q = values(label, n, k)
    tensors = LAYOUTS[layout].pack(q)
    return prepare(KernelWeight(layout, q.scheme, (n, k), tensors), out or n, dtype), tensors, q


@pytest.mark.parametrize("shape", [(3, 256), (2, 3, 256), (256,)])
def test_the_operator_passes_the_checks_of_torch(shape: tuple[int, ...]) -> None:
    """Among them: the fake has the shape and strides of the product, and no output is a view of an input."""
    handle, tensors, _ = ready("marlin", "int4:g128", out=100)
    args = (gauss(*shape).half(), [*tensors.values()], [gauss(100).half()], handle, 100)
    torch.library.opcheck(OPERATOR.default, args)


def test_weights_of_one_kind_share_a_handle_and_others_do_not() -> None:
    first = ready("marlin", "int4:g128")[0]
    assert ready("marlin", "int4:g128")[0] == first
    others = [
        ready("marlin", "int4:channel")[0],
        ready("quick", "int4:g128")[0],
        ready("marlin", "int4:g128", n=256)[0],
        ready("marlin", "int4:g128", out=127)[0],
    ]
    assert len({first, *others}) == 5


def test_a_handle_of_another_order_is_refused() -> None:
    """An engine that caches compiled code might bring a handle from an earlier start."""
    handle, tensors, _ = ready("marlin", "int4:g128")
    for wrong, out in ((handle, 64), (len(PRODUCTS), 128)):
        with pytest.raises(KernelError, match=f"no weight of {out} rows was prepared as {wrong}"):
            OPERATOR(gauss(1, 256).half(), [*tensors.values()], [], wrong, out)


def test_what_kernels_would_read_wrongly_is_refused_before_a_token() -> None:
    _, tensors, _ = ready("marlin", "int4:g128")
    given: dict[str, Any] = dict(layout="marlin", label="int4:g128", shape=(128, 256), out=128, dtype=torch.float16)
    for says, change in {
        "no kernel of quantkit's own multiplies gptq": {"layout": "gptq"},
        "symmetric int4 in groups": {"label": "int4:g128:asym"},
        "float16 and bfloat16, not float32": {"dtype": torch.float32},
        "n to be a multiple of 64": {"shape": (96, 256)},
        "takes B, s for 128 rows, not B for 128": {"tensors": {"B": tensors["B"]}},
        "takes B, s for 128 rows, not B, s for 129": {"out": 129},
        "must have shape": {"tensors": tensors | {"B": tensors["B"][:8].contiguous()}},
        "must be float16": {"tensors": tensors | {"s": tensors["s"].float()}},
        "must be contiguous": {"tensors": tensors | {"B": tensors["B"].t().contiguous().t()}},
    }.items():
        use = {"tensors": tensors, **given, **change}
        packed = KernelWeight(use["layout"], Scheme.parse(use["label"]), use["shape"], use["tensors"])
        with pytest.raises(KernelError, match=says) as caught:
            prepare(packed, use["out"], use["dtype"])
        assert "\n" not in str(caught.value)


def test_kernels_get_matrices_whatever_the_activations_are(fake_gpu: FakeDriver) -> None:
    """Padded, without rows, strided, unaligned, with leading dimensions; and outputs without padding."""
    q = values("int4:g128", 100, 256)
    q = QuantizedTensor(q.scheme, q.codes.clone(), q.scales)
    q.codes[:, 200:] = INT4.zero_code
    tensors = LAYOUTS["marlin"].pack(recast(q, q.scheme, (128, 256)))
    handle = prepare(KernelWeight("marlin", q.scheme, (128, 256), tensors), 100, torch.float16)
    bias = gauss(100).half()
    wide = gauss(6, 201).half()
    for x in (gauss(200).half(), wide[:, 1:], wide[::2, :200], gauss(200, 5).half().t(), gauss(2, 3, 200).half()):
        before = len(fake_gpu.grids)
        y = multiply(x, [*tensors.values()], [bias], handle, 100)
        assert y.shape == (*x.shape[:-1], 100) and y.is_contiguous() and y.dtype == x.dtype
        assert len(fake_gpu.grids) == before + 1
    assert multiply(gauss(2, 0, 200).half(), [*tensors.values()], [bias], handle, 100).shape == (2, 0, 100)
    assert len(fake_gpu.grids) == before + 1, "nothing is launched for no tokens"


@pytest.mark.parametrize(("layout", "label"), KERNELS)
def test_kernels_get_the_tensors_in_their_own_order(layout: str, label: str, fake_gpu: FakeDriver) -> None:
    _, tensors, q = ready(layout, label)
    backwards = dict(reversed(tensors.items()))
    handle = prepare(KernelWeight(layout, q.scheme, (128, 256), backwards), 128, torch.float16)
    kernel = LAUNCHERS[layout].fastest(Scheme.parse(label), 128, 256, torch.device("cpu"))
    maps = 3 if layout in ("quick", "marlin24", "marlin24-ct") else 2
    bias, x = gauss(128).half(), gauss(3, 256).half()
    y = multiply(x, [*backwards.values()], [bias], handle, 128)
    assert isinstance(kernel, HopperKernel)
    found = [fake_gpu.argument(1 + maps + i) for i in range(3)]
    assert found == [[*tensors.values()][-1].data_ptr(), bias.data_ptr(), y.data_ptr()]


def test_a_weight_of_another_kind_is_refused_by_its_address(fake_gpu: FakeDriver) -> None:
    handle, tensors, _ = ready("marlin", "int4:g128")
    other = ready("marlin", "int4:channel")[1]
    x = gauss(3, 256).half()
    multiply(x, [*tensors.values()], [], handle, 128)
    with pytest.raises(KernelError, match="must have shape"):
        multiply(x, [*other.values()], [], handle, 128)


def test_a_gradient_is_refused() -> None:
    """It would silently be zero."""
    handle, tensors, _ = ready("marlin", "int4:g128")
    x = gauss(3, 256).requires_grad_()
    with pytest.raises(KernelError, match="packed weights have no gradient"):
        OPERATOR(x, [*tensors.values()], [], handle, 128).sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("layout", "label"), KERNELS)
def test_a_gpu_multiplies_as_float32(gpu: None, layout: str, label: str, dtype: torch.dtype) -> None:
    q = values(label, 256, 512)
    tensors = {name: tensor.cuda() for name, tensor in LAYOUTS[layout].pack(q).items()}
    handle = prepare(KernelWeight(layout, q.scheme, (256, 512), tensors), 256, dtype)
    w, bias = q.dequantize().cuda(), gauss(256).cuda().to(dtype)
    for x in (gauss(m, 512).cuda().to(dtype) for m in (1, 17, 300)):
        y = OPERATOR(x, [*tensors.values()], [bias], handle, 256)
        assert proof.mismatch(y, (proof.reference(x, w) + bias.float()).to(dtype)) is None
        assert torch.equal(OPERATOR(x[None], [*tensors.values()], [bias], handle, 256)[0], y)


@pytest.fixture(
    params=[("marlin", "int4:g128"), ("marlin24", "int4:g128:24"), ("tcfpx", "fp6:channel"), ("quick", "int4:g64:asym")]
)
def calls(gpu: None, request: pytest.FixtureRequest) -> Calls:
    """Two products of one kind that split their sums among blocks, and their results on one stream."""
    layout, label = request.param
    found = []
    for seed, m in ((1, 5), (2, 20)):
        tensors = {name: tensor.cuda() for name, tensor in LAYOUTS[layout].pack(weight(label, 768, 3072, seed)).items()}
        packed = KernelWeight(layout, Scheme.parse(label), (768, 3072), tensors)
        handle = prepare(packed, 768, torch.float16)
        x = gauss(m, 3072, seed=seed).cuda().half()
        found.append(partial(OPERATOR, x, [*tensors.values()], [], handle, 768))
    results = [call().clone() for call in found]
    torch.cuda.synchronize()
    return found, results


@pytest.mark.gpu
def test_200_repeated_runs_have_the_same_bits(calls: Calls) -> None:
    found = [[call() for call in calls[0]] for _ in range(200)]
    torch.cuda.synchronize()
    for each in found:
        assert all(torch.equal(y, wanted) for y, wanted in zip(each, calls[1], strict=True))


@pytest.mark.gpu
def test_branches_of_a_graph_on_two_streams_have_the_same_bits_in_200_replays(calls: Calls) -> None:
    """As vLLM captures shared experts; the fork is behind a kernel, so that an early start would be possible."""
    (first, second), (one, two) = calls
    main, side = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (main, side):
        with torch.cuda.stream(stream):
            first(), second()
    torch.cuda.synchronize()
    graph, found = torch.cuda.CUDAGraph(), ([one], [two])
    with torch.cuda.graph(graph, stream=main):
        found[0].append(first())
        side.wait_stream(main)
        with torch.cuda.stream(side):
            found[1].extend([second() for _ in range(20)])
        found[0].extend([first() for _ in range(20)])
        main.wait_stream(side)
        found[1].append(second())
    for _ in range(200):
        for y in (*found[0][1:], *found[1][1:]):
            y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(y, one) for y in found[0])
        assert all(torch.equal(y, two) for y in found[1])


@pytest.mark.gpu
def test_a_capture_may_be_on_another_stream_than_the_first_call(calls: Calls) -> None:
    graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
    found = []
    for graph in graphs:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            found.append([call() for call in calls[0]])
    for _ in range(20):
        for graph, each in zip(graphs, found, strict=True):
            graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(y, wanted) for y, wanted in zip(each, calls[1], strict=True))


@pytest.mark.gpu
def test_a_compiled_product_with_padding_has_the_bits_of_an_eager_one(gpu: None) -> None:
    """inductor checks that a product has the strides that the fake has promised."""
    tensors = {name: tensor.cuda() for name, tensor in LAYOUTS["marlin"].pack(values("int4:g128", 128, 256)).items()}
    packed = KernelWeight("marlin", Scheme.parse("int4:g128"), (128, 256), tensors)
    handle = prepare(packed, 100, torch.float16)

    def call(x: Tensor) -> Tensor:
        return OPERATOR(x, [*tensors.values()], [], handle, 100) + 1

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for m in (3, 5, 300):
        x = gauss(m, 256).cuda().half()
        assert torch.equal(compiled(x), call(x))
