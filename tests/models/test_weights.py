"""The weights of one block in memory at a time, and of a whole model, which equals the one that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.census import families
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.models.meta_model import float32_states, unbuildable
from quantkit.models.modules import get_tensor
from quantkit.models.outline import LanguageModel
from quantkit.models.weights import BlockWeights, load_dense_model
from tests.folders import NEWEST
from tests.models.folders import documents, outputs, plain
from tests.tiny_models import FAMILIES

CPU = torch.device("cpu")
Q = "model.layers.1.self_attn.q_proj"


@pytest.fixture
def model(folders: dict[str, Path]) -> LanguageModel:
    return LanguageModel(Checkpoint(folders["llama"]), torch.float32)


def loaded(model: LanguageModel) -> set[str]:
    return {name for name, parameter in model.module.named_parameters() if parameter.device.type != "meta"}


def test_a_block_is_loaded_and_freed_alone(model: LanguageModel) -> None:
    weights = BlockWeights(model, CPU)
    for ahead in (False, True):
        if ahead:
            weights.read_ahead(1)
        weights.load_block(1)
        assert loaded(model) == set(model.stored(1))
        assert all(torch.equal(get_tensor(model.module, name), model.src.get(name).float()) for name in loaded(model))
        weights.unload_block(1)
        assert not loaded(model)


def test_what_is_outside_the_blocks_is_loaded_in_its_order(model: LanguageModel) -> None:
    weights = BlockWeights(model, CPU)
    weights.load_before_blocks()
    assert loaded(model) == {"model.embed_tokens.weight", "model.norm.weight"}
    weights.load_head()
    assert loaded(model) == set(model.stored(None))
    weights.drop_head()
    assert "lm_head.weight" not in loaded(model)


def test_a_solved_weight_takes_the_place_of_the_source(model: LanguageModel) -> None:
    weights = BlockWeights(model, CPU)
    weights.load_block(1)
    stored = model.src.get(f"{Q}.weight")
    weights.replace(Q, torch.ones(stored.shape, dtype=torch.float16))
    found = get_tensor(model.module, f"{Q}.weight")
    assert found.dtype == torch.float32 and found.eq(1).all()
    assert torch.equal(weights.source(Q), stored)  # read again, as float32 is not the stored dtype


def test_weights_are_replaced_for_a_while_and_have_gradients(model: LanguageModel) -> None:
    weights = BlockWeights(model, CPU)
    weights.load_block(1)
    linear, x = model.module.get_submodule(Q), torch.ones(3, 256)
    before, new = linear.weight, torch.zeros(256, 256, requires_grad=True)
    with pytest.raises(ZeroDivisionError), weights.replaced(1, {Q: new}):
        linear(x).sum().backward()
        raise ZeroDivisionError
    assert linear.weight is before and new.grad is not None and new.grad.eq(3).all()


@NEWEST
def test_states_that_the_code_needs_in_float32_stay_so(tmp_path: Path) -> None:
    model = LanguageModel(Checkpoint(families.write("inkling2_text", tmp_path / "m")), torch.bfloat16)
    BlockWeights(model, CPU).load_block(0)
    block = model.blocks[0]
    assert get_tensor(model.module, f"{block}.mlp.gate.weight").dtype == torch.float32
    assert get_tensor(model.module, f"{block}.self_attn.q_proj.weight").dtype == torch.bfloat16
    assert float32_states(model.module, torch.float32).search(f"{block}.mlp.gate.weight") is None


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
        ({"model.layers.1.mlp.up_proj.weight": None}, {}, "up_proj.weight is missing"),
        ({"model.layers.2.mlp.up_proj.weight": torch.zeros(2, 2)}, {}, "is not part of the model"),
        ({"model.norm.weight": torch.zeros(255)}, {}, "asks for"),
        ({}, {"num_hidden_layers": 3}, "is missing"),
    ],
)
def test_loading_for_evaluation_is_strict(tensors: dict[str, Any], config: Any, says: str, changed: Any) -> None:
    with pytest.raises(CheckpointError, match=says):
        load_dense_model(Checkpoint(changed("llama", tensors, **config)))


def test_old_rotary_tables_are_not_unexpected(changed: Any) -> None:
    load_dense_model(Checkpoint(changed("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)})))


def test_too_little_memory_is_not_blamed_on_the_config(folders: dict[str, Path]) -> None:
    src = Checkpoint(folders["llama"])
    assert "mend it" in str(unbuildable(src, ValueError("hidden_size")))
    with pytest.raises(MemoryError):
        unbuildable(src, MemoryError())
