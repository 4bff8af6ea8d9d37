"""The Hessian and its factor: batching and scaling change nothing, and broken matrices are refused."""

from __future__ import annotations

import pytest
import torch

from quantkit.algorithms import gptq
from quantkit.algorithms.hessian import CHUNK, LONG_CHUNK, Hessian, factorize, row_losses
from quantkit.algorithms.options import Options
from quantkit.algorithms.sweep import remaining_error
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import NumericError, RecipeError
from tests.algorithms.inputs import correlated, damped, gauss, on_threads

# The sums of outer products -------------------------------------------------------------------------------------------


def test_hessian_does_not_depend_on_batching() -> None:
    x = gauss(9000, 65).float()
    whole, cut = Hessian(65, "cpu"), Hessian(65, "cpu")
    whole.add(x.view(3, 3000, 65))
    for a, b in ((0, 1), (1, 4095), (4095, 4097), (4097, 8999), (8999, 9000)):
        cut.add(x[a:b])
        cut.matrix()  # a read in between changes nothing
    assert torch.equal(whole.matrix(), cut.matrix())
    assert whole.tokens == cut.tokens == 9000
    exact = x.double().T @ x.double() * 2 / 9000
    assert torch.allclose(whole.matrix().double(), exact, rtol=0, atol=1e-5)
    assert torch.equal(whole.matrix(), whole.matrix().T)


@pytest.mark.parametrize("k", [128, 512])
def test_the_number_of_threads_changes_no_bit(k: int) -> None:
    x = gauss(5000, k).float()

    def matrix() -> torch.Tensor:
        hessian = Hessian(k, "cpu")
        hessian.add(x)
        return hessian.matrix()

    one, *others = on_threads(matrix)
    assert all(torch.equal(one, other) for other in others)
    one, *others = on_threads(lambda: factorize(one, Options()).r)
    assert all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_hessian_of_any_dtype_is_that_of_its_float32_values(dtype: torch.dtype) -> None:
    x = gauss(100, 16).to(dtype)
    one, two = Hessian(16, "cpu"), Hessian(16, "cpu")
    one.add(x)
    two.add(x.float())
    assert one.matrix().dtype == torch.float32
    assert torch.equal(one.matrix(), two.matrix())


def test_a_weighed_token_counts_as_often_as_its_weight_however_calls_are_cut() -> None:
    x, weights = gauss(9000, 65).float(), torch.ones(9000)
    weights[::1000] = 100
    expected = (x.double() * weights.unsqueeze(-1)).T @ x.double() * (2 / 9000)
    whole, cut, long = Hessian(65, "cpu"), Hessian(65, "cpu"), Hessian(65, "cpu", chunk=LONG_CHUNK)
    whole.add(x.view(9, 1000, 65), weights.view(9, 1000))
    long.add(x, weights)
    for part, weighed in zip(x.split(1700), weights.split(1700), strict=True):
        cut.add(part, weighed)
    assert torch.equal(whole.matrix(), cut.matrix()) and whole.tokens == 9000
    for found in (whole, long):
        assert torch.allclose(found.matrix().double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("chunk", [CHUNK, LONG_CHUNK])
@pytest.mark.parametrize("k", [65, 1024, 4096, 9000])
def test_a_gpu_adds_products_of_half_precision_in_float32(k: int, chunk: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(40000, k, generator=generator, device="cuda").to(dtype)
    found = []
    for cut in (40000, 7000):
        made = Hessian(k, "cuda", checks=False, chunk=chunk)
        for part in x.split(cut):
            made.add(part)
        found.append(made.matrix())
    assert torch.equal(*found), "the division of tokens between calls matters"
    exact = x.double().T @ x.double() * 2 / 40000
    # A tensor core cuts its sum off: 16384 positive squares end up to 2e-4 too low.
    assert (found[0].double() - exact).abs().max() < 5e-4
    assert torch.equal(found[0], found[0].T)


@pytest.mark.gpu
def test_hessians_of_many_experts_take_the_memory_that_is_planned() -> None:
    k, count = 768, 128
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    made = [Hessian(k, "cuda", checks=False) for _ in range(count)]
    for each in made:
        each.add(torch.ones(3, k, dtype=torch.bfloat16, device="cuda"))
    assert torch.cuda.memory_allocated() - before <= count * (Hessian.bytes(k) + Hessian.chunk_bytes(k))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(3000, 1024), (70, 2500), (1, 100)])
