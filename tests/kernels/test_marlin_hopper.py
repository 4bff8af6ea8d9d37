"""MARLIN's kernel for Hopper: the choice of its tiles, short ends of k, bad operands, and early reads of weights."""

from __future__ import annotations

import itertools

import pytest
import torch

from quantkit.errors import KernelError
from quantkit.kernels import hopper, marlin, proof
from quantkit.kernels.hopper import choose_tile
from tests.kernels import sweeps
from tests.kernels.operands import packed, weight
from tests.kernels.test_hopper import H200, LAYERS, TYPES, agrees, gpu
from tests.kernels.test_naive import on_gpu

__all__ = ["gpu"]


def test_the_chosen_tile_exists_and_its_grid_covers_the_product() -> None:
    for (n, k), m, dtype, group in itertools.product(
        [*LAYERS, (64, 16), (64, 128), (320, 448)], (1, 7, 8, 9, 64, 300, 4096), TYPES, marlin.HOPPER
    ):
        kernel = marlin.HOPPER[group]
        tile = choose_tile(kernel, dtype, m, n, k, H200)
        assert kernel.instance(dtype, tile) in kernel.instances
        grid = hopper.grid_size(tile, m, n, k, H200)
        whole = -(-m // tile.tokens) * -(-n // tile.columns)
        assert grid == whole * tile.cluster if tile.cluster else 1 <= grid <= max(whole, H200 * tile.resident)
        assert tile.cluster <= -(-k // 128), "a block of a cluster without a step would miss the barrier"


def test_the_tokens_of_a_tile_follow_those_of_the_product() -> None:
    """A single token never gets a tile of 64, which would waste most of the work."""
    for n, k in LAYERS:
        assert choose_tile(marlin.HOPPER[128], torch.float16, 1, n, k, H200).tokens == 8
        assert choose_tile(marlin.HOPPER[128], torch.float16, 1024, n, k, H200).tokens >= 64


def test_the_choice_is_near_the_best_of_the_sweep() -> None:
    """The sweep has the time of every tile on an H200, for each shape and token count; none chosen may be slow."""
    behind = sweeps.behind(
        "marlin", "int4:g128", lambda m, n, k: choose_tile(marlin.HOPPER[128], torch.float16, m, n, k, H200)
    )
    assert len(behind) == 9 * 8
    assert max(behind.values()) < 1.05, behind


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("label", "k"), [("int4:channel", 16), ("int4:channel", 208), ("int4:g32", 96), ("int4:g64", 64)]
)
def test_ends_of_k_that_fill_no_step(gpu: None, label: str, k: int) -> None:
    for m, dtype in itertools.product((1, 20, 150), TYPES):
        agrees("marlin", label, 192, k, m, dtype, None, bias=True)


@pytest.mark.gpu
def test_bad_operands_are_one_error_and_the_process_goes_on(gpu: None) -> None:
    tensors, q = on_gpu("marlin", weight("int4:g128", 256, 256))
    x = torch.ones(2, 256, dtype=torch.float16, device="cuda")
    for bad, says in (
        (x.float(), "must be float16 or bfloat16"),
        (x.cpu(), "must be on a CUDA device"),
        (x[:, :128], r"\[m, 256\]"),
        (x[:0], "m >= 1"),
        (torch.ones(256, 2, dtype=torch.float16, device="cuda").t(), "must be contiguous"),
    ):
        with pytest.raises(KernelError, match=says):
            marlin.LAUNCHER.matmul(bad, tensors, q.scheme, 256, 256)
    with pytest.raises(KernelError, match="write float16 as their activations are"):
        marlin.LAUNCHER.matmul(x, tensors, q.scheme, 256, 256, out=torch.empty(2, 256, device="cuda"))
    assert torch.isfinite(marlin.LAUNCHER.matmul(x, tensors, q.scheme, 256, 256)).all()


@pytest.mark.gpu
def test_a_weight_that_was_just_written_is_not_read_early(gpu: None) -> None:
    tensors, q = on_gpu("marlin", weight("int4:g128", 8192, 8192))
    other = on_gpu("marlin", weight("int4:g128", 8192, 8192, seed=1))[0]
    x = proof.activations(q.dequantize(), 8, torch.float16)
    expected = [marlin.LAUNCHER.matmul(x, t, q.scheme, 8192, 8192) for t in (tensors, other)]
    own = {name: tensor.clone() for name, tensor in tensors.items()}
    for i in range(20):
        for name in own:
            own[name].copy_((tensors, other)[i % 2][name])
        assert torch.equal(marlin.LAUNCHER.matmul(x, own, q.scheme, 8192, 8192), expected[i % 2])


def test_only_a_tensor_that_was_read_and_not_written_since_may_be_read_early() -> None:
    a, b = torch.zeros(4), torch.zeros(4)
    assert not hopper._was_read_before([a, b])
    hopper._remember([a, b])
    assert hopper._was_read_before([a, b]) and hopper._was_read_before([b])
    b.add_(1)
    assert not hopper._was_read_before([a, b]) and not hopper._was_read_before([b])
    hopper._remember([a, b])
    assert hopper._was_read_before([a, b])
    assert not hopper._was_read_before([a, a.clone()])
    b.data = torch.ones(4)  # as a module does that is moved to a GPU; its version stays
    assert not hopper._was_read_before([a, b])
    with torch.inference_mode():
        c = torch.zeros(4)  # has no version that would tell of a write
    hopper._remember([c])
    assert not hopper._was_read_before([c])
    count = len(hopper._READ)
    del a
    assert len(hopper._READ) == count - 1


def test_the_tests_multiply_groups_as_vllm_packs_them() -> None:
    q = weight("int4:g64", 64, 128)
    assert packed("marlin", q)["s"].shape == (2, 64)
