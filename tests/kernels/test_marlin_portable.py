"""MARLIN's kernel for sm_80 and newer: its work split on paper, and on a GPU every token count, tile and odd shape."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quantkit.errors import KernelError, QuantkitError
from quantkit.kernels import loader, marlin, proof, workspace
from quantkit.kernels import marlin_portable as portable
from quantkit.kernels.marlin_portable import TILES, Tile
from quantkit.tensor import QuantizedTensor, Scheme
from tests.kernels.operands import packed, weight
from tests.kernels.test_naive import on_gpu, poisoned

TYPES = (torch.float16, torch.bfloat16)
LABELS = ("int4:g128", "int4:g64", "int4:g32", "int4:channel")
SHAPES = [(64, 16), (64, 128), (320, 448), (4096, 4096), (57344, 8192), (18432, 73728)]
#: What a block may have on sm_86 and sm_89, the least of all.
SHARED = 99 * 1024


def test_every_tile_fits_into_every_gpu() -> None:
    for tile in TILES:
        assert tile.wn * tile.wm * tile.wk == portable.THREADS // 32
        assert tile.shared <= SHARED, tile
        assert tile.blocks * (tile.shared + portable.RESERVED) <= 164 * 1024, (
            "fewer blocks on sm_80 than are counted on"
        )
    assert len(set(portable.INSTANCES)) == len(portable.INSTANCES) == len(TYPES) * len(TILES)


def test_a_tile_has_no_more_tokens_than_it_must() -> None:
    for m, (n, k), sms in itertools.product((1, 8, 9, 16, 17, 32, 33, 64, 65, 5000), SHAPES, (1, 46, 132)):
        tile = portable.choose_tile(m, n, k, sms)
        assert tile in TILES
        assert tile == TILES[-1] or tile.m >= m
        assert all(other.m < m for other in TILES if other.m < tile.m)


@pytest.mark.parametrize("tile", TILES)
def test_blocks_have_all_units_once_and_room_for_their_parts(tile: Tile) -> None:
    for m, (n, k), sms in itertools.product((1, 7, 64, 300, 1 << 14), SHAPES, (1, 46, 108, 132)):
        units = tile.units(m, n, k)
        per, blocks = portable.split(tile, m, n, k, sms * tile.blocks)
        assert per * (blocks - 1) < units <= per * blocks
        assert units + per < 2**32, "the kernel counts units in 32 bits"
        sums, counters = portable.workspace_size(sms)
        assert 2 * blocks * tile.m * tile.n <= sums and blocks <= counters


def test_parts_of_two_tiles_never_share_a_place() -> None:
    """The rule of the source: a block has place 2b for the tile it starts in, 2b + 1 for one that begins in it."""
    for depth, tiles, per in itertools.product(range(1, 8), range(1, 8), range(1, 17)):
        places, counters = [], []
        for first in range(0, depth * tiles, depth):
            start, last = first // per, (first + depth - 1) // per
            if start < last:
                counters.append(start)
                places += [2 * block + (first > block * per) for block in range(start, last + 1)]
        assert len(set(places)) == len(places) and len(set(counters)) == len(counters)


def test_what_it_does_not_take_is_one_clear_line() -> None:
    q = weight("int4:g128", 64, 128)
    tensors, x = packed("marlin", q), torch.ones(3, 128, dtype=torch.float16)
    for says, args in (
        (r"m >= 1", (x[:0], tensors, q.scheme, 64, 128)),
        (r"\[m, 128\]", (x[:, :64], tensors, q.scheme, 64, 128)),
        (r"CUDA device, not on cpu", (x, tensors, q.scheme, 64, 128)),
        (r"n to be a multiple of 64", (x, tensors, q.scheme, 32, 128)),
        (r"kernel takes .*, not int4:g256", (x, tensors, Scheme.parse("int4:g256"), 64, 128)),
        (r"kernel takes .*, not int4:g128:asym", (x, tensors, Scheme.parse("int4:g128:asym"), 64, 128)),
        (r"multiple of 16", (x, tensors, Scheme.parse("int4:channel"), 64, 120)),
    ):
        with pytest.raises(QuantkitError, match=says) as caught:
            portable.matmul(*args)
        assert "\n" not in str(caught.value)


@pytest.fixture
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, and torch sees none")
    problem = loader.toolchain()["problem"]
    if problem is not None:
        pytest.skip(f"needs CuPy: {problem}: {loader.install()}")


@functools.lru_cache(maxsize=16)
def operand(label: str, n: int, k: int) -> tuple[dict[str, Tensor], QuantizedTensor]:
    return on_gpu("marlin", weight(label, n, k))


def product(
    x: Tensor, tensors: dict[str, Tensor], q: QuantizedTensor, bias: Tensor | None = None, tile: Tile | None = None
) -> Tensor:
    out = poisoned(x.shape[0], q.shape[0], x.dtype)
    return portable.matmul(x, tensors, q.scheme, *q.shape, bias, out, tile=tile)


def agrees(label: str, n: int, k: int, m: int, dtype: torch.dtype, tile: Tile | None, bias: bool) -> None:
    """Compare with float32 in poisoned outputs, three times: nothing may be left out, and nothing may vary."""
    tensors, q = operand(label, n, k)
    w = q.dequantize()
    x = proof.activations(w, m, dtype)
    shift = torch.linspace(-3, 3, n).to(dtype).cuda() if bias else None
    reference = proof.reference(x, w) + (0 if shift is None else shift.float())
    found = [product(x, tensors, q, shift, tile) for _ in range(3)]
    assert proof.relative_error(found[0], reference.to(dtype)) < proof.BOUND, (label, n, k, m, dtype, tile)
    assert all(torch.equal(found[0], y) for y in found), (label, n, k, m, dtype, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("label", ["int4:g128", "int4:channel"])
@pytest.mark.parametrize(("n", "k"), [(320, 1152), (4096, 4096)])
def test_every_token_count_to_300(gpu: None, label: str, n: int, k: int) -> None:
    tensors, q = operand(label, n, k)
    w = q.dequantize()
    for m, dtype in itertools.product(range(1, 301), TYPES):
        x = proof.activations(w, m, dtype)
        assert proof.relative_error(product(x, tensors, q), proof.reference(x, w).to(dtype)) < proof.BOUND, (m, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_on_odd_shapes(gpu: None, tile: Tile, label: str, dtype: torch.dtype) -> None:
    for (n, k), m in itertools.product(
        [(64, 256), (320, 1152), (1024, 2048), (64, 16384)], (1, tile.m - 1, tile.m + 1, 2 * tile.m + 3)
    ):
        agrees(label, n, k, m, dtype, tile, bias=m % 2 == 0)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
def test_ends_of_k_that_fill_no_unit(gpu: None, tile: Tile) -> None:
    ends = {
        "int4:channel": (16, 64, 208, 448),
        "int4:g32": (32, 96, 448),
        "int4:g64": (64, 448),
        "int4:g128": (128, 384),
    }
    for label, dtype in itertools.product(ends, TYPES):
        for k, m in itertools.product(ends[label], (1, 20, 150)):
            agrees(label, 192, k, m, dtype, tile, bias=True)


@pytest.mark.gpu
@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("scale", [None, 6e-8, 65504.0])
def test_unit_vectors_give_back_every_weight(gpu: None, label: str, scale: float | None) -> None:
    """Sums are scaled in float32, so that scales next to float16's limits are no exception."""
    n, k = 192, 384
    q = weight(label, n, k)
    if scale is not None:
        q.scales.fill_(scale)
    tensors, q = on_gpu("marlin", q)
    for dtype, tile in itertools.product(TYPES, TILES):
        y = product(torch.eye(k, dtype=dtype, device="cuda"), tensors, q, tile=tile)
        assert torch.equal(y.t(), q.dequantize().to(dtype)), (dtype, tile)


