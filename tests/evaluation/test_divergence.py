"""The divergence equals its definition, shows its tails and its chance, and is zero for a model and itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.evaluation import perplexity
from quantkit.evaluation.divergence import TokenValues, interval, kld
from quantkit.models.weights import load_dense_model
from tests.evaluation.conftest import TEXT
from tests.tiny_models import write_model


def test_divergence_equals_its_definition(model: Any, tiny_llama: Path, bytes_: Any) -> None:
    reference = load_dense_model(Checkpoint(tiny_llama))
    model.model.layers[1].mlp.down_proj.weight.data *= 1.3
    ids = torch.tensor(bytes_(TEXT)["input_ids"])[:256].view(4, 64)
    with torch.no_grad():
        q, p = (m(ids, use_cache=False).logits.double().softmax(-1) for m in (model, reference))
    found = kld(model, reference, bytes_, TEXT, window=64, data="letters")
    assert found.kld == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-5)
    assert found.top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert (found.tokens, found.windows, found.data) == (256, 4, "letters") and 0 < found.kld < 1
    assert kld(reference, model, bytes_, TEXT, window=64).kld != found.kld  # the sum is weighted by the reference


def test_models_of_different_vocabularies_are_not_compared(model: Any, tmp_path: Path, bytes_: Any) -> None:
    other = load_dense_model(Checkpoint(write_model("llama", tmp_path / "other", vocab_size=300)))
    with pytest.raises(CheckpointError, match="257 and 300"):
        kld(model, other, bytes_, TEXT, window=64)
    small = write_model("llama", tmp_path / "small", vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    smaller = load_dense_model(Checkpoint(small))
    with pytest.raises(CheckpointError, match="64 and 257"):  # which the text's tokens pass: the models are the reason
        kld(smaller, model, bytes_, TEXT, window=64)


def values(kl: torch.Tensor) -> TokenValues:
    return TokenValues(kl.float(), kl < 1, kl, kl)


def test_a_tail_is_not_hidden_by_the_mean() -> None:
    even = torch.full((10, 200), 0.02)
    lost = torch.full((10, 200), 0.01)
    lost[3, :5] = 4.01  # 5 of 2000 tokens
    one, other = (values(kl).figures() for kl in (even, lost))
    assert one["kld"] == pytest.approx(other["kld"], rel=1e-6)
    assert (one["kld_p999"], other["kld_p999"]) == pytest.approx((0.02, 4.01), rel=1e-6)
    assert (one["kld_above"], other["kld_above"]) == (0.0, 5 / 2000)
    assert other["kld_median"] == other["kld_p99"] == pytest.approx(0.01)


def test_an_interval_knows_that_tokens_of_a_window_are_no_independent_draws() -> None:
    alike = torch.tensor([0.0, 1.0]).repeat(8)[:, None].expand(16, 256)
    found = values(alike).figures()
    assert found["kld_high"] - found["kld_low"] == pytest.approx(2 * 1.96 * 0.5 / 4, rel=0.1)
    assert found["kld_low"] < found["kld"] == 0.5 < found["kld_high"]
    assert values(alike).figures() == found, "the same draws each time"
    mixed = torch.tensor([0.0, 1.0]).repeat(16, 128)  # as many zeros and ones, equal windows
    assert values(mixed).figures()["kld_low"] == values(mixed).figures()["kld_high"] == 0.5


def test_one_window_has_no_interval() -> None:
    found = values(torch.rand(1, 64)).figures()
    assert found["kld_low"] is found["kld_high"] is None
    assert interval(np.ones(1)) is None


def test_pieces_of_the_logits_do_not_change_the_figures(
    model: Any, tiny_llama: Path, bytes_: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = load_dense_model(Checkpoint(tiny_llama))
    model.model.layers[1].mlp.down_proj.weight.data *= 1.3
    whole = kld(model, reference, bytes_, TEXT, window=64)
    monkeypatch.setattr(perplexity, "CHUNK", 257 * 7)
    found = kld(model, reference, bytes_, TEXT, window=64)
    assert found.kld == pytest.approx(whole.kld, rel=1e-6) and found.tokens == whole.tokens
