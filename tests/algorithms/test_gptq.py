"""GPTQ: equality with the published loop, invariants, hostile Hessians, and the ranking on the synthetic layer."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from quantkit.algorithms import gptq, pruning, rtn, scale_search
from quantkit.algorithms.hessian import factorize
from quantkit.algorithms.numerics import Grid, encode
from quantkit.algorithms.options import Options
from quantkit.algorithms.scale_search import choose_scales, group_errors
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import LayoutError, NumericError
from tests import synthetic
from tests.algorithms.inputs import LABELS, broken_hessians, correlated, damped, gauss, hostile, loss, on_threads

EVERY_ORDER = [Options(act_order=o, clip=c) for o in ("static", "off") for c in ("none", "search")]
#: Every scheme in both orders and with both kinds of scales, and all four pairs with two schemes.
PAIRS = [*product((EVERY_ORDER[1], EVERY_ORDER[2]), LABELS), *product((EVERY_ORDER[0], EVERY_ORDER[3]), LABELS[:2])]


def label(given: object) -> str:
    o = given
    return f"{o.act_order}-{o.clip}-{o.damp_kind}-{o.metric}" if isinstance(o, Options) else f"{o}"


@pytest.mark.parametrize("words", ["NaN", "infinite", "diagonal allows", "damping 1", "negative", "ever moved"])
@pytest.mark.parametrize("label", ["int4:g32", "int4:g32:24"])
def test_broken_hessians_are_refused_or_fall_back_to_rtn(label: str, words: str) -> None:
    w, scheme = gauss(8, 64), Scheme.parse(label)
    h = broken_hessians(64).get(words, torch.zeros(64, 64))
    for solve in (gptq.quantize, *([lambda w, _, h, o: pruning.prune(w, h, o)] if scheme.sparsity else [])):
        with pytest.raises(NumericError, match=words):
            solve(w, scheme, h, Options())
    solution = gptq.quantize(w, scheme, h, Options(on_unsolvable="rtn"))
    assert solution.facts["fallback"] == "rtn" and words in solution.facts["reason"]
    assert solution.facts.get("prune") == ("magnitude" if scheme.sparsity else None)
    assert solution.tensor.equal(rtn.quantize(w, scheme, clip="search")[0])
    if words == "ever moved":
        assert not solution.loss.any() and not solution.norm.any()
    elif words not in ("diagonal allows", "damping 1") and not scheme.sparsity:
        with pytest.raises(NumericError, match=words):
            rtn.quantize(w, scheme, clip="search", metric="block", hessian=h)


def tame(k: int) -> Tensor:
    """Return a Hessian on which targets stay small in natural order, so that float64 rounding changes no code."""
    x = gauss(4 * k, k, seed=1) @ (gauss(k, k, seed=2) / k**0.5 + torch.eye(k) + 0.05)
    return x.T @ x * (2 / len(x))


def published_loop(w: Tensor, h: Tensor, scales: Tensor | None, size: int, order: Tensor) -> Tensor:
    """Run GPTQ as published: right-looking, with the inverse Cholesky factor; absmax scales by default."""
    w, result = w[:, order].clone(), torch.empty_like(w)
    u = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h[order][:, order])), upper=True)
    for j in range(w.shape[1]):
        if scales is None and j % size == 0:
            s = (w[:, j : j + size].abs().amax(1) / 7.5).half().double()
        elif scales is not None:
            s = scales[:, order[j] // size].double()
        q = s * (w[:, j] / s).round().clamp(-8, 7)
        result[:, order[j]] = q
        w[:, j:] -= torch.outer((w[:, j] - q) / u[j, j], u[j, j:])
    return result


@pytest.mark.parametrize("order", ["static", "off"])
@pytest.mark.parametrize(
    ("kind", "label", "block"), [("median", "int4:g32", 7), ("own", "int4:g64", 128), ("mean", "int4:channel", 1000)]
)
def test_sweep_is_the_published_loop_code_for_code(kind: str, order: str, label: str, block: int) -> None:
    w, h = gauss(256, 192), tame(192)
    options = Options(damp_kind=kind, act_order=order, clip="none", block=block)
    scheme = Scheme.parse(label)
    solution = gptq.quantize(w, scheme, h, options)
    dynamic = order == "off" and label != "int4:channel"
    scales = None if dynamic else choose_scales(w, scheme, "none", None).scales
    columns = factorize(h, options).order
    expected = published_loop(w, damped(h, options), scales, 192 // scheme.groups(192), columns)
    swept = ~solution.guard_rows
    assert swept.sum() > 0.9 * len(swept)
    assert torch.equal(solution.tensor.dequantize(torch.float64)[swept], expected[swept])


@pytest.mark.parametrize(("options", "label"), PAIRS, ids=label)
def test_each_column_is_nearest_to_its_target_and_losses_add_up(label: str, options: Options) -> None:
    w, h = gauss(64, 256), correlated(256)
    solution = gptq.quantize(w, Scheme.parse(label), h, options)
    swept, tensor = ~solution.guard_rows, solution.tensor
    factor = factorize(h, options)
    d = (w - tensor.dequantize(torch.float64))[swept][:, factor.order]
    misses = d @ factor.unit(torch.float64)  # t_j - what it was rounded to
    running = (misses * factor.r.diagonal()).square().sum(1)
    whole = damped(h, options)[factor.order][:, factor.order]
    assert torch.allclose(running, ((d @ whole) * d).sum(1), rtol=1e-9)
    if tensor.zeros is None and not tensor.scheme.format.is_float:
        size = 256 // tensor.scales.shape[1]
        scale = tensor.scales[swept].double().repeat_interleave(size, 1)[:, factor.order]
        inner = (tensor.codes[swept][:, factor.order] > 0) & (tensor.codes[swept][:, factor.order] < 15)
        assert (misses.abs() <= scale * (0.5 + 1e-9))[inner].all()


@pytest.mark.parametrize(("options", "label"), PAIRS, ids=label)
def test_a_diagonal_hessian_gives_rtn(label: str, options: Options) -> None:
    w, scheme = gauss(32, 256), Scheme.parse(label)
    h = torch.exp(gauss(256, seed=9)).diag()
    solution = gptq.quantize(w, scheme, h, options)
    expected, _ = rtn.quantize(w, scheme, clip=options.clip, metric="block", hessian=damped(h, options))
    if scheme.format.is_float and options.clip == "none":  # RTN takes its codes from the unrounded scale: LAYOUTS 6.3
        nearest = encode(w, scheme, grid := choose_scales(w, scheme, "none", None))
        assert (expected.codes == nearest).double().mean() > 0.99
        codes = torch.where(solution.guard_rows.unsqueeze(-1), expected.codes, nearest)
        expected = QuantizedTensor(scheme, codes, *grid)
    assert solution.tensor.equal(expected)


def test_errors_of_a_wide_channel_by_batches_of_blocks_are_those_by_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_search, "WIDEST_BLOCK", 256)
    k = 17 * 128 + 70  # more than one batch of blocks, and a narrow last one
    x = gauss(300, k)
    h = x.T @ x
    errors = group_errors(h, 1.01 * h.diagonal(), 1, "block", torch.float64)
    assert errors is not None and isinstance(errors[0], scale_search.TriangularError)
    delta = gauss(5, k).double()
    expected = errors[0].by_panels(delta)
    torch.testing.assert_close(errors[0].by_batches(delta), expected)
    whole = [(delta[:, a : a + len(r)] @ r).square().sum(-1) for a, r in errors[0].blocks]
    torch.testing.assert_close(expected, torch.stack(whole).sum(0))


def test_errors_of_all_groups_of_a_row_together_are_those_of_each_group() -> None:
    h = correlated(64, 64)
    errors = group_errors(h, 1.01 * h.diagonal(), 4, "block", torch.float64)
    assert errors is not None
    factors = [error.blocks[0][1] for error in errors if isinstance(error, scale_search.TriangularError)]
    together = scale_search.RowErrors(torch.stack(factors))
    delta = gauss(3 * 5, 64).double()
    expected = torch.stack([error(part) for error, part in zip(errors, delta.split(16, 1), strict=True)], 1)
    torch.testing.assert_close(together(delta.view(-1, 16)), expected.flatten())


@pytest.mark.parametrize(
    ("options", "label"),
    [
        *((Options(), label) for label in LABELS),
        *product(
            [*EVERY_ORDER[1:], Options(damp_kind="mean", damp=0.1)], ["int4:g32", "int4:channel:asym", "fp6:channel"]
        ),
        *product(
            [Options(metric=metric, act_order=order) for metric in ("mse", "diag") for order in ("static", "off")],
            ["int4:g64", "int4:g64:asym", "fp6-e2m3:channel"],
        ),
    ],
    ids=label,
)
def test_no_row_is_worse_than_plain_rounding(label: str, options: Options) -> None:
    layer = synthetic.layer(3, n=128, k=256)
    solution = gptq.quantize(layer.weight, Scheme.parse(label), layer.h, options)
    assert (solution.loss <= solution.rtn_loss).all()
    assert torch.allclose(solution.loss, loss(layer.weight, solution.tensor, layer.h), rtol=1e-9)
    assert torch.allclose(solution.norm, ((layer.weight @ layer.h) * layer.weight).sum(1), rtol=1e-9)
    if options.clip == "none":
        plain, _ = rtn.quantize(layer.weight, Scheme.parse(label))
        assert torch.allclose(solution.rtn_loss, loss(layer.weight, plain, layer.h), rtol=1e-9)
        assert (loss(layer.weight, solution.tensor, layer.h) <= loss(layer.weight, plain, layer.h) * (1 + 1e-9)).all()
    assert solution.loss.sum() < 0.9 * solution.rtn_loss.sum()
    if options.act_order == "static" and options.damp_kind != "mean":
        assert solution.guard_rows.double().mean() < 0.01
    assert solution.facts["guard_rows"] == int(solution.guard_rows.sum())


def test_guard_takes_rounding_if_inputs_are_hardly_correlated() -> None:
    h = torch.eye(128, dtype=torch.float64) + 0.02 * correlated(128) / correlated(128).diagonal().mean()
    w, scheme, options = gauss(300, 128), Scheme.parse("int4:g32"), Options(act_order="off", clip="none")
    solution = gptq.quantize(w, scheme, h, options)
    plain, _ = rtn.quantize(w, scheme)
    guard = solution.guard_rows
    assert 0 < guard.sum() < 300
    assert torch.equal(solution.tensor.codes[guard], plain.codes[guard])
    assert torch.equal(solution.tensor.scales[guard], plain.scales[guard])
    assert torch.equal(solution.loss[guard], solution.rtn_loss[guard])


@pytest.mark.parametrize("name", ["rank 1", "rank k/4", "duplicates", "massive channel", "dead column"])
@pytest.mark.parametrize(
    ("options", "dtype"),
    [*((options, torch.float64) for options in (*EVERY_ORDER, Options(damp_kind="mean"))), (Options(), torch.float16)],
    ids=label,
)
def test_hostile_hessians_are_never_worse_than_rtn(name: str, options: Options, dtype: torch.dtype) -> None:
    w = gauss(32, 128).to(dtype)
    h = hostile(name, 128)
    h = h if dtype == torch.float64 else h.float()
    for label in ("int4:g32", "int4:g64:asym", "fp6:channel"):
        solution = gptq.quantize(w, Scheme.parse(label), h, options)
        assert (solution.loss <= solution.rtn_loss).all()
        assert torch.allclose(
            solution.loss, loss(w, solution.tensor, h).clamp(min=0), rtol=1e-6, atol=1e-9 * float(h.max())
        )
        assert solution.facts["dead_columns"] == int(name == "dead column")


@pytest.mark.parametrize("options", EVERY_ORDER, ids=label)
@pytest.mark.parametrize("label", ["int4:g32", "int4:g64:asym", "fp6:channel"])
def test_dead_columns_are_rounded_to_nearest_and_affect_no_other(options: Options, label: str) -> None:
    w, h, scheme = gauss(64, 128), correlated(128), Scheme.parse(label)
    dead = torch.tensor([0, 17, 18, 127])
    h[:, dead] = h[dead] = 0
    tensor = gptq.quantize(w, scheme, h, options).tensor
    nearest = encode(w, scheme, Grid(tensor.scales, tensor.zeros))
    assert torch.equal(tensor.codes[:, dead], nearest[:, dead])
    assert not torch.equal(tensor.codes, nearest)
    if options.clip == "search":  # small activations must not make dead channels count
        assert gptq.quantize(w, scheme, h * 2.0**-40, options).tensor.equal(tensor)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 2), (1, 127), (3, 128), (3, 129)])
@pytest.mark.parametrize("options", EVERY_ORDER, ids=label)
def test_odd_shapes(n: int, k: int, options: Options) -> None:
    w, h = gauss(n, k).float(), correlated(k).float()
    for label in ("int4:channel", "int4:channel:asym", "fp6:channel", "int4:g128"):
        if label == "int4:g128" and k != 128:
            with pytest.raises(LayoutError, match="does not divide"):
                gptq.quantize(w, Scheme.parse(label), h, options)
            continue
        solution = gptq.quantize(w, Scheme.parse(label), h, options)
        assert solution.tensor.shape == (n, k)
        assert (solution.loss <= solution.rtn_loss).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", EVERY_ORDER, ids=label)
def test_float32_arithmetic_raises_the_loss_by_a_thousandth_at_most(dtype: torch.dtype, options: Options) -> None:
    layer = synthetic.layer(4, n=128, k=256)
    w, scheme = layer.weight.to(dtype), Scheme.parse("int4:g64")
    solution = gptq.quantize(w, scheme, layer.h.float(), options)
    if dtype == torch.bfloat16:
        scales = solution.tensor.scales.float()
        assert torch.equal(scales.to(torch.bfloat16).float(), scales)
        return  # its scales differ from those of the float64 weight
    exact = gptq.quantize(w.double(), scheme, layer.h.float(), options)
    assert float(solution.loss.sum()) == pytest.approx(float(exact.loss.sum()), rel=3e-3)
    assert (solution.tensor.codes == exact.tensor.codes).double().mean() > 0.99


def test_weights_with_nan_and_scales_that_overflow_are_refused() -> None:
    w, h = gauss(4, 64), correlated(64)
    w[2, 3] = torch.nan
    with pytest.raises(NumericError, match=r"\[2, 3\]"):
        gptq.quantize(w, Scheme.parse("int4:g32"), h, Options())
    w[2, 3] = 65504
    for options in EVERY_ORDER:
        with pytest.raises(NumericError, match="row 2 "):
            gptq.quantize(w, Scheme.parse("int4:g32"), h, options)


@pytest.mark.parametrize("label", LABELS)
def test_zero_rows_stay_exact_zeros(label: str) -> None:
    w = gauss(6, 256).half()
    w[3] = 0
    for options in (EVERY_ORDER[1], EVERY_ORDER[2]):
        tensor = gptq.quantize(w, Scheme.parse(label), correlated(256).float(), options).tensor
        assert (tensor.dequantize()[3] == 0).all() and (tensor.dequantize()[2] != 0).any()
        assert (tensor.scales[3] == 1).all()


@pytest.mark.parametrize("label", ["int4:g64", "int4:g64:asym", "fp6:channel", "fp6-e2m3:channel"])
@pytest.mark.parametrize("options", [Options(), Options(act_order="off")], ids=label)
def test_linears_solved_together_equal_those_solved_one_by_one(label: str, options: Options) -> None:
    w, h = gauss(192, 128), correlated(128)
    h[:, 5] = h[5] = 0
    scheme, rows = Scheme.parse(label), [96, 32, 64]
    together = gptq.quantize(w, scheme, h, options)
    parts = [together.rows(slice(0, 96)), together.rows(slice(96, 128)), together.rows(slice(128, 192))]
    factor = factorize(h, options)
    for part, weight in zip(parts, w.split(rows), strict=True):
        single = gptq.quantize(weight, scheme, h, options, factor)
        assert part.tensor.equal(single.tensor)
        assert part.facts == single.facts and part.facts["dead_columns"] == 1
        for field in ("loss", "rtn_loss", "norm"):
            assert torch.allclose(getattr(part, field), getattr(single, field), rtol=1e-9)


@pytest.mark.parametrize("label", ["int4:g64", "fp6:channel", "int4:g64:24"])
def test_losses_on_held_out_inputs_are_those_of_the_hessian_where_the_inputs_are_its_own(label: str) -> None:
    w, x, rows = (
        gauss(96, 128).float(),
        gauss(300, 128).float() @ correlated(128).float(),
        (slice(0, 64), slice(64, 96)),
    )
    h, other = 2 / len(x) * x.T @ x, gauss(50, 128).float()
    held_out = {"its own": x, "another": other, "none": x[:0]}
    whole = gptq.quantize(w, Scheme.parse(label), h, Options(), held_out=held_out)
    joint = gptq.join([whole.rows(slice(0, 40)), whole.rows(slice(40, 96))])
    for part in map(joint.rows, rows):
        found = part.facts["held_out"]
        assert found["its own"] == pytest.approx(float(part.loss.sum() / part.rtn_loss.sum()), rel=1e-4)
        assert found["another"] > 1.1 * found["its own"] and "none" not in found


@pytest.mark.parametrize(
    ("options", "scheme"),
    [
        (Options(act_order="off"), "int4:g64:asym"),
        (Options(), "int4:g64:24"),
        (Options(signed=True, descent=2, refit=True), "int4:g64"),
    ],
    ids=["off", "2:4", "refined"],
)
def test_the_number_of_threads_changes_no_bit(options: Options, scheme: str) -> None:
    """The rows are more than one part, and the factor is one that the library shares out among threads."""
    w, h = gauss(1100, 512).half(), correlated(512).float()
    one, *others = on_threads(lambda: gptq.quantize(w, Scheme.parse(scheme), h, options))
    for other in others:
        assert torch.equal(one.loss, other.loss) and one.facts == other.facts and one.tensor.equal(other.tensor)


def test_synthetic_layer_ranks_the_variants() -> None:
    found = synthetic.table(synthetic.layer(0, n=64))  # the figures of one draw and fewer rows are near enough
    assert sorted(found, key=found.__getitem__) == sorted(synthetic.EXPECTED, key=synthetic.EXPECTED.__getitem__), found
    for name, expected in synthetic.EXPECTED.items():
        assert expected / 1.5 < found[name] < expected * 1.5, (name, found)
