"""Weights decoded to 16-bit rows, for products of many tokens by cuBLAS: every bit, strips, and when they are used."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.kernels import LAUNCHERS, proof, workspace
from quantkit.kernels import decoded as decoded_module
from quantkit.kernels.contract import Weight
from quantkit.kernels.decoded import NEVER, DecodedKernel, strips, tokens_from
from quantkit.kernels.hopper import MAX_TOKENS, token_parts
from tests.inference.samples import same
from tests.kernels.fake_driver import FakeDriver
from tests.kernels.hopper_cases import CASES as CASES_ON_HOPPER
from tests.kernels.hopper_cases import FIRST
from tests.kernels.on_cpu import library
from tests.kernels.operands import CASES, TAKEN, packed, weight
from tests.kernels.products import TYPES, agrees, on_gpu
from tests.layouts.samples import record

#: Decodes blocks `first` to `first + blocks` of 64 rows, as the threads of kernels/decode.cu do, in reverse order.
WRITERS = """
#include "decoded.cuh"
template <class X, class Rows> void write(const Rows &weight, void *y, u32 first, u32 blocks) {
    for (u32 at = blocks; at-- > 0;)
        for (u32 a = 0; a < 8; a++)
            for (u32 k = 0; k < weight.K; k += 8) write_rows(weight, (X *)y, first, at, a, k);
}
#define WRITER(name, weight) \\
    extern "C" void name(void **t, void *y, u32 first, u32 blocks, u32 n, u32 k, u32 g, int is_half) { \\
        if (is_half) write<half>(weight, y, first, blocks); \\
        else write<bfloat>(weight, y, first, blocks); \\
    }
#define WORDS(i) ((const u32 *)t[i])
#define HALVES(i) ((const half *)t[i])
WRITER(marlin, (MarlinRows{WORDS(0), HALVES(1), n, k, g}))
WRITER(marlin24, (Marlin24Rows{WORDS(0), (const u16 *)t[1], HALVES(2), n, k, g}))
WRITER(quick, (QuickRows{WORDS(0), WORDS(1), HALVES(2), n, k, g}))
WRITER(tcfpx_fp6, (TcfpxRows<3, 2>{WORDS(0), HALVES(1), n, k}))
WRITER(tcfpx_fp5, (TcfpxRows<3, 1>{WORDS(0), HALVES(1), n, k}))
WRITER(tcfpx_fp6_e2m3, (TcfpxRows<2, 3>{WORDS(0), HALVES(1), n, k}))
WRITER(tcfpx_fp5_e2m2, (TcfpxRows<2, 2>{WORDS(0), HALVES(1), n, k}))
"""


@pytest.fixture(scope="module")
def writers() -> ctypes.CDLL:
    return library(WRITERS)


def decoded(
    writers: ctypes.CDLL, layout: str, q: QuantizedTensor, dtype: torch.dtype, first: int = 0, blocks: int = 0
) -> Tensor:
    """Decode some blocks of 64 rows by the device's code on the CPU; NaN surrounds and fills what it must write."""
    (n, k), name = q.shape, layout.removesuffix("-ct")
    if name == "tcfpx":
        name += "_" + q.scheme.format.name.replace("-", "_")
    tensors = [*packed(layout, q).values()]
    blocks = blocks or n // 64
    y = torch.full((64 * blocks + 2, k), float("nan"), dtype=dtype)
    parts = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    target = ctypes.c_void_p(y[1].data_ptr())
    getattr(writers, name)(parts, target, first, blocks, n, k, q.scheme.group_size or k, dtype == torch.float16)
    assert y[0].isnan().all() and y[-1].isnan().all(), "written outside of its rows"
    return y[1:-1]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("layout", "label", "n", "k"), CASES)
def test_every_bit_is_that_of_the_dequantized_weight(
    writers: ctypes.CDLL, layout: str, label: str, n: int, k: int, dtype: torch.dtype
) -> None:
    """Scales of any size and sign: products that overflow, vanish, or are zeros with a sign."""
    q = record(Scheme.parse(label), n, k, seed=n + k)
    assert same(decoded(writers, layout, q, dtype), q.dequantize(dtype))


