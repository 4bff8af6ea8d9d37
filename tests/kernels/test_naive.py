"""The naive kernels on a GPU, which judge all others, agree with float64 sums and with every single weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit.errors import KernelError
from quantkit.evaluation.options import VerifyOptions
from quantkit.evaluation.verify import verify
from quantkit.kernels import JUDGES, MATMULS, driver, loader, proof
from quantkit.pipeline import quantize
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import from_mapping
from tests.kernels.operands import CASES, ONE_EACH, differs, is_second_copy, weight
from tests.kernels.products import TYPES, on_gpu, poisoned
from tests.kernels.sources import SOURCES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


@pytest.mark.parametrize("m", [1, 3, 17, 129])
@pytest.mark.parametrize(("layout", "label", "n", "k"), CASES)
def test_products_are_those_of_the_record(layout: str, label: str, n: int, k: int, m: int) -> None:
    tensors, q = on_gpu(layout, weight(label, n, k, seed=m))
    w = q.dequantize()
    for dtype in TYPES:
        x = proof.activations(w, m, dtype)
        bias = torch.linspace(-3, 3, n).to(dtype).cuda()
        for shift in (None, bias):
            reference = x.double() @ w.double().t() + (0 if shift is None else shift.double())
            y = JUDGES[layout](x, tensors, q.scheme, n, k, shift, out=poisoned(m, n, torch.float32))
            assert proof.relative_error(y, reference) < 1e-5
            rounded = JUDGES[layout](x, tensors, q.scheme, n, k, shift, out=poisoned(m, n, dtype))
            assert torch.equal(rounded, y.to(dtype)), "not the float32 sum, rounded once"
            fresh = MATMULS[layout](x, tensors, q.scheme, n, k, shift)
            assert fresh.dtype == dtype and fresh.shape == (m, n)
            assert proof.relative_error(fresh, reference.to(dtype)) < proof.BOUND


@pytest.mark.parametrize(("layout", "label", "n", "k"), CASES)
def test_unit_vectors_give_back_every_weight(layout: str, label: str, n: int, k: int) -> None:
    tensors, q = on_gpu(layout, weight(label, n, k))
    assert proof.prove(layout, tensors, q).problems == ()
    for dtype in TYPES:
        unit = torch.eye(k, dtype=dtype, device="cuda")
        y = JUDGES[layout](unit, tensors, q.scheme, n, k, out=poisoned(k, n, torch.float32))
        assert torch.equal(y.t(), q.dequantize())


@pytest.mark.parametrize(("layout", "label", "n", "k"), ONE_EACH)
def test_a_flipped_bit_in_any_packed_tensor_is_found(layout: str, label: str, n: int, k: int) -> None:
    tensors, q = on_gpu(layout, weight(label, n, k))
    for name, tensor in tensors.items():
        data = tensor.view(torch.uint8).view(-1)
        others = 0
        for bit in range(1, 8 * data.numel(), 8 * data.numel() // 8 + 1):
            data[bit // 8] ^= 1 << bit % 8
            wrong = differs(layout, tensors, q)
            if wrong is None and layout == "quick" and not is_second_copy(name, bit):
                wrong = True  # two copies that differ are refused, and this is the one that every kernel reads
            assert wrong is None or bool(proof.prove(layout, tensors, q).problems) == wrong, (name, bit)
            others += wrong is not False
            data[bit // 8] ^= 1 << bit % 8
        assert others >= 7, f"{name}: each bit is a weight's or a scale's, but a stored zero may lie in two places"


@pytest.mark.parametrize(("layout", "label", "n", "k"), ONE_EACH)
def test_the_largest_activations_do_not_overflow(layout: str, label: str, n: int, k: int) -> None:
    q = weight(label, n, k)
    q.scales.fill_(0.001)
    tensors, q = on_gpu(layout, q)
    x = torch.full((2, k), 65504.0, dtype=torch.float16, device="cuda")
    x[:, ::2] *= -1
    y = JUDGES[layout](x, tensors, q.scheme, n, k, out=poisoned(2, n, torch.float32))
    assert torch.isfinite(y).all()
    assert proof.relative_error(y, x.double() @ q.dequantize().double().t()) < 1e-4


@pytest.mark.parametrize(("layout", "label", "n", "k"), ONE_EACH)
def test_runs_are_bit_identical_on_any_stream(layout: str, label: str, n: int, k: int) -> None:
    tensors, q = on_gpu(layout, weight(label, n, k))
    x = proof.activations(q.dequantize(), 5, torch.float16)
    first = MATMULS[layout](x, tensors, q.scheme, n, k)
    for _ in range(3):
        assert torch.equal(MATMULS[layout](x, tensors, q.scheme, n, k), first)
    late = torch.zeros_like(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # on another stream, the kernel would not wait for what comes now
        late.copy_(x)
        y = MATMULS[layout](late, tensors, q.scheme, n, k)
    side.synchronize()
    assert torch.equal(y, first)


def test_a_launch_that_the_driver_refuses_is_one_error_and_the_process_goes_on() -> None:
    layout, label, n, k = ONE_EACH[0]
    tensors, q = on_gpu(layout, weight(label, n, k))
    x = proof.activations(q.dequantize(), 4, torch.float16)
    good = MATMULS[layout](x, tensors, q.scheme, n, k)
    function = loader.load("naive", SOURCES["naive"], x.device)["marlin_naive<half, half>"]
    args = [tensors["B"], tensors["s"], x, None, torch.empty_like(good), n, k, 128]
    for block, shared in ((2048, 0), (64, 1 << 30)):
        with pytest.raises(KernelError, match="could not be launched") as caught:
            driver.launch(function, (4, n // 64), (block,), args, shared)
        assert "\n" not in str(caught.value)
    assert torch.equal(MATMULS[layout](x, tensors, q.scheme, n, k), good)


@pytest.mark.parametrize(
    ("layout", "scheme"),
    [("marlin", {"format": "int4"}), ("tcfpx", {"format": "fp6"}), ("quick", {"format": "int4", "symmetric": False})],
)
def test_verify_runs_the_kernels(layout: str, scheme: dict[str, object], tiny_llama: Path, tmp_path: Path) -> None:
    recipe = from_mapping({"scheme": scheme, "method": "rtn", "clip": "none", "layout": layout})
    quantize.quantize(tiny_llama, tmp_path / "out", recipe, run=RunOptions(device="cpu"))
    found = verify(tmp_path / "out")
    assert found.ok, found.failures
    assert {"reference", "naive kernel", "fast kernel"} <= found.to_dict()["seconds"].keys()
    assert found.kernel == layout and found.device == torch.cuda.get_device_name()
    assert found.multiplied == found.weights and len(found.errors) == len(found.rows)
    assert all(0 < error < proof.BOUND for error in found.errors) and found.bound == proof.BOUND
    assert "gave back" in found.note and found.to_dict()["multiplied"] == found.weights
    bits = verify(tmp_path / "out", asked=VerifyOptions(device="cpu"))
    assert bits.ok and bits.kernel is None and "no kernel ran" in bits.note


def test_verify_fails_where_a_kernel_is_wrong(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = from_mapping({"scheme": {"format": "int4"}, "method": "rtn", "clip": "none", "layout": "marlin"})
    quantize.quantize(tiny_llama, tmp_path / "out", recipe, run=RunOptions(device="cpu"))

    def wrong(x: Tensor, *rest: object, out: Tensor) -> Tensor:
        y = JUDGES["marlin"](x, *rest, out=out)
        y[:, 7] += x[:, 3] * 1e-3  # one weight of a column, by a thousandth
        return y

    monkeypatch.setitem(MATMULS, "marlin", wrong)
    found = verify(tmp_path / "out")
    assert not found.ok and not any(row.product for row in found.rows) and all(row.repack for row in found.rows)
    assert "fast marlin kernel multiplies 1 of" in found.failures[0]
