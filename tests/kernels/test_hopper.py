"""The Hopper kernels on a GPU: every token count, tile, odd shape and weight; streams and early starts."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from quantkit.kernels import LAUNCHERS, proof
from quantkit.kernels.portable import multiprocessors
from quantkit.kernels.tiles import ceil
from tests.kernels.hopper_cases import ALL, CASES, FIRST, RARE
from tests.kernels.operands import weight
from tests.kernels.products import TYPES, agrees, every_count, on_gpu, product


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "label"), FIRST)
@pytest.mark.parametrize(("n", "k"), [(256, 512), (4096, 4096)])
def test_every_token_count_to_300(hopper_gpu: None, layout: str, label: str, n: int, k: int) -> None:
    every_count(layout, label, n, k, range(1, 301))


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "label"), RARE)
def test_token_counts_of_schemes_that_have_few_tiles(hopper_gpu: None, layout: str, label: str) -> None:
    """Their largest tile has 64 tokens, so more tokens take several tiles."""
    counts = (*range(1, 71), *range(127, 131), *range(255, 259))
    every_count(layout, label, *CASES[layout].units, counts, bias=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "label"), FIRST)
def test_many_tokens_in_several_launches(hopper_gpu: None, layout: str, label: str) -> None:
    every_count(layout, label, *CASES[layout].odd[1], (2049, 5000), bias=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", range(3))
@pytest.mark.parametrize(("layout", "label"), ALL)
def test_every_tile_on_odd_shapes(hopper_gpu: None, layout: str, label: str, shape: int, dtype: torch.dtype) -> None:
    n, k = CASES[layout].odd[shape]
    for tile in CASES[layout].tiles(label, n, k, dtype):
        for m in (1, tile.tokens - 1, tile.tokens + 1, 2 * tile.tokens + 3):
            agrees(layout, label, n, k, m, dtype, tile=tile, bias=m % 2 == 0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("layout", "label", "n", "k"),
    [
        *(("marlin", label, 192, k) for label, k in (("int4:channel", 16), ("int4:channel", 208), ("int4:g32", 96))),
        ("marlin", "int4:g64", 192, 64),
        *(("quick", label, 384, k) for label, k in (("int4:g32:asym", 32), ("int4:g32:asym", 160), ("int4:g64", 448))),
        ("quick", "int4:g64:asym", 384, 64),
    ],
)
def test_ends_of_k_that_fill_no_step(hopper_gpu: None, layout: str, label: str, n: int, k: int) -> None:
    every_count(layout, label, n, k, (1, 20, 150), bias=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", CASES)
def test_rounds_of_whole_tiles_with_shared_remaining_tiles(hopper_gpu: None, layout: str, dtype: torch.dtype) -> None:
    """With more tiles than blocks, each block takes one or two whole tiles, and the remaining steps are dealt out."""
    label, (sms, _) = CASES[layout].labels[0], multiprocessors(torch.device("cuda", torch.cuda.current_device()))
    for tile in CASES[layout].tiles(label, 256, 384, dtype):
        resident = sms * tile.resident
        for whole in () if tile.cluster else (resident + 5, 2 * resident + 1):
            m = ceil(whole, 256 // tile.columns) * tile.tokens - 3
            agrees(layout, label, 256, 384, m, dtype, tile=tile, bias=False)


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "label"), ALL)
def test_unit_vectors_give_back_every_weight(hopper_gpu: None, layout: str, label: str) -> None:
    n, k = CASES[layout].units
    tensors, q = on_gpu(layout, weight(label, n, k))
    for dtype in TYPES:
        for tile in CASES[layout].tiles(label, n, k, dtype):
            y = product(layout, tensors, q, torch.eye(k, dtype=dtype, device="cuda"), tile=tile)
            assert torch.equal(y.t(), q.dequantize().to(dtype)), (dtype, tile)


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "label"), ALL)
def test_the_largest_activations_do_not_overflow(hopper_gpu: None, layout: str, label: str) -> None:
    """Sums are scaled in float32: in float16 they would be infinite before the scale brings them back."""
    n, k = 256, 1024
    q = weight(label, n, k)
    q.scales.fill_(0.001)
    tensors, q = on_gpu(layout, q)
    w = q.dequantize()
    for dtype in TYPES:
        for tile in CASES[layout].tiles(label, n, k, dtype):
            x = torch.full((tile.tokens, k), 65504.0, device="cuda").to(dtype)
            x[:, ::2] *= -1
            reference = proof.reference(x, w)
            assert reference.abs().max() < 60000
            y = product(layout, tensors, q, x, tile=tile)
            assert proof.mismatch(y, reference.to(dtype)) is None, (dtype, tile)


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "label"), ALL)
def test_scales_up_to_float16s_end_give_back_every_weight(hopper_gpu: None, layout: str, label: str) -> None:
    """Some tiles multiply the scale into the weight, which must fit float16: 8 x 8188, with zero points 15 x 4364."""
    n, k = CASES[layout].units
    q = weight(label, n, k)
    q.scales.fill_(8188 if q.zeros is None else 4364)
    q.scales[1::2].neg_()
    tensors, q = on_gpu(layout, q)
    for dtype in TYPES:
        x = 2.0**-10 * torch.eye(k, dtype=dtype, device="cuda")
        for tile in CASES[layout].tiles(label, n, k, dtype):
            y = product(layout, tensors, q, x, tile=tile)
            assert torch.equal(y.t(), (q.dequantize() * 2.0**-10).to(dtype)), (dtype, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", CASES)
def test_concurrent_streams_do_not_share_a_workspace(hopper_gpu: None, layout: str) -> None:
    """Blocks of two grids run at the same time, and the blocks of each grid exchange sums."""
    case, turns = CASES[layout], 20
    layers = [on_gpu(layout, weight(case.labels[0], n, k)) for n, k in ((1024, 2048), (768, 3072))]
    streams = [torch.cuda.Stream() for _ in layers]
    for tile in case.tiles(case.labels[0], 256, 2048, torch.float16):
        given = [proof.activations(q.dequantize(), tile.tokens + 1, torch.float16) for _, q in layers]
        expected = [product(layout, *layer, x, tile=tile) for layer, x in zip(layers, given, strict=True)]
        found = [torch.full((turns, *y.shape), float("nan"), dtype=y.dtype, device="cuda") for y in expected]
        torch.cuda.synchronize()
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10_000_000)  # until all are launched
        for turn, i in itertools.product(range(turns), range(len(layers))):
            (tensors, q), y = layers[i], found[i][turn]
            with torch.cuda.stream(streams[i]):
                LAUNCHERS[layout].matmul(given[i], tensors, q.scheme, *q.shape, out=y, tile=tile)
        torch.cuda.synchronize()
        assert all(torch.equal(y, one.expand_as(y)) for y, one in zip(found, expected, strict=True)), tile


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 20, 130, 300])
@pytest.mark.parametrize("layout", CASES)
def test_a_launch_that_begins_early_reads_what_the_one_before_wrote(hopper_gpu: None, layout: str, m: int) -> None:
    """The activations of each product are the output of the one before; none may be read or overwritten too soon."""
    n = 2048
    layers = [on_gpu(layout, weight(CASES[layout].labels[0], n, n, seed=i)) for i in range(3)]
    x = torch.randn(m, n, device="cuda", generator=torch.Generator("cuda").manual_seed(m)).half()

    def chain(wait: bool) -> list[Tensor]:
        found, y = [], x
        for i in range(24):
            tensors, q = layers[i % 3]
            y = LAUNCHERS[layout].matmul(y, tensors, q.scheme, n, n)
            if wait:
                torch.cuda.synchronize()
            y = y / y.abs().max() if i % 2 else y  # now and then another program's kernel in between
            found.append(y)
        return found

    slow = chain(wait=True)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(chain(wait=False), slow, strict=True))


@pytest.mark.gpu
def test_a_weight_that_was_just_written_is_not_read_early(hopper_gpu: None) -> None:
    tensors, q = on_gpu("marlin", weight("int4:g128", 8192, 8192))
    other = on_gpu("marlin", weight("int4:g128", 8192, 8192, seed=1))[0]
    x = proof.activations(q.dequantize(), 8, torch.float16)
    expected = [LAUNCHERS["marlin"].matmul(x, t, q.scheme, 8192, 8192) for t in (tensors, other)]
    own = {name: tensor.clone() for name, tensor in tensors.items()}
    for i in range(20):
        for name in own:
            own[name].copy_((tensors, other)[i % 2][name])
        assert torch.equal(LAUNCHERS["marlin"].matmul(x, own, q.scheme, 8192, 8192), expected[i % 2])
