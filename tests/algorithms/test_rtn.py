"""Round to nearest: the published FPx rule bit for bit, hostile weights, and the scale search."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from quantkit.algorithms import rtn
from quantkit.algorithms.numerics import Grid, check_weight, encode, stored_scale
from quantkit.algorithms.scale_search import choose_scales, square_error
from quantkit.core.formats import FORMATS
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import LayoutError, NumericError, RecipeError
from quantkit.names import Clip, Metric
from tests.algorithms.inputs import LABELS, correlated, gauss, on_threads
from tests.golden import golden

INT4, ASYM, FP6 = Scheme.parse("int4:channel"), Scheme.parse("int4:channel:asym"), Scheme.parse("fp6:channel")
FLOATS = {"e3m2": "fp6", "e3m1": "fp5", "e2m2": "fp5-e2m2", "e2m3": "fp6-e2m3"}


def golden_cases() -> list[tuple[str, dict[str, Tensor]]]:
    file, keys = golden("fpx_quant"), ("weight", "scales", "codes", "dequant")
    return [(name, {key: file.tensors[f"{name}.{key}"] for key in keys}) for name in file.cases]


def test_fpx_quantize_matches_golden_and_refuses_rows_that_dequantize_to_infinity() -> None:
    for name, case in golden_cases():
        scheme = Scheme(FORMATS[FLOATS[name[:4]]])
        overflow = ~(case["scales"].float() * scheme.format.largest <= 65504).view(-1)
        assert overflow.any()
        with pytest.raises(NumericError, match=rf"row {int(overflow.nonzero()[0])}\b"):
            rtn.quantize(case["weight"], scheme)
        tensor, facts = rtn.quantize(case["weight"][~overflow], scheme)
        assert torch.equal(tensor.scales.view(-1), case["scales"].view(-1)[~overflow])
        assert torch.equal(tensor.codes, case["codes"][~overflow])
        assert torch.equal(
            tensor.dequantize(torch.float16).view(torch.int16), case["dequant"][~overflow].view(torch.int16)
        )
        assert facts["zero_scales"] == int((tensor.scales == 0).sum()) > 0


@pytest.mark.parametrize("clip", ["none", "search"])
@pytest.mark.parametrize("label", ["int4:g128", "int4:g32:asym", "int4:channel", "fp6:channel", "nvfp4", "mxfp4"])
def test_threads_that_share_out_an_operation_change_no_bit(label: str, clip: Clip) -> None:
    weight = gauss(513, 2048).bfloat16()

    def solved() -> tuple[str, object]:
        tensor, facts = rtn.quantize(weight, Scheme.parse(label), clip=clip)
        return tensor.digest(), (facts, rtn.relative_error(weight, tensor))

    one, *others = on_threads(solved, (1, 2, 5, 16))
    assert others == [one] * 3


def test_the_sum_of_a_long_row_has_the_same_bits_by_many_threads() -> None:
    row = gauss(1, 2**18)
    one, *others = on_threads(lambda: square_error(row.clone()), (1, 2, 5, 16))
    assert all(torch.equal(one, other) for other in others)


# The published rule of FP6 and FP5 takes codes from the unrounded scale.
@pytest.mark.parametrize(
    ("label", "clip"), [(x, c) for x in LABELS for c in ("none", "search") if x[0] == "i" or c != "none"]
)
def test_every_code_is_the_nearest_on_the_stored_scale(label: str, clip: Clip) -> None:
    w = gauss(16, 256)
    tensor, _ = rtn.quantize(w, Scheme.parse(label), clip=clip)
    scale = tensor.scales.double().repeat_interleave(256 // tensor.scales.shape[1], 1)
    values = torch.tensor(tensor.scheme.format.values, dtype=torch.float64)
    zero = 0.0
    if tensor.zeros is not None:
        zero = tensor.scheme.format.decode(tensor.zeros).double().repeat_interleave(256 // tensor.zeros.shape[1], 1)
    every = (values.view(-1, 1, 1) - zero) * scale
    nearest = (w - every).abs().amin(0)
    assert torch.allclose((w - tensor.dequantize(torch.float64)).abs(), nearest, rtol=0, atol=1e-12)


def test_base_scales_are_those_of_the_table() -> None:
    w = torch.tensor([[3.0, -1.5, 0.75, 1.0]])
    assert rtn.quantize(w, INT4)[0].scales.item() == torch.tensor(3 / 7.5).half()
    assert rtn.quantize(w, FP6)[0].scales.item() == torch.tensor(3 / 28).half()
    tensor, _ = rtn.quantize(w, ASYM)
    assert tensor.scales.item() == torch.tensor(4.5 / 15).half()
    assert tensor.zeros is not None and tensor.zeros.item() == 5
    positive, _ = rtn.quantize(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), ASYM)
    assert positive.zeros is not None and positive.zeros.item() == 0, "the range must include zero"
    assert positive.codes.tolist() == [[4, 8, 11, 15]]


def test_subnormal_weights_are_not_flushed_and_low_scales_are_counted() -> None:
    w = torch.zeros(3, 32, dtype=torch.float16)
    w[0], w[1], w[2] = 2**-24, 2**-16, 2**-10
    tensor, facts = rtn.quantize(w, INT4)
    assert facts["floored_scales"] == 1 and facts["subnormal_scales"] == 2
    assert tensor.scales[0].item() == 2**-20
    assert (tensor.dequantize()[0] == 0).all(), "under half a step of the smallest scale"
    assert torch.allclose(tensor.dequantize()[1], w[1].float(), rtol=0.15)
    tiny = torch.full((1, 32), 1e-40, dtype=torch.bfloat16)
    assert (rtn.quantize(tiny, INT4)[0].dequantize() == 0).all()


@pytest.mark.parametrize("label", ["int4:channel", "int4:g32", "int4:channel:asym", "fp6:channel", "fp5:channel"])
@pytest.mark.parametrize("clip", ["none", "search"])
def test_an_overflowing_scale_is_refused_with_its_row(label: str, clip: Clip) -> None:
    for dtype, top in ((torch.float16, 65504), (torch.bfloat16, 3e38), (torch.float32, 3e38)):
        w = gauss(7, 64).to(dtype)
        w[5, 3], w[5, 4] = top, -top
        with pytest.raises(NumericError, match=r"row 5 .*65504"):
            rtn.quantize(w, Scheme.parse(label), clip=clip)
        w[:, 3], w[5, 4] = 59000, 0  # the largest that pass
        found, _ = rtn.quantize(w.half(), Scheme.parse(label), clip=clip)
        assert torch.isfinite(found.dequantize(torch.float16)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_non_finite_weights_are_refused_with_index_and_count(bad: float, dtype: torch.dtype) -> None:
    w = gauss(600, 512).to(dtype)  # several chunks
    w[577, 3] = w[578, 9] = w[599, 511] = bad
    with pytest.raises(
        NumericError, match=rf"3 of {600 * 512} .*\[577, 3\] = {str(bad).lstrip('-')}".replace("= ", "= -?")
    ):
        check_weight(w)
    with pytest.raises(NumericError, match="NaN or infinite"):
        rtn.quantize(w, INT4)


@pytest.mark.parametrize(
    "bad", [torch.zeros(4), torch.zeros(2, 4, dtype=torch.int8), torch.zeros(0, 4), torch.zeros(4, 0)]
)
def test_tensors_that_are_not_weights_are_refused(bad: Tensor) -> None:
    with pytest.raises(NumericError, match="convert it"):
        rtn.quantize(bad, INT4)
    with pytest.raises(NumericError, match="convert it"):
        rtn.quantize(torch.zeros(4, 4).to(torch.float8_e4m3fn), INT4)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 2), (1, 127), (3, 128), (3, 129)])
def test_odd_shapes_are_quantized_or_refused(n: int, k: int) -> None:
    w = gauss(n, k).float()
    h = correlated(k)
    for label in ("int4:channel", "int4:channel:asym", "fp6:channel", "fp5:channel", "int4:g128"):
        scheme = Scheme.parse(label)
        if label == "int4:g128" and k != 128:
            with pytest.raises(LayoutError, match="does not divide"):
                rtn.quantize(w, scheme)
            continue
        for metric in ("mse", "diag", "block"):
            tensor, _ = rtn.quantize(w, scheme, clip="search", metric=metric, hessian=h)
            assert tensor.shape == (n, k)
            assert torch.equal(tensor.codes, encode(w, scheme, Grid(tensor.scales, tensor.zeros)))
        assert float((rtn.quantize(w, scheme)[0].dequantize() - w).abs().max()) < 0.17 * float(w.abs().max())


def group_loss(w: Tensor, tensor: QuantizedTensor, h: Tensor) -> Tensor:
    """`delta H_gg delta^T` of each row and group, in float64."""
    groups = tensor.scales.shape[1]
    delta = (w.double() - tensor.dequantize(torch.float64)).view(len(w), groups, -1)
    g = delta.shape[2]
    blocks = torch.stack([h[a : a + g, a : a + g] for a in range(0, groups * g, g)])
    return torch.einsum("ngi,gij,ngj->ng", delta, blocks, delta)


#: Every scheme with every metric, in dtypes that take turns.
SEARCHES = [
    (label, metric, (torch.float16, torch.bfloat16, torch.float32, torch.float64)[i % 4])
    for i, (label, metric) in enumerate(product(LABELS, ("mse", "diag", "block")))
]


@pytest.mark.parametrize(("label", "metric", "dtype"), SEARCHES)
def test_a_search_is_never_worse_than_the_base_scale(label: str, metric: Metric, dtype: torch.dtype) -> None:
    w = gauss(48, 256).mul(torch.exp(gauss(48, 1, seed=5))).to(dtype)
    w[3, 7], w[4, :128] = 40, 0
    scheme, h = Scheme.parse(label), correlated(256)
    judge = {"mse": torch.eye(256, dtype=torch.float64), "diag": h.diagonal().diag(), "block": h}[metric]
    base = choose_scales(w, scheme, "none", None)
    plain = QuantizedTensor(scheme, encode(w, scheme, base), *base)
    found, _ = rtn.quantize(w, scheme, clip="search", metric=metric, hessian=h)
    before, after = group_loss(w, plain, judge), group_loss(w, found, judge)
    assert (after <= before * (1 + 1e-5) + 1e-9).all()
    assert after.sum() < 0.96 * before.sum(), "the search gains nothing"
    scales = found.scales.float()
    assert torch.isfinite(scales).all() and (scales > 0).all()
    exact = torch.equal(scales.to(torch.bfloat16).float(), scales)
    assert exact == (dtype == torch.bfloat16)


def test_the_search_finds_the_best_candidate_and_the_larger_on_ties() -> None:
    w, h = gauss(8, 32).float(), correlated(32)
    found, _ = rtn.quantize(w, INT4, clip="search", metric="block", hessian=h)
    base = w.abs().amax(1) / 7.5
    losses = []
    for i in range(76):
        scales = ((1 - i / 100) * base).half().unsqueeze(1)
        grid = Grid(scales, None)
        losses.append((group_loss(w, QuantizedTensor(INT4, encode(w, INT4, grid), scales), h).view(-1), scales))
    best = torch.stack([loss for loss, _ in losses]).amin(0)
    assert torch.allclose(group_loss(w, found, h).view(-1), best, rtol=1e-4)
    halves = torch.tensor([[1.0, -0.5, 0.25, 0.0]])  # the same values of FP6 at 1/28 as at 2/28
    assert rtn.quantize(halves, FP6, clip="search")[0].scales.item() == torch.tensor(2 / 28).half()


@pytest.mark.parametrize("metric", ["diag", "block"])
def test_the_size_of_activations_does_not_matter(metric: Metric) -> None:
    w, h = gauss(32, 128).float(), correlated(128).float()
    h[:, 40:60] = h[40:60] = 0
    scheme = Scheme.parse("int4:g32")
    tensors = [rtn.quantize(w, scheme, clip="search", metric=metric, hessian=h * 2.0**e)[0] for e in (-60, 0, 60)]
    assert tensors[0].equal(tensors[1]) and tensors[2].equal(tensors[1])
    dead, _ = rtn.quantize(w, scheme, clip="search", metric=metric, hessian=h * 0)
    assert dead.equal(rtn.quantize(w, scheme, clip="search")[0]), "all dead: as with mse"


def test_broken_hessians_and_missing_ones_are_refused() -> None:
    w = gauss(4, 64)
    with pytest.raises(RecipeError, match="calibration"):
        rtn.quantize(w, INT4, clip="search", metric="block")
    indefinite = torch.ones(64, 64) * 3 - 2 * torch.eye(64)
    with pytest.raises(NumericError, match="indefinite"):
        rtn.quantize(w, INT4, clip="search", metric="block", hessian=indefinite)


def test_wide_rows_use_blocks_on_the_diagonal() -> None:
    k = 4096 + 130  # a tail that is no block of 128
    w = gauss(4, k).float()
    h = torch.eye(k) * torch.exp(gauss(k, seed=4)).float()
    wide, _ = rtn.quantize(w, FP6, clip="search", metric="block", hessian=h)
    assert wide.equal(rtn.quantize(w, FP6, clip="search", metric="diag", hessian=h)[0])


def tried_one_by_one(w: Tensor, scheme: Scheme) -> Grid:
    """Search the scales of `w` `[n, k]` as ALGORITHMS 4 says, in float32, one candidate after the other."""
    fmt, stored, groups = scheme.format, w.dtype, scheme.groups(w.shape[1])
    x = w.float().view(-1, w.shape[1] // groups)
    ratios = [2 ** (i / 16) for i in range(16, -9, -1)] if fmt.is_float else [1 - i / 100 for i in range(76)]
    top = 2.0**fmt.bits - 1
    low, high = x.amin(1).clamp(max=0), x.amax(1).clamp(min=0)
    base = x.abs().amax(1) / torch.tensor(fmt.absmax) if scheme.symmetric else (high - low) / torch.tensor(top)
    least = torch.full_like(base, torch.inf)
    scales, zeros = torch.zeros_like(base), torch.zeros_like(base)
    for ratio in ratios:
        scale = stored_scale(torch.tensor(ratio) * base, stored, fmt)
        zero = (
            torch.zeros_like(base) if scheme.symmetric else (torch.tensor(ratio) * -low / scale).round().clamp(0, top)
        )
        if scheme.symmetric:
            value = fmt.nearest(x / scale[:, None])
        else:
            value = (x / scale[:, None] + zero[:, None]).clamp(0, top).round() - zero[:, None]
        error = torch.addcmul(x, value, scale[:, None], value=-1).square().sum(1)
        largest = fmt.largest if scheme.symmetric else torch.maximum(zero, top - zero)
        better = (error < least) & (scale * largest <= 65504)
        least, scales, zeros = error.where(better, least), scale.where(better, scales), zero.where(better, zeros)
    found = scales.half().view(len(w), groups)
    return Grid(found, None if scheme.symmetric else zeros.to(torch.uint8).view(len(w), groups))


BOUNDED = ["int4:g128", "int4:channel", "int4:g32:asym", "fp6:channel", "fp5:channel", "int2:g64", "int8:g128"]


@pytest.mark.parametrize(
    ("label", "dtype"), [*product(BOUNDED, [torch.bfloat16, torch.float16]), ("int4:g64", torch.float32)], ids=str
)
def test_bounds_exclude_no_candidate_that_is_the_best(label: str, dtype: torch.dtype) -> None:
    scheme, w = Scheme.parse(label), gauss(320, 1024, seed=7).float()
    w[64:128] *= torch.exp(1.5 * gauss(64, 1024, seed=8)).float()  # outliers
    w[128:192] = (w[128:192] * 2).round()  # exact ties
    w[192:224] *= torch.logspace(-9, -2, 32)[:, None]  # subnormal, lowest and (below) the largest scales
    w[224:232] *= torch.linspace(2e4, 4e4, 8)[:, None] / w[224:232].abs().amax(1, True)
    w[232:240], w[240:248], w[248:256] = 0, 3.0, w[248:256].abs()
    w[256:288, ::2] = 0
    w[288:320] *= 0.02
    w = w.to(dtype)
    grid, expected = choose_scales(w, scheme, "search", None), tried_one_by_one(w, scheme)
    assert torch.equal(grid.scales, expected.scales)
    assert expected.zeros is None or (grid.zeros is not None and torch.equal(grid.zeros, expected.zeros))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_zeros_hide_no_weight_that_vanished(dtype: torch.dtype) -> None:
    w = gauss(8, 256)
    w[:4, :40] *= 2.0**-23  # the rest of their groups is far larger
    w[:, ::5] = 0
    w[3:6, :128], w[6, 128:] = 0, -0.0
    w = w.to(dtype)
    q, _ = rtn.quantize(w, Scheme.parse("int4:g128"))
    parts = w.double().view(8, 2, 128).abs()
    small = (parts > 0) & (parts < parts.amax(-1, keepdim=True) * rtn.FAR_SMALLER)
    small &= 8 * small.sum(-1, keepdim=True) >= (parts > 0).sum(-1, keepdim=True)
    count = int((small.view(8, 256) & (q.dequantize() == 0)).sum())
    assert count > 50
    assert rtn.zeroed(w, q) == {"zeroed": count}
    assert rtn.zeroed(w[4:], q.rows(slice(4, 8))) == {}