@pytest.mark.parametrize("scale", [2.0**-24, 1.0, -65504.0])
@pytest.mark.parametrize("label", TAKEN["tcfpx"][0])
def test_every_code_in_every_position(writers: ctypes.CDLL, label: str, scale: float) -> None:
    scheme, n, k = Scheme.parse(label), 128, 64
    codes = (torch.arange(n)[:, None] * 5 + torch.arange(k) * 3 + torch.arange(k) // 16).remainder(
        2**scheme.format.bits
    )
    q = QuantizedTensor(scheme, codes.to(torch.uint8), torch.full((n, 1), scale, dtype=torch.float16))
    for dtype in TYPES:
        assert same(decoded(writers, "tcfpx", q, dtype), q.dequantize(dtype))


@pytest.mark.parametrize(("layout", "label"), [(layout, labels[0]) for layout, (labels, _) in TAKEN.items()])
def test_a_strip_has_the_rows_of_the_whole(writers: ctypes.CDLL, layout: str, label: str) -> None:
    q = record(Scheme.parse(label), 384, 384)
    whole = q.dequantize(torch.float16)
    for first, blocks in ((0, 1), (1, 2), (3, 3), (5, 1)):
        strip = decoded(writers, layout, q, torch.float16, first, blocks)
        assert same(strip, whole[64 * first : 64 * (first + blocks)])


Strips = list[tuple[int, int]]


@pytest.fixture
def on_cpu(fake_gpu: FakeDriver, writers: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Strips]:
    """Decode by the CPU into a small buffer, which is full of NaN; lists the first row and the rows of each strip."""
    found: Strips = []

    def allocated(device: torch.device, sums: int, counters: int) -> tuple[Tensor, Tensor]:
        return torch.full((sums,), float("nan")), torch.zeros(counters, dtype=torch.int32)

    def decode(kernel: DecodedKernel, weight: Weight, packed: Sequence[Tensor], start: int, rows: Tensor) -> None:
        found.append((start, len(rows)))
        parts = (ctypes.c_void_p * len(packed))(*(tensor.data_ptr() for tensor in packed))
        name = kernel.name.removesuffix("_decode") + ("_fp6" if kernel.variant else "")
        half = rows.dtype == torch.float16
        sizes = (start // 64, len(rows) // 64, weight.n, weight.k, weight.group or weight.k, half)
        getattr(writers, name)(parts, ctypes.c_void_p(rows.data_ptr()), *sizes)

    monkeypatch.setattr(workspace, "allocate", allocated)
    monkeypatch.setattr(decoded_module, "BUFFER", 192 * 384 * 2)
    monkeypatch.setattr(DecodedKernel, "decode", decode)
    decoded_module.strips.cache_clear()
    yield found
    decoded_module.strips.cache_clear()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("layout", "label"),
    [("marlin", "int4:g128"), ("marlin24", "int4:g128:24"), ("quick", "int4:g128:asym"), ("tcfpx", "fp6:channel")],
)
def test_strips_together_are_the_product(layout: str, label: str, biased: bool, on_cpu: Strips) -> None:
    """Every row is in one strip, in its place, with its own bias."""
    q = weight(label, 640, 384)
    x = proof.activations(q.dequantize(), 40, torch.float16)
    bias = torch.linspace(-3, 3, 640).half() if biased else None
    launcher, y = LAUNCHERS[layout], torch.full((40, 640), float("nan"), dtype=torch.float16)
    kernel, described = launcher.kernels(q.scheme, 640, 384).decoded, launcher.weight(q.scheme, 640, 384)
    kernel.launch(described, x, [*packed(layout, q).values()], bias, y)
    assert on_cpu == [(0, 192), (192, 192), (384, 192), (576, 64)]
    expected = proof.reference(x, q.dequantize()) + (0 if bias is None else bias.float())
    assert proof.mismatch(y, expected.half()) is None


