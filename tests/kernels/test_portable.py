"""The portable kernels on a GPU: every token count, tile and odd shape, streams and graphs."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import KernelError
from quantkit.kernels import LAUNCHERS, driver, portable, proof
from quantkit.kernels.tiles import PortableTile
from tests.kernels import products
from tests.kernels.operands import packed, weight
from tests.kernels.products import TYPES, on_gpu, operand

product, agrees, every_count = (
    functools.partial(function, portable=True) for function in (products.product, products.agrees, products.every_count)
)
#: layout -> scheme -> sizes of k whose end does not fill a unit of a tile.
ENDS = {
    "marlin": {
        "int4:g128": (128, 384),
        "int4:g64": (64, 448),
        "int4:g32": (32, 96, 448),
        "int4:channel": (16, 64, 208, 448),
    },
    "marlin24": {"int4:g128:24": (128, 384), "int4:channel:24": (128, 640)},
    "tcfpx": {
        "fp6:channel": (64, 192, 448),
        "fp5:channel": (64, 192, 448),
        "fp6-e2m3:channel": (192,),
        "fp5-e2m2:channel": (192,),
    },
    "quick": {
        "int4:g128:asym": (128, 384),
        "int4:g64": (64, 448),
        "int4:g32:asym": (32, 96, 448),
        "int4:g96:asym": (96, 480),
        "int4:g256": (256, 768),
    },
}
LAYOUTS = list(ENDS)
SCHEMES = [(layout, label) for layout, labels in ENDS.items() for label in labels]
FIRST = [(layout, next(iter(labels))) for layout, labels in ENDS.items()]


def wide(layout: str, n: int) -> int:
    """Round n up to a multiple of 128 for QUICK."""
    return -(-n // 128) * 128 if layout == "quick" else n


def test_groups_whose_index_would_be_inexact_are_refused() -> None:
    """The kernel divides by multiplying, which is exact below 2^35."""
    k = 1 << 19
    with pytest.raises(KernelError, match="groups of fewer than 32768 for k = 524288, not 131072"):
        LAUNCHERS["quick"].matmul(torch.ones(1, k).half(), {}, Scheme.parse("int4:g131072"), 128, k)


def tiles(layout: str, label: str, dtype: torch.dtype = torch.float16) -> tuple[PortableTile, ...]:
    return LAUNCHERS[layout].kernels(Scheme.parse(label), 768, 768).portable.choice.tiles_for(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "label"), [*FIRST, ("marlin", "int4:channel"), ("tcfpx", "fp5:channel")])
@pytest.mark.parametrize(("n", "k"), [(320, 1152), (4096, 4096)])
def test_every_token_count_to_300(gpu: None, layout: str, label: str, n: int, k: int) -> None:
    every_count(layout, label, wide(layout, n), k, range(1, 301))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("layout", "label"), SCHEMES)
def test_every_tile_on_odd_shapes(gpu: None, layout: str, label: str, dtype: torch.dtype) -> None:
    group = Scheme.parse(label).group_size or 1
    shapes = [(64, 256), (320, 1152), (1024, 2048), (64, 16384)]
    for (n, k), tile in itertools.product(shapes, tiles(layout, label, dtype)):
        if k % group == 0:
            for m in (1, tile.m - 1, tile.m + 1, 2 * tile.m + 3):
                agrees(layout, label, wide(layout, n), k, max(1, m), dtype, tile=tile, bias=m % 2 == 0)


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "label"), SCHEMES)
def test_ends_of_k_that_fill_no_unit(gpu: None, layout: str, label: str) -> None:
    for k, dtype, m in itertools.product(ENDS[layout][label], TYPES, (1, 20, 150)):
        for tile in tiles(layout, label, dtype):
            agrees(layout, label, wide(layout, 192), k, m, dtype, tile=tile, bias=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "label"), SCHEMES)
@pytest.mark.parametrize("scale", [None, 6e-8, 4364.0, 65504.0])
def test_unit_vectors_give_back_every_weight(gpu: None, layout: str, label: str, scale: float | None) -> None:
    """Scales next to float16's limits are no exception where sums are scaled in float32; else 15 x 4364 is the most."""
    n, k = 384, 768
    q = weight(label, n, k)
    if scale is not None:
        q.scales.fill_(scale)
    tensors, q = on_gpu(layout, q)
    for dtype in TYPES:
        for tile in tiles(layout, label, dtype):
            if tile.scales_weights and scale == 65504.0:
                continue
            y = product(layout, tensors, q, torch.eye(k, dtype=dtype, device="cuda"), tile=tile)
            assert torch.equal(y.t(), q.dequantize().to(dtype)), (dtype, tile)


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "label"), SCHEMES)
@pytest.mark.parametrize(
    ("dtype", "size"), [(TYPES[0], 65504.0), (TYPES[0], 2.0**-24), (TYPES[1], 1e30), (TYPES[1], 1e-30)]
)
def test_activations_of_any_size(gpu: None, layout: str, label: str, dtype: torch.dtype, size: float) -> None:
    """The largest do not overflow, and the smallest are not lost."""
    n, k = 384, 768
    tensors, q = operand(layout, label, n, k)
    w = q.dequantize()
    x = torch.full((5, k), size, device="cuda").to(dtype)
    x[:, ::2] *= -1
    x[:, 5::7] = 0
    if dtype == torch.float16:  # products that it holds
        q = QuantizedTensor(q.scheme, q.codes, q.scales.clone().fill_(2.0**-13 if size > 1 else 1024.0), q.zeros)
        tensors, w = packed(layout, q), q.dequantize()
    y = product(layout, tensors, q, x)
    assert torch.isfinite(y).all()
    wanted = (x.double() @ w.double().t()).to(dtype)
    assert proof.relative_error(y.double() / size, wanted.double() / size) < proof.BOUND


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "label"), FIRST)
def test_tokens_beyond_one_launch_are_multiplied_too(
    gpu: None, monkeypatch: pytest.MonkeyPatch, layout: str, label: str
) -> None:
    monkeypatch.setattr(portable, "MAX_TOKENS", 70)
    agrees(layout, label, wide(layout, 320), 1152, 300, torch.float16, bias=True)


