"""Output-aware rounding: the trace that it lowers, rows in their places, and outputs that hardly count or do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit.algorithms import gptq, output_aware
from quantkit.algorithms.gptq import Solution
from quantkit.algorithms.hessian import row_losses
from quantkit.algorithms.options import Options
from quantkit.core.scheme import Scheme
from quantkit.errors import NumericError
from tests.algorithms.inputs import correlated, gauss, on_threads

#: Labels of schemes -> options of GPTQ for them.
SCHEMES: dict[str, dict[str, Any]] = {
    "int4:g32": {"signed": True, "descent": 1, "refit": True},
    "int4:g32:asym": {},
    "int4:g32:24": {},
    "fp6:channel": {"descent": 1},
}


def outputs(n: int, seed: int = 0, strength: float = 1.0) -> Tensor:
    """Return the Hessian of outputs whose gradients are correlated and span two orders of magnitude."""
    mixed = gauss(n, n, seed=seed + 20) / n**0.5 + strength
    g = gauss(4 * n, n, seed=seed + 10) @ mixed * torch.exp(gauss(n, seed=seed + 30))
    return (g.T @ g * (2 / len(g))).float()


def solved(
    weights: Sequence[Tensor], label: str, h: Tensor, hessians: Sequence[Tensor], **changes: Any
) -> tuple[list[Solution], list[Solution]]:
    """Return the plain solutions of weights, and the output-aware ones."""
    scheme, options = Scheme.parse(label), Options(**{**SCHEMES.get(label, {}), **changes})

    def solve(rows: Tensor) -> Solution:
        return gptq.quantize(rows, scheme, h, options)

    plain = gptq.split(solve(torch.cat(list(weights))), [len(weight) for weight in weights])
    return plain, output_aware.refine(weights, plain, hessians, h, solve)


def trace(weight: Tensor, solution: Solution, h: Tensor, output: Tensor) -> float:
    error = weight.double() - solution.tensor.dequantize(torch.float64)
    return float((error @ h.double() @ error.T @ output.double()).trace())


@pytest.mark.parametrize("label", SCHEMES)
def test_outputs_that_count_alike_and_apart_leave_the_codes_alone(label: str) -> None:
    w, h = gauss(80, 128).float(), correlated(128).float()
    (plain,), (found,) = solved([w], label, h, [torch.eye(80)])
    assert found.tensor.equal(plain.tensor)
    assert found.facts["output_loss"] == pytest.approx(float(plain.loss.sum()), rel=1e-5)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("label", SCHEMES)
def test_the_trace_falls_clearly_and_the_facts_have_it(label: str, seed: int) -> None:
    w, h, output = gauss(96, 128, seed=seed).float(), correlated(128).float(), outputs(96, seed)
    (plain,), (found,) = solved([w], label, h, [output])
    before, after = trace(w, plain, h, output), trace(w, found, h, output)
    assert found.facts["plain_output_loss"] == pytest.approx(before, rel=1e-3)
    assert found.facts["output_loss"] == pytest.approx(after, rel=1e-3)
    assert after < 0.6 * before, (after, before)
    assert found.tensor.scheme == plain.tensor.scheme
    assert torch.allclose(found.loss, row_losses(w, found.tensor, h)) and torch.equal(found.norm, plain.norm)
    assert found.facts["guard_rows"] == int(found.guard_rows.sum())
    assert {"damp", "rungs", "dead_columns"} <= found.facts.keys()


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 70),
    seed=st.integers(0, 1000),
    strength=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    rank=st.integers(1, 70),
    label=st.sampled_from(list(SCHEMES)),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_never_above_plain(n: int, seed: int, strength: float, rank: int, label: str, dtype: torch.dtype) -> None:
    w, h = gauss(n, 64, seed=seed).to(dtype), correlated(64).float()
    root = gauss(n, n, seed=seed + 1)[:rank] @ (gauss(n, n, seed=seed + 2) / n**0.5 + strength)
    output = (root.T @ root).float()
    (plain,), (found,) = solved([w], label, h, [output])
    before, after = trace(w, plain, h, output), trace(w, found, h, output)
    assert after <= before * (1 + 1e-4) + 1e-6 * float(output.trace())
    assert found.facts["output_loss"] <= found.facts["plain_output_loss"]
    assert bool(found.tensor.dequantize(torch.float16).isfinite().all())


@pytest.mark.parametrize("label", SCHEMES)
def test_rows_come_back_in_their_places(label: str) -> None:
    w, h, output = gauss(70, 128).float(), correlated(128).float(), outputs(70)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3))
    _, (found,) = solved([w], label, h, [output])
    _, (moved,) = solved([w[order]], label, h, [output[order][:, order]])
    a, b = found.tensor, moved.tensor
    assert float((a.codes[order] == b.codes).float().mean()) > 0.99
    assert float((a.scales[order] == b.scales).float().mean()) > 0.99
    if a.zeros is not None and b.zeros is not None:
        assert float((a.zeros[order] == b.zeros).float().mean()) > 0.99
    assert moved.facts["output_loss"] == pytest.approx(found.facts["output_loss"], rel=0.02)
    assert all(torch.equal(found.changes[name][order] > 0, moved.changes[name] > 0) for name in found.changes)


@pytest.mark.parametrize("label", ["int4:g32", "int4:g32:24"])  # with and without refinements
def test_weights_solved_together_give_the_bytes_of_each_by_itself(label: str) -> None:
    weights = [gauss(n, 128, seed=n).float() for n in (200, 5, 48)]
    h, hessians = correlated(128).float(), [outputs(n, seed=n) for n in (200, 5, 48)]
    _, together = solved(weights, label, h, hessians)
    for weight, output, found in zip(weights, hessians, together, strict=True):
        _, (single,) = solved([weight], label, h, [output])
        assert found.tensor.digest() == single.tensor.digest()
        assert found.facts == single.facts and torch.equal(found.loss, single.loss)


@pytest.mark.parametrize("n", [1, 7, 16, 17, 33, 1025])
def test_any_number_of_rows(n: int) -> None:
    w, h, output = gauss(n, 64).float(), correlated(64).float(), outputs(n)
    (plain,), (found,) = solved([w], "int4:g32", h, [output], refit=False, descent=0)
    assert found.tensor.codes.shape == (n, 64) and len(found.loss) == len(found.guard_rows) == n
    assert trace(w, found, h, output) <= trace(w, plain, h, output) * (1 + 1e-6)
    assert (n <= 16) == found.tensor.equal(plain.tensor)  # one step has no errors to make up for


@pytest.mark.parametrize("dead", [[0], [3, 40, 69], list(range(70))])
def test_outputs_without_any_gradient(dead: list[int]) -> None:
    w, h, output = gauss(70, 128).float(), correlated(128).float(), outputs(70)
    output[dead], output[:, dead] = 0, 0
    (plain,), (found,) = solved([w], "int4:g32", h, [output])
    assert found.facts["output_loss"] <= found.facts["plain_output_loss"]
    assert (len(dead) == 70) == found.tensor.equal(plain.tensor)
    same = (found.tensor.codes[dead] == plain.tensor.codes[dead]).float().mean()
    assert float(same) > 0.99  # there is nothing that they could make up for


def test_scales_are_those_that_the_dtype_of_the_weight_holds() -> None:
    w, h, output = gauss(64, 128).bfloat16(), correlated(128).float(), outputs(64)
    (plain,), (found,) = solved([w], "int4:g32", h, [output])
    assert not found.tensor.equal(plain.tensor)
    assert torch.equal(found.tensor.scales, found.tensor.scales.bfloat16().half())


@pytest.mark.parametrize("label", ["int4:g32", "int4:g32:24"])
def test_any_number_of_threads_gives_the_same_bytes(label: str) -> None:
    w, h, output = gauss(200, 256).float(), correlated(256).float(), outputs(200)
    found = on_threads(lambda: solved([w], label, h, [output])[1][0], (1, 2))
    assert found[0].tensor.digest() == found[1].tensor.digest() and found[0].facts == found[1].facts


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("label", ["int4:g32", "int4:g32:asym", "int4:g32:24", "fp6:channel"])
def test_a_target_that_would_overflow_float16_gives_way_to_the_weight(label: str, dtype: torch.dtype) -> None:
    w, h = gauss(64, 64).clamp(-3, 3), correlated(64).float()
    w = (w * (60000 / w.abs().amax(-1, keepdim=True))).to(dtype)  # each row is about as large as float16 allows
    ramp = torch.linspace(0, -5, 64).exp()  # errors of the first outputs move the targets of the last ones far
    g = (gauss(256, 1, seed=5) + 0.2 * gauss(256, 64, seed=6)) * ramp
    _, (found,) = solved([w], label, h, [(g.T @ g).float()])
    assert bool(found.tensor.dequantize(torch.float16).isfinite().all())
    assert found.facts["output_loss"] <= found.facts["plain_output_loss"]


def test_a_hessian_of_outputs_that_is_no_covariance_is_refused() -> None:
    w, h, output = gauss(32, 64).float(), correlated(64).float(), outputs(32)
    for broken in (output.fill_diagonal_(1e-3), torch.full((32, 32), torch.nan)):
        with pytest.raises(NumericError, match="outputs is not a covariance: use --set output_aware=false"):
            solved([w], "int4:g32", h, [broken])