@pytest.mark.parametrize("n", [64, 192, 6144, 10240, 28672, 57344])
@pytest.mark.parametrize("k", [16, 64, 4096, 28672, 500_000])
def test_strips_are_disjoint_and_fit_the_buffer(n: int, k: int) -> None:
    found = strips(n, k)
    assert [start for start, _ in found] == [0, *(end for _, end in found[:-1])] and found[-1][1] == n
    assert all(start % 64 == 0 and 2 * k * (end - start) <= decoded_module.BUFFER for start, end in found)
    assert len(found) <= -(-n // (decoded_module.BUFFER // (2 * k * 64) * 64)) + 1


@pytest.mark.parametrize("m", [2049, 4096, 4097, 65_536, 100_001])
def test_many_tokens_are_divided_into_launches_of_nearly_equal_size(m: int, fake_gpu: FakeDriver) -> None:
    found = token_parts(m)
    sizes = [end - start for start, end in found]
    assert [start for start, _ in found] == [0, *(end for _, end in found[:-1])] and found[-1][1] == m
    assert max(sizes) <= MAX_TOKENS and len(found) <= -(-m // MAX_TOKENS)
    assert min(sizes) > max(sizes) // 4, "a small rest would cost as much as a part"
    assert all(size % 256 == 0 for size in sizes[:-1])
    q = weight("int4:g128", 64, 128)
    kernel = LAUNCHERS["marlin"].fastest(q.scheme, 64, 128, torch.device("cpu"))
    described, out = LAUNCHERS["marlin"].weight(q.scheme, 64, 128), torch.empty(m, 64).half()
    kernel.launch(described, torch.zeros(m, 128).half(), [*packed("marlin", q).values()], None, out)
    assert len(fake_gpu.grids) == len(found)


def limit(share: float | None, n: int = 4096, k: int = 4096, hopper: bool = True) -> int:
    return tokens_from(LAUNCHERS["marlin"].weight(Scheme.parse("int4:g128"), n, k), torch.float16, hopper, share)


def test_a_weight_is_decoded_from_the_tokens_on_that_pay_for_it() -> None:
    """Twice the loss against cuBLAS pays twice as soon; a kernel that is ahead of cuBLAS never decodes."""
    assert limit(1.0) == limit(1.2) == NEVER
    assert 1.9 < limit(1 / 1.05) / limit(1 / 1.1) < 2.1
    assert 100 < limit(None) < 300, "the portable kernel on Hopper"
    assert 200 < limit(None, hopper=False) < 1000
    assert limit(0.9, 128, 128) > 100 * limit(0.9), "a launch costs more than a small product"
    weight_ = LAUNCHERS["marlin"].weight(Scheme.parse("int4:g128"), 4096, 4096)
    assert tokens_from(weight_, torch.bfloat16, True, 0.5) == NEVER, "its rounded weights leave the bound"


def test_the_choice_follows_the_tokens_unless_it_is_asked_for(fake_gpu: FakeDriver) -> None:
    launcher, scheme, place = LAUNCHERS["tcfpx"], Scheme.parse("fp6:channel"), torch.device("cpu")
    few = launcher.decoded_from(scheme, 4096, 4096, torch.float16, place) - 1
    chosen = functools.partial(launcher.chosen, scheme, 4096, 4096, dtype=torch.float16, device=place)
    assert [chosen(m=m).path for m in (few, few + 1)] == ["hopper", "cublas"]
    assert chosen(m=1, decoded=True).path == "cublas" and chosen(m=few + 1, decoded=False).path == "hopper"
    assert chosen(m=few + 1, portable=True).path == "portable"


def test_weights_rounded_to_bfloat16_leave_the_bound_and_to_float16_do_not() -> None:
    """Why only float16 activations are multiplied with decoded weights."""
    w = weight("int4:g128", 256, 2048).dequantize()
    for dtype, within in ((torch.float16, True), (torch.bfloat16, False)):
        x = proof.activations(w, 64, dtype)
        y = (x.float() @ w.to(dtype).float().t()).to(dtype)
        assert (proof.mismatch(y, proof.reference(x, w).to(dtype)) is None) == within


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "label", "n", "k"), CASES)
def test_decoded_rows_on_a_gpu_have_every_bit(gpu: None, layout: str, label: str, n: int, k: int) -> None:
    q = record(Scheme.parse(label), n, k, seed=n + k)
    tensors, q = on_gpu(layout, q)
    launcher = LAUNCHERS[layout]
    kernel, described = launcher.kernels(q.scheme, n, k).decoded, launcher.weight(q.scheme, n, k)
    named = launcher.named(tensors)
    for dtype, (first, rows) in itertools.product(TYPES, [(0, n), (n - 64, 64)]):
        y = torch.full((rows, k), float("nan"), dtype=dtype, device="cuda")
        kernel.decode(described, [named[name] for name in described.tensors], first, y)
        assert same(y.cpu(), q.dequantize(dtype)[first : first + rows].cpu())


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "label"), [(layout, labels[0]) for layout, (labels, _) in TAKEN.items()])
@pytest.mark.parametrize("m", [1, 300, 5000])
def test_products_with_decoded_weights_are_within_the_bound(gpu: None, layout: str, label: str, m: int) -> None:
    """Several strips of rows that no tile divides; every run has the same bits."""
    n, k = 640, 1152
    for strip in (64 << 20, 256 * k * 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoded_module, "BUFFER", strip)
            decoded_module.strips.cache_clear()
            agrees(layout, label, n, k, m, torch.float16, bias=m != 300, decoded=True)
    decoded_module.strips.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "label"), FIRST)