@pytest.mark.gpu
def test_tokens_beyond_one_launch_are_multiplied_too(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "TOKENS", 70)
    agrees("int4:g128", 320, 1152, 300, torch.float16, None, bias=True)


@pytest.mark.gpu
def test_launches_one_after_the_other_do_not_meet_in_the_workspace(gpu: None) -> None:
    """On one stream without waiting, tiles and shapes in turn; then on two streams at once."""
    cases = [(*operand("int4:g128", n, 2048), m, tile) for n, m, tile in itertools.product((320, 1024), (5, 70), TILES)]
    inputs = [proof.activations(q.dequantize(), m, torch.float16) for _, q, m, _ in cases]
    calm = []
    for x, (tensors, q, _, tile) in zip(inputs, cases, strict=True):
        calm.append(product(x, tensors, q, tile=tile))
        torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for used in (streams[:1], streams):
        torch.cuda.synchronize()
        found = []
        for _ in range(10):
            for i, (x, (tensors, q, _, tile)) in enumerate(zip(inputs, cases, strict=True)):
                with torch.cuda.stream(used[i % len(used)]):
                    found.append(product(x, tensors, q, tile=tile))
        torch.cuda.synchronize()
        assert all(torch.equal(y, calm[i % len(calm)]) for i, y in enumerate(found))


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("matmul", [portable.matmul, marlin.matmul], ids=["portable", "fastest"])
def test_a_captured_launch_can_be_replayed(gpu: None, matmul: Callable[..., torch.Tensor], warm: bool) -> None:
    """Also where the capture is the first that a stream sees of the kernel, and another launch follows it there."""
    tensors, q = operand("int4:g128", 320, 4096)
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
    """Counters of zero that are captured would be zero only from the first replay on."""
    monkeypatch.setattr(workspace, "_ROOMS", {})
    capture = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(KernelError, match="call it once before the capture"), capture:
        workspace.workspace("any", torch.device("cuda", 0), 8, 8)


@pytest.mark.gpu
def test_bad_operands_are_one_error_and_the_process_goes_on(gpu: None) -> None:
    tensors, q = operand("int4:g128", 256, 256)
    x = proof.activations(q.dequantize(), 3, torch.float16)
    good = product(x, tensors, q)
    for says, bad in {
        "must be float16 or bfloat16": {"x": x.float()},
        "must be on a CUDA device": {"x": x.cpu()},
        "must be contiguous": {"x": torch.ones(256, 3, dtype=x.dtype, device="cuda").t()},
        "bias must be float16": {"bias": torch.zeros(256, device="cuda")},
        "write float16 as their activations are, not float32": {"out": poisoned(3, 256, torch.float32)},
        "out must have shape": {"out": poisoned(2, 256, torch.float16)},
        "must have shape": {"tensors": {**tensors, "s": tensors["s"][:1]}},
    }.items():
        with pytest.raises(KernelError, match=says) as caught:
            portable.matmul(**{"x": x, "tensors": tensors, "scheme": q.scheme, "n": 256, "k": 256, **bad})
        assert "\n" not in str(caught.value)
    assert torch.equal(product(x, tensors, q), good)
