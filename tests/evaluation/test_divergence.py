"""The divergence equals its definition, and is zero for a model and itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.evaluation.divergence import kld
from quantkit.models.whole_model import load_dense_model
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


def test_a_model_does_not_diverge_from_itself(model: Any, tiny_llama: Path, bytes_: Any) -> None:
    found = kld(model, load_dense_model(Checkpoint(tiny_llama)), bytes_, TEXT, window=64)
    assert (found.kld, found.top1) == (0.0, 1.0)


def test_models_of_different_vocabularies_are_not_compared(model: Any, tmp_path: Path, bytes_: Any) -> None:
    other = load_dense_model(Checkpoint(write_model("llama", tmp_path / "other", vocab_size=300)))
    with pytest.raises(CheckpointError, match="257 and 300"):
        kld(model, other, bytes_, TEXT, window=64)