@pytest.mark.parametrize("m", [2049, 5000])
def test_many_tokens_in_several_launches(hopper_gpu: None, layout: str, label: str, m: int) -> None:
    n, k = CASES_ON_HOPPER[layout].odd[1]
    for dtype in TYPES:
        agrees(layout, label, n, k, m, dtype, bias=True, decoded=False)


@pytest.mark.gpu
def test_streams_and_graphs_do_not_share_decoded_rows(gpu: None) -> None:
    """Two weights on two streams and in two branches of a graph, behind early launches, 50 times."""
    calls, wanted = [], []
    for seed, label in ((1, "fp6:channel"), (2, "fp5:channel")):
        tensors, q = on_gpu("tcfpx", weight(label, 2048, 4096, seed))
        x = proof.activations(q.dequantize(), 700, torch.float16)
        multiply = functools.partial(LAUNCHERS["tcfpx"].matmul, x, tensors, q.scheme, *q.shape)
        calls.append(lambda multiply=multiply: (multiply(decoded=True), multiply(decoded=False)))
        wanted.append([y.clone() for y in calls[-1]()])
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for stream, call, ys in zip(streams, calls, found, strict=True):
            with torch.cuda.stream(stream):
                ys.extend(call())
    torch.cuda.synchronize()
    graph, captured = torch.cuda.CUDAGraph(), [[], []]
    with torch.cuda.graph(graph, stream=streams[0]):
        streams[1].wait_stream(streams[0])
        for _ in range(5):
            for stream, call, ys in zip(streams, calls, captured, strict=True):
                with torch.cuda.stream(stream):
                    ys.extend(call())
        streams[0].wait_stream(streams[1])
    for _ in range(10):
        for ys in captured:
            for y in ys:
                y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for ys, right in zip(captured, wanted, strict=True):
            assert all(torch.equal(y, right[i % 2]) for i, y in enumerate(ys))
    for ys, right in zip(found, wanted, strict=True):
        assert all(torch.equal(y, right[i % 2]) for i, y in enumerate(ys))


@pytest.mark.gpu
def test_a_write_to_the_weight_is_seen_by_the_next_product(gpu: None) -> None:
    """Decoding reads the weight after all earlier work, also behind kernels that begin early."""
    tensors, q = on_gpu("tcfpx", weight("fp6:channel", 2048, 4096))
    x = proof.activations(q.dequantize(), 700, torch.float16)
    multiply = functools.partial(LAUNCHERS["tcfpx"].matmul, x, tensors, q.scheme, *q.shape)
    for _ in range(20):
        tensors["scales"].mul_(-1)
        assert proof.mismatch(multiply(decoded=True), multiply(decoded=False)) is None
