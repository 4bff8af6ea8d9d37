"""Running block by block gives the activations of the whole model, for every family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.census import families
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.models.block_runner import BlockRunner
from quantkit.models.interception import REPEATED, Passed, State, pack
from quantkit.models.weights import load_dense_model
from tests.folders import NEWEST
from tests.models.folders import block_by_block, documents, outputs, plain
from tests.tiny_models import FAMILIES


def of_equal_length(count: int = REPEATED + 2, length: int = 20) -> list[Tensor]:
    """Draw documents; the last one has the tokens 0 and 1, which may be special, at many places."""
    generator = torch.Generator().manual_seed(6)
    documents = [torch.randint(2, 256, (length,), generator=generator) for _ in range(count)]
    documents[-1][::3], documents[-1][1::3] = 0, 1
    return documents


def compare(folder: Path, docs: list[Tensor], carried: Mapping[int, int] = MappingProxyType({})) -> list[bool]:
    """Run each block on all documents, and compare it with the whole model; return whether it ran alone on the last.

    `carried` has the number of tensors that some blocks pass on beside their hidden state.
    """
    model, whole = BlockRunner(Checkpoint(folder), device="cpu"), plain(folder)
    model.prepare(embeddings=True)
    states: list[State | None] = [model.embed(tokens) for tokens in docs]
    model.drop_embeddings()
    expected, alone = [outputs(whole, model.blocks, tokens)[0] for tokens in docs], []
    for index in range(len(model.blocks)):
        model.weights.load_block(index)
        for document, tokens in enumerate(docs):
            state = states[document]
            assert state is not None
            before = state.hidden.clone(), [tensor.clone() for tensor in state.passed]
            states[document] = found = model.run(index, tokens, state)
            assert torch.equal(before[0], state.hidden) and all(map(torch.equal, before[1], state.passed))
            assert found is not None and len(found.passed) == carried.get(index, len(found.passed))
            reference = expected[document][index]  # of several streams the first one
            streams = found.hidden if found.hidden.numel() == reference.numel() else found.hidden[:, 0]
            torch.testing.assert_close(streams, reference.reshape(streams.shape), rtol=1e-5, atol=1e-5)
        alone.append(model.ran_alone)
        assert json.loads(json.dumps(model.forms[index])) == model.forms[index]
        model.weights.unload_block(index)
    return alone


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_alone_or_repeated_give_what_the_whole_model_gives(family: str, folders: dict[str, Path]) -> None:
    alone = compare(folders[family], [*documents(), *of_equal_length()])
    if family in ("llama", "mistral", "opt", "gpt2", "mixtral"):
        assert all(alone)


@pytest.mark.parametrize(
    ("family", "carried"),
    [
        ("gemma4", {}),  # each block has inputs of its own
        ("zamba2", {}),
        ("glm_moe_dsa", {0: 1}),  # the tokens that an indexer chose, for blocks without one
        ("zaya", {0: 1}),  # states of the router
        ("gemma3n_text", {0: 2, 1: 4, 2: 4}),  # keys and values, in a mapping
        pytest.param("mistral_large4", {0: 3, 1: 5, 2: 5}, marks=NEWEST),  # both
        ("bloom", {0: 0}),  # attention weights that nothing uses
        ("falcon", {0: 0}),  # linears of a class of its own
        ("deepseek_v4", {0: 0}),  # streams of hidden states
        ("cpmant", {0: 0}),  # 32 tokens of a prompt come before the text
        ("prophetnet", {0: 0}),  # predicted streams follow the text
        ("xlnet", {0: 0}),  # the batch is the second dimension
    ],
)
def test_what_blocks_take_from_tokens_or_earlier_blocks_is_new_in_each_pass(
    family: str, carried: dict[int, int], tmp_path: Path
) -> None:
    folder = families.write(family, tmp_path / "m", torch.float32)
    compare(folder, [*documents()[1:], *of_equal_length()], carried)


@pytest.mark.parametrize(
    ("family", "text"), [("blip", "text_decoder"), ("blip-2", "language_model"), ("kosmos-2", "text_model")]
)
def test_a_model_that_asks_for_an_image_runs_through_its_language_model(family: str, text: str, tmp_path: Path) -> None:
    folder = families.write(family, tmp_path / "m", torch.float32)
    model, tokens = BlockRunner(Checkpoint(folder), device="cpu"), documents()[2]
    assert model.text_path == text
    whole = plain(folder).get_submodule(text)
    expected, _ = outputs(whole, [path.removeprefix(f"{text}.") for path in model.blocks], tokens)
    for found, reference in zip(block_by_block(model, tokens), expected, strict=True):
        torch.testing.assert_close(found.hidden, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("idefics", r"cannot be run on tokens alone, block by block .*use --method rtn"),
        ("reformer", "draws random numbers when it runs.*use --method rtn"),
    ],
)
def test_a_model_that_does_not_run_by_blocks_is_refused_in_one_line(family: str, says: str, tmp_path: Path) -> None:
    model = BlockRunner(Checkpoint(families.write(family, tmp_path / "m")), device="cpu")
    with pytest.raises(CheckpointError, match=says) as caught:
        model.prepare(embeddings=True)
        model.embed(documents()[1])
    assert "\n" not in str(caught.value)


@pytest.mark.skipif("inkling2_text" not in families.families(), reason="this transformers does not know the family")
def test_a_block_that_takes_older_hidden_states_is_refused_before_it_runs_on_zeros(tmp_path: Path) -> None:
    model = BlockRunner(Checkpoint(families.write("inkling2_text", tmp_path / "m", torch.float32)), device="cpu")
    with pytest.raises(CheckpointError, match=r"layers.1: takes hidden states of earlier blocks.*: use --method rtn"):
        list(block_by_block(model, documents()[1]))


def test_a_run_can_start_in_the_middle_without_embeddings(folders: dict[str, Path], tmp_path: Path) -> None:
    for folder in (folders["opt"], families.write("gemma4", tmp_path / "m", torch.float32)):
        model = BlockRunner(Checkpoint(folder), device="cpu")
        tokens = documents()[1]
        expected, _ = outputs(plain(folder), model.blocks, tokens)
        model.prepare(embeddings=False)
        model.weights.load_block(1)
        model.forms[0] = {"returned": None, "left": {}}
        out = model.run(1, tokens, State(expected[0]))
        assert out is not None
        torch.testing.assert_close(out.hidden, expected[1], rtol=1e-5, atol=1e-5)


def test_a_checkpoint_without_the_base_models_name_is_the_same_model(folders: dict[str, Path], changed: Any) -> None:
    src = Checkpoint(folders["opt"])
    renamed: dict[str, Tensor | None] = {name: None for name in src.names()}
    renamed |= {name.removeprefix("model."): src.get(name) for name in src.names()}
    other = Checkpoint(changed("opt", renamed))
    assert "decoder.layers.0.fc1" in BlockRunner(other, device="cpu").linears
    tokens = documents()[1]
    assert torch.equal(outputs(load_dense_model(other), [], tokens)[1], outputs(load_dense_model(src), [], tokens)[1])


def test_a_block_that_takes_what_was_not_stored_is_refused(folders: dict[str, Path]) -> None:
    model = BlockRunner(Checkpoint(folders["llama"]), device="cpu")
    model.prepare(embeddings=False)
    base = model.module.model

    def chained(input_ids: Tensor, use_cache: bool) -> Tensor:
        hidden = base.embed_tokens(input_ids)
        rotary = base.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        hidden, extra = base.layers[0](hidden, position_embeddings=rotary)
        return base.layers[1](hidden, attention_mask=extra + 1, position_embeddings=rotary)

    model.text.forward = chained
    model.forms[0] = {"returned": [{"unused": 0}], "left": {}}
    model.weights.load_block(1)
    with pytest.raises(CheckpointError, match=r"layers\.1: takes from an earlier block .* use --method rtn"):
        model.run(1, documents()[1], State(torch.zeros(100, 256)))


def test_a_value_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"passes on a value of type object, .*: use --method rtn"):
        pack(Passed(torch.zeros(1, 1), [(torch.zeros(1), object())], {}), frozenset())


def test_a_batch_with_gradients_runs_alone_and_another_shape_does_not(folders: dict[str, Path]) -> None:
    runs = []
    for repeats in (True, False):
        model = BlockRunner(Checkpoint(folders["llama"]), device="cpu")
        model.prepare(embeddings=True)
        model.weights.load_block(0)
        name = next(name for name in model.paths if "gate" in name)
        model.run(0, torch.arange(5), model.embed(torch.arange(5)))
        for seed in range(REPEATED + 1) if repeats else [REPEATED]:
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(256, (3, 9), generator=generator)
            hidden = torch.randn(3, 9, model.module.config.hidden_size, generator=generator)
            weight = model.weights.source(name).float().requires_grad_()
            out = model.run_with(0, tokens, State(hidden), {name: weight})
            out.square().sum().backward()
            assert model.takes_batches(0)
        assert model.ran_alone == repeats
        runs.append((out.detach(), weight.grad))
        model.run_with(0, tokens[:2], State(hidden[:2]), {})
        assert not model.ran_alone
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