def test_losses_of_rows_on_a_gpu_are_those_of_whole_products(n: int, k: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.randn(rows, k, generator=generator, device="cuda") for rows in (2 * k, n))
    h = x.T @ x
    h = (h + h.T) / 2
    expected = ((weight.double() @ h.double()) * weight.double()).sum(-1)
    assert torch.allclose(row_losses(weight, None, h), expected, rtol=1e-4)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_is_found_in_the_end(value: float) -> None:
    x = gauss(300, 8).float()
    x[123, 5] = value
    made = Hessian(8, "cpu", checks=False)
    for part in x.split(100):
        made.add(part)
    assert made.may_be_broken()


def test_hessian_copies_activations() -> None:
    x = torch.ones(5, 4)
    h = Hessian(4, "cpu")
    h.add(x)
    x.zero_()
    assert torch.equal(h.matrix(), torch.full((4, 4), 2.0))


def test_non_finite_activations_and_no_activations_are_refused() -> None:
    h = Hessian(8, "cpu")
    with pytest.raises(NumericError, match="no calibration token"):
        h.matrix()
    x = torch.ones(2, 3, 8)
    x[1, 2, 4], x[1, 2, 5] = torch.nan, -torch.inf
    with pytest.raises(NumericError, match=r"2 of 48 .* token 5, channel 4"):
        h.add(x)
    assert h.tokens == 0


@pytest.mark.parametrize("kind", ["median", "own", "mean"])
@pytest.mark.parametrize("order", ["static", "off"])
def test_factor_is_that_of_the_damped_hessian(kind: str, order: str) -> None:
    options = Options(damp_kind=kind, act_order=order)
    h = correlated(200)
    factor = factorize(h, options)
    whole = damped(h, options)[factor.order][:, factor.order]
    product = factor.r @ factor.r.T
    scale = whole.diagonal().sqrt()
    assert ((product - whole).abs() / scale / scale[:, None]).max() < 1e-12
    assert torch.equal(factor.r, factor.r.triu())
    assert torch.allclose(factor.diagonal[factor.order], whole.diagonal(), rtol=1e-14)
    assert torch.equal(factor.order, factor.order.sort()[0]) == (order == "off")
    assert (h.diagonal()[factor.order].diff() <= 0).all() or order == "off"


def test_float32_factor_is_accurate_to_1e_5_and_needs_damping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "quantkit.algorithms.hessian.factor_dtype", lambda device: torch.float32
    )  # what a GPU without fast float64 gets
    h = correlated(200).float()
    factor = factorize(h, Options(act_order="off"))
    whole = damped(h.double(), Options())
    scale = whole.diagonal().sqrt()
    assert factor.r.dtype == torch.float32
    assert ((factor.r.double() @ factor.r.double().T - whole).abs() / scale / scale[:, None]).max() < 1e-5
    with pytest.raises(NumericError, match="float32"):
        factorize(h, Options(damp=9e-4))


def test_remaining_error_is_the_schur_complement() -> None:
    h = correlated(96)
    factor = factorize(h, Options(act_order="off"))
    whole = damped(h, Options())
    for a, b in ((0, 32), (32, 64), (64, 96)):
        rest = whole[a:b, b:] @ torch.linalg.solve(whole[b:, b:], whole[b:, a:b]) if b < 96 else 0
        delta = gauss(10, 32)
        expected = ((delta @ (whole[a:b, a:b] - rest)) * delta).sum(1) / factor.diagonal.mean()
        found = remaining_error(factor, "block", a, b, torch.float64)(delta.clone())
        assert torch.allclose(found, expected, rtol=1e-9)


def test_retries_are_recorded_and_end_at_one() -> None:
    h = torch.eye(3, dtype=torch.float64)
    h[0, 1:] = h[1:, 0] = 1.05 / 2**0.5  # smallest eigenvalue -0.05
    factor = factorize(h, Options(damp=0.01))
    assert factor.rungs == (0.01, 0.1) and factor.damp == 0.1
    assert factorize(h, Options(damp=0.06)).rungs == (0.06,)
    worse = torch.eye(4, dtype=torch.float64)
    worse[0, 1:] = worse[1:, 0] = 1.7 / 3**0.5  # -0.7
    assert factorize(worse, Options(damp=0.06)).rungs == (0.06, 0.6, 1.0)
    solution = gptq.quantize(gauss(4, 3), Scheme.parse("int4:channel"), h, Options(damp=0.01))
    assert solution.facts["rungs"] == [0.01, 0.1] and solution.facts["damp"] == 0.1


@pytest.mark.parametrize("options", [{"damp": 0.0}, {"damp": 1.5}, {"damp": float("nan")}, {"block": 0}])
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match=rf"{next(iter(options))} is .*: use an? (number|integer)"):
        Options(**options)
