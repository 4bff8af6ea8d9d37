"""The weights of one block in memory at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.census import families
from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.meta_model import float32_states
from quantkit.models.modules import get_tensor
from quantkit.models.outline import LanguageModel
from quantkit.models.weights import BlockWeights

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


def test_states_that_the_code_needs_in_float32_stay_so(tmp_path: Path) -> None:
    model = LanguageModel(Checkpoint(families.write("inkling2_text", tmp_path / "m")), torch.bfloat16)
    BlockWeights(model, CPU).load_block(0)
    block = model.blocks[0]
    assert get_tensor(model.module, f"{block}.mlp.gate.weight").dtype == torch.float32
    assert get_tensor(model.module, f"{block}.self_attn.q_proj.weight").dtype == torch.bfloat16
    assert float32_states(model.module, torch.float32) is None
