"""A few tokens of extreme norm must not decide the Hessian: GPTQ would serve them at the expense of all others."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from quantkit.algorithms import gptq, hessian, rtn
from quantkit.algorithms.hessian import CHUNK, Hessian
from quantkit.algorithms.options import Options
from quantkit.core.scheme import Scheme
from tests.algorithms.inputs import loss

K = 256
MASSIVE = 100  # the channel that fires at the first token of a document
LABELS = ["int4:g128", "int4:g128:asym", "int4:g128:24", "fp6:channel", "fp5:channel"]


class Layer(NamedTuple):
    """Hold a weight, calibration tokens of documents one after the other, and the Hessian of held-out other tokens."""

    weight: Tensor
    tokens: Tensor
    held_out: Tensor


@functools.cache
def layer(size: float, *, varying: bool = False, wide_channels: int = 0, documents: int = 64) -> Layer:
    """Draw documents of 64 correlated tokens, whose first has the channel `MASSIVE` of magnitude `size`.

    The other channels of a first token are ordinary, and the same in all documents or `varying`, so that all of them
    correlate with the massive one. `wide_channels` are 50 times as large as others at every token.
    """
    generator = torch.Generator().manual_seed(0)

    def gauss(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    mix = (gauss(K, K) * torch.arange(1, K + 1) ** -0.4) @ gauss(K, K) / K + 0.05 * torch.eye(K)
    channels = torch.exp(0.7 * gauss(K)) / mix.norm(dim=1)
    channels[:wide_channels] *= 50

    def ordinary(tokens: int) -> Tensor:
        return (gauss(tokens, K) @ mix.T) * torch.exp(0.3 * gauss(tokens, 1)) * channels

    x = ordinary(64 * documents).view(documents, 64, K)
    x[:, 0] = ordinary(documents) if varying else ordinary(1) + 0.1 * ordinary(documents)
    x[:, 0, MASSIVE] = size * (1 + 0.05 * gauss(documents))
    held_out = ordinary(2048).double()
    weight = gauss(64, K) * 0.02 * (1 + 0.3 * gauss(64, 1).abs())
    return Layer(weight, x.view(-1, K), held_out.T @ held_out)


def ratio(layer: Layer, label: str, *, cap_tokens: bool) -> float:
    """Return GPTQ's loss on the held-out tokens relative to plain rounding's."""
    h = Hessian(K, "cpu", cap_tokens=cap_tokens)
    h.add(layer.tokens)
    scheme = Scheme.parse(label)
    solution = gptq.quantize(layer.weight, scheme, h.limited([layer.weight])[0], Options())
    plain, _ = rtn.quantize(layer.weight, scheme)
    solved, rounded = (loss(layer.weight, tensor, layer.held_out).sum() for tensor in (solution.tensor, plain))
    return float(solved / rounded)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("varying", [False, True], ids=["same first token", "varying first token"])
def test_a_massive_first_token_does_not_cost_the_others_more_than_rounding(varying: bool, label: str) -> None:
    usual = ratio(layer(1, varying=varying), label, cap_tokens=True)
    for size in (1e3, 1e4, 1e5):
        assert ratio(layer(size, varying=varying), label, cap_tokens=True) < min(1, 1.25 * usual)
    assert ratio(layer(1e5, varying=varying), label, cap_tokens=False) > 1, "the case is no danger"


def test_a_channel_that_is_always_large_does_not_hide_a_massive_token() -> None:
    wide = layer(1e3, wide_channels=6)
    h = Hessian(K, "cpu")
    h.add(wide.tokens)
    norms = wide.tokens.norm(dim=1)
    assert norms[::64].max() < 6 * norms.median(), "the plain norm shows the token"
    assert 64 <= h.capped_tokens < 0.02 * h.tokens
    usual = ratio(layer(1, wide_channels=6), "fp6:channel", cap_tokens=True)
    assert ratio(wide, "fp6:channel", cap_tokens=True) < 1.25 * usual
    assert ratio(wide, "fp6:channel", cap_tokens=False) > 1.25 * usual


def test_a_channel_that_seldom_fires_makes_no_token_extreme() -> None:
    x = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))
    x[:, 32:] *= torch.arange(1000).view(-1, 1) % 100 == torch.arange(32)  # each fires at 1 % of the tokens
    h = Hessian(64, "cpu")
    h.add(x)
    assert not h.capped_tokens


def test_ordinary_tokens_give_the_plain_sum_bit_for_bit() -> None:
    capped, plain = Hessian(K, "cpu"), Hessian(K, "cpu", cap_tokens=False)
    for h in (capped, plain):
        h.add(torch.randn(CHUNK + 700, K, generator=torch.Generator().manual_seed(0)))
    assert not capped.capped_tokens
    assert torch.equal(capped.matrix(), plain.matrix())


def test_the_cap_does_not_depend_on_batching_and_tokens_are_counted() -> None:
    x = layer(1e4, documents=72).tokens.clone()  # more than one chunk
    whole, cut = Hessian(K, "cpu"), Hessian(K, "cpu")
    whole.add(x)
    for part in x.split(509):
        cut.add(part)
        cut.matrix()  # a read in between changes nothing
        assert cut.capped_tokens >= cut.tokens // 64
    assert torch.equal(whole.matrix(), cut.matrix())
    assert 72 <= whole.capped_tokens == cut.capped_tokens < 100


def test_an_extreme_token_keeps_its_direction_and_the_weight_of_a_median_one() -> None:
    x = torch.ones(100, 8)
    x[1::2] = -1
    x[7] *= 1000
    x[8] *= 5  # large, but not extreme
    h = Hessian(8, "cpu")
    h.add(x)
    assert h.capped_tokens == 1
    assert torch.allclose(h.matrix(), torch.full((8, 8), 2 * (99 + 25) / 100))


@pytest.mark.parametrize("zeros", [0.9, 1.0])
def test_tokens_of_zeros_do_not_make_the_others_extreme(zeros: float) -> None:
    x = torch.ones(100, 8)
    x[: int(100 * zeros)] = 0
    h = Hessian(8, "cpu")
    h.add(x)
    assert not h.capped_tokens
    assert torch.allclose(h.matrix(), torch.full((8, 8), 2 * (1 - zeros)))


def test_half_precision_tokens_as_a_gpu_holds_them_are_taken_out_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hessian, "_ASIDE", 10)
    x = layer(1e4).tokens.bfloat16()
    exact, half = x.float(), x.clone()
    found, same = (hessian.empty_aside(each) for each in (exact, half))
    none = torch.tensor(0)
    counts = [hessian.find_cap(x).take_out(x, into, none) for x, into in ((exact, found), (half, same))]
    assert counts[0] == counts[1] >= 64
    assert torch.equal(found[:10], same[:10].float())
    assert torch.equal(half, exact.bfloat16())


def test_a_token_of_ordinary_outputs_keeps_its_weight_however_large_its_inputs() -> None:
    usual = layer(1)
    x, weight = usual.tokens.clone(), usual.weight.clone()
    x[:, MASSIVE] *= 0.01
    x[::64, MASSIVE] = 4.0  # fires at first tokens alone, as a hidden unit may
    x[:, MASSIVE] *= 1024  # a planted outlier: outputs stay
    weight[:, MASSIVE] /= 1024
    planted, plain = Hessian(K, "cpu"), Hessian(K, "cpu", cap_tokens=False)
    for h in (planted, plain):
        h.add(x)
    assert planted.capped_tokens >= 64, "the case is no danger"
    found, scaled = planted.limited([weight[:20], weight[20:]])
    outputs = (x @ weight.T).norm(dim=1)
    assert scaled <= int((outputs[::64] > outputs.square().mean().sqrt()).sum()) < 64
    kept = found.diagonal() / plain.matrix().diagonal()
    assert kept.min() == kept[MASSIVE] > 0.8
    assert planted.matrix()[MASSIVE, MASSIVE] < 0.1 * found[MASSIVE, MASSIVE], "the case is no danger"


def test_loud_tokens_are_scaled_to_the_outputs_of_ordinary_ones() -> None:
    x = torch.ones(100, 8)
    x[1::2] = -1
    x[7] *= 1000
    h = Hessian(8, "cpu")
    h.add(x)
    weights = [torch.eye(8)[:3], 2 * torch.eye(8)[3:]]
    found, scaled = h.limited(weights)
    assert scaled == 1 and torch.allclose(found, torch.full((8, 8), 2.0))
    assert torch.equal(found, h.limited([weight.half() for weight in weights])[0])
    assert torch.isfinite(h.limited([torch.zeros(2, 8)])[0]).all()


def test_tokens_beyond_those_that_are_set_aside_count_as_median_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    room = 80
    monkeypatch.setattr(hessian, "_ASIDE", room)
    weight, x, _ = layer(1e4, documents=200)  # four chunks; the room ends in the second
    whole, cut = Hessian(K, "cpu"), Hessian(K, "cpu")
    whole.add(x)
    for part in x.split(509):
        cut.add(part)
    found, scaled = whole.limited([weight])
    assert torch.equal(found, cut.limited([weight])[0])
    cap = hessian.find_cap(x[:CHUNK])
    norms = hessian.weighted_norms(x, cap.magnitudes)
    extreme = (norms > 10 * cap.median).nonzero().flatten()
    assert len(extreme) == scaled == whole.capped_tokens == cut.capped_tokens > 2 * room
    expected, aside = x.double(), extreme[:room]
    expected[extreme] *= (cap.median / norms[extreme]).double().unsqueeze(-1)
    outputs = (expected @ weight.double().T).square().sum(1)
    typical = (outputs.sum() - outputs[aside].sum()) / (len(x) - room)
    expected[aside] *= (typical / outputs[aside]).sqrt().unsqueeze(-1)
    assert torch.allclose(found.double(), expected.T @ expected * (2 / len(x)), rtol=1e-4, atol=1e-4)
