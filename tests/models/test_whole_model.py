"""The whole model equals the one that transformers loads, and loading is strict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.models.meta_model import unbuildable
from quantkit.models.weights import load_dense_model
from quantkit.recipes.recipe import from_mapping
from tests.models.folders import documents, outputs, plain
from tests.tiny_models import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_the_evaluated_model_is_the_one_that_transformers_loads(family: str, folders: dict[str, Path]) -> None:
    ours, theirs = load_dense_model(Checkpoint(folders[family])), plain(folders[family])
    for tokens in documents():
        torch.testing.assert_close(outputs(ours, [], tokens)[1], outputs(theirs, [], tokens)[1], rtol=1e-5, atol=1e-5)
    tied = theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    assert (ours.get_output_embeddings().weight is ours.get_input_embeddings().weight) == tied
    assert not ours.training and all(p.device.type == "cpu" for p in ours.parameters())


@pytest.mark.parametrize(
    ("tensors", "config", "says"),
    [
        ({"model.norm.weight": None}, {}, "model.norm.weight is missing"),
        ({"model.layers.1.mlp.up_proj.weight": None}, {}, "up_proj.weight is missing"),
        ({"model.layers.2.mlp.up_proj.weight": torch.zeros(2, 2)}, {}, "is not part of the model"),
        ({"model.norm.weight": torch.zeros(255)}, {}, "asks for"),
        ({}, {"intermediate_size": 512}, "asks for"),
        ({}, {"num_hidden_layers": 3}, "is missing"),
    ],
)
def test_loading_for_evaluation_is_strict(tensors: dict[str, Any], config: Any, says: str, changed: Any) -> None:
    with pytest.raises(CheckpointError, match=says):
        load_dense_model(Checkpoint(changed("llama", tensors, **config)))


def test_old_rotary_tables_are_not_unexpected(changed: Any) -> None:
    load_dense_model(Checkpoint(changed("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)})))


def test_quantized_weights_are_decoded_directly_to_float32(tiny_llama: Path, tmp_path: Path) -> None:
    from quantkit.pipeline.quantize import quantize

    quantize(tiny_llama, tmp_path / "out", from_mapping({"method": "rtn"}))
    src = Checkpoint(tmp_path / "out")
    model = load_dense_model(src)
    assert len(src.modules()) == 14
    for module in src.modules():
        assert torch.equal(model.get_submodule(module).weight, src.quantized(module).dequantize())


def test_too_little_memory_is_not_blamed_on_the_config(folders: dict[str, Path]) -> None:
    src = Checkpoint(folders["llama"])
    assert "mend it" in str(unbuildable(src, ValueError("hidden_size")))
    with pytest.raises(MemoryError):
        unbuildable(src, MemoryError())