@pytest.mark.gpu
def test_launches_do_not_disturb_each_other_in_the_workspace(gpu: None) -> None:
    """Layouts, tiles and shapes take turns on one stream without synchronisation, then on two streams."""
    cases = [
        (layout, *operand(layout, label, n, 2048), m, tile)
        for layout, label in FIRST
        for n, m, tile in itertools.product((384, 1024), (5, 70), tiles(layout, label))
    ]
    inputs = [proof.activations(q.dequantize(), m, torch.float16) for _, _, q, m, _ in cases]
    calm = []
    for x, (layout, tensors, q, _, tile) in zip(inputs, cases, strict=True):
        calm.append(product(layout, tensors, q, x, tile=tile))
        torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for used in (streams[:1], streams):
        torch.cuda.synchronize()
        found = []
        for _ in range(5):
            for i, (x, (layout, tensors, q, _, tile)) in enumerate(zip(inputs, cases, strict=True)):
                with torch.cuda.stream(used[i % len(used)]):
                    found.append(product(layout, tensors, q, x, tile=tile))
        torch.cuda.synchronize()
        assert all(torch.equal(y, calm[i % len(calm)]) for i, y in enumerate(found))


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize(("layout", "label"), FIRST)
@pytest.mark.parametrize("fastest", [False, True], ids=["portable", "fastest"])
def test_a_captured_launch_can_be_replayed(gpu: None, layout: str, label: str, fastest: bool, warm: bool) -> None:
    """Also if the capture is the first use of the kernel on its stream, and another launch follows."""
    matmul = functools.partial(LAUNCHERS[layout].matmul, portable=not fastest)
    tensors, q = operand(layout, label, wide(layout, 320), 4096)
    x = proof.activations(q.dequantize(), 5, torch.float16)
    expected = matmul(x, tensors, q.scheme, *q.shape)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        if warm:
            assert torch.equal(matmul(x, tensors, q.scheme, *q.shape), expected)
    torch.cuda.synchronize()
    out, graph = torch.empty_like(expected), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        matmul(x, tensors, q.scheme, *q.shape, out=out)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        assert torch.equal(matmul(x, tensors, q.scheme, *q.shape), expected)


@pytest.mark.gpu
def test_a_capture_cannot_make_a_workspace(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured zeros of the counters would only be written in the first replay."""
    monkeypatch.setattr(driver, "WORKSPACES", {})
    monkeypatch.setattr(driver, "SHARED_BY_GRAPHS", {})
    capture = torch.cuda.graph(torch.cuda.CUDAGraph())
    device = torch.device("cuda", 0)
    with pytest.raises(KernelError, match="call it once on each stream before the capture"), capture:
        driver.workspace("any", 8, 8, device, driver.stream_state(device))
