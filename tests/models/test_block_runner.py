"""Running block by block gives the activations of the whole model, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, RecipeError
from quantkit.models.block_runner import BlockRunner
from quantkit.models.tokenizer import load_tokenizer
from quantkit.models.whole_model import load_dense_model
from quantkit.pipeline.recipe import from_mapping, goal_of, label
from tests.census import families
from tests.models.folders import documents, outputs, plain
from tests.tiny_models import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_block_by_block_activations_equal_those_of_the_whole_model(family: str, folders: dict[str, Path]) -> None:
    model = BlockRunner(Checkpoint(folders[family]), device="cpu")
    reference = plain(folders[family])
    docs = documents()
    expected = [outputs(reference, model.blocks, tokens)[0] for tokens in docs]
    model.prepare(embeddings=True)
    hidden = [model.embed(tokens) for tokens in docs]
    model.drop_embeddings()
    for index, path in enumerate(model.blocks):
        model.load_block(index)
        loaded = {n for n, p in model.module.named_parameters() if p.device.type != "meta"}
        others = tuple(f"{other}." for other in model.blocks if other != path)
        assert not any(name.startswith(others) for name in loaded)
        table = model.module.get_input_embeddings().weight
        assert table.untyped_storage().nbytes() == table[0].nbytes  # one row of zeros
        outs = [model.run(index, tokens, h) for tokens, h in zip(docs, hidden, strict=True)]
        model.unload_block(index)
        hidden = [out for out in outs if out is not None]
        for document, out in enumerate(hidden):
            torch.testing.assert_close(out, expected[document][index], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["deepseek_v4", "gemma3n_text"])
def test_streams_of_hidden_states_stay_together(family: str, tmp_path: Path) -> None:
    folder = families.write(family, tmp_path / "m", torch.float32)
    model, whole = BlockRunner(Checkpoint(folder), device="cpu"), plain(folder)
    model.prepare(embeddings=True)
    for tokens in documents():
        hidden = model.embed(tokens)
        for index, expected in enumerate(outputs(whole, model.blocks[:2], tokens)[0]):
            model.load_block(index)
            output = model.run(index, tokens, hidden)
            assert output is not None and output.shape[:1] == tokens.shape and output.ndim == 3
            hidden = output
            found = hidden[None, :, 0] if family == "gemma3n_text" else hidden  # `outputs` takes its first stream
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "block"), [("blip-2", 0), ("gemma3n_text", 2)])
def test_a_model_that_does_not_run_by_blocks_is_refused_in_one_line(family: str, block: int, tmp_path: Path) -> None:
    model, tokens = BlockRunner(Checkpoint(families.write(family, tmp_path / "m")), device="cpu"), documents()[1]
    model.prepare(embeddings=True)
    with pytest.raises(CheckpointError, match=r"cannot be run on tokens alone, block .*use --method rtn") as caught:
        hidden = model.embed(tokens)
        model.load_block(block)
        model.run(block, tokens, hidden)
    assert "\n" not in str(caught.value)


def test_a_run_can_start_in_the_middle_without_embeddings(folders: dict[str, Path], tmp_path: Path) -> None:
    gemma4 = families.write("gemma4", tmp_path / "m", torch.float32)  # each block has inputs of its own
    for folder in (folders["llama"], folders["opt"], folders["gemma2"], gemma4):
        model = BlockRunner(Checkpoint(folder), device="cpu")
        tokens = documents()[1]
        expected, _ = outputs(plain(folder), model.blocks, tokens)
        model.prepare(embeddings=False)
        model.load_block(1)
        out = model.run(1, tokens, expected[0])
        torch.testing.assert_close(out, expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_in_one_block_or_outside(family: str, folders: dict[str, Path]) -> None:
    src = Checkpoint(folders[family])
    model = BlockRunner(src, device="cpu")
    parts = [model.stored(0), model.stored(1), model.stored(None)]
    assert sorted(name for part in parts for name in part) == sorted(src.names())
    assert len(parts[0]) == len(parts[1]) > 0 and any("embed" in name for name in parts[2])
    for linear, shape in model.linears.items():
        assert linear in model.tied or src.shape(f"{linear}.weight") == shape
    assert not model.notices


def test_a_head_is_skipped_under_either_of_its_names(folders: dict[str, Path]) -> None:
    model = BlockRunner(Checkpoint(folders["gpt_neox"]), device="cpu")
    assert model.paths["embed_out"] == "lm_head"
    for pattern in ("lm_head", "embed_out"):
        assert goal_of(from_mapping({"skip": [pattern]}), "embed_out", model.paths["embed_out"]) is None
    everything = from_mapping({"skip": [], "overrides": {"lm_head": "fp6:channel"}})
    goal = goal_of(everything, "embed_out", model.paths["embed_out"])
    assert goal is not None and label(goal) == "fp6:channel"


def test_a_checkpoint_without_the_base_models_name_is_the_same_model(folders: dict[str, Path], changed: Any) -> None:
    src = Checkpoint(folders["opt"])
    renamed: dict[str, Tensor | None] = {name: None for name in src.names()}
    renamed |= {name.removeprefix("model."): src.get(name) for name in src.names()}
    other = Checkpoint(changed("opt", renamed))
    assert "decoder.layers.0.fc1" in BlockRunner(other, device="cpu").linears
    tokens = documents()[1]
    assert torch.equal(outputs(load_dense_model(other), [], tokens)[1], outputs(load_dense_model(src), [], tokens)[1])


def test_a_tied_weight_may_be_stored_as_the_head(folders: dict[str, Path], changed: Any) -> None:
    src = Checkpoint(folders["qwen2"])
    table = src.get("model.embed_tokens.weight")
    other = Checkpoint(changed("qwen2", {"model.embed_tokens.weight": None, "lm_head.weight": table}))
    tokens = documents()[1]
    assert torch.equal(outputs(load_dense_model(other), [], tokens)[1], outputs(load_dense_model(src), [], tokens)[1])
    ours, same = BlockRunner(other, device="cpu"), BlockRunner(src, device="cpu")
    for model in (ours, same):
        model.prepare(embeddings=True)
    assert torch.equal(ours.embed(tokens), same.embed(tokens))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "no_such_model"},
        {"model_type": None},
        {"hidden_size": -4},
        {"hidden_size": "many"},
        {"num_attention_heads": 0},
        {"hidden_act": "os.system"},
        {"rope_scaling": {"rope_type": "unheard_of"}},
    ],
)
def test_a_config_that_cannot_be_built_gives_a_one_line_error(config: dict[str, Any], changed: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        BlockRunner(Checkpoint(changed("llama", **config)), device="cpu")
    assert "\n" not in str(caught.value)


def test_matrices_outside_linears_are_reported(tmp_path: Path) -> None:
    import transformers

    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    jamba = transformers.JambaConfig(
        **small, num_key_value_heads=2, vocab_size=100, num_experts=1, mamba_d_state=8, use_mamba_kernels=False
    )
    transformers.JambaForCausalLM(jamba).save_pretrained(tmp_path)
    model = BlockRunner(Checkpoint(tmp_path), device="cpu")
    assert any("conv1d" in notice and "left dense" in notice for notice in model.notices)


def test_unexpected_tensors_are_copied_and_reported(changed: Any) -> None:
    model = BlockRunner(Checkpoint(changed("llama", {"mtp.extra.weight": torch.zeros(3)})), device="cpu")
    assert "mtp.extra.weight" in model.stored(None)
    assert any("mtp.extra.weight" in notice for notice in model.notices)


def test_unknown_devices_and_missing_tokenizers_are_refused(folders: dict[str, Path], changed: Any) -> None:
    for device in ("tpu", "meta", "cuda:99" if torch.cuda.is_available() else "cuda"):
        with pytest.raises(RecipeError):
            BlockRunner(Checkpoint(folders["llama"]), device=device)
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_tokenizer(changed("llama"))
    assert load_tokenizer(folders["llama"])("a")["input_ids"]


def test_a_float_model_is_computed_in_float32_on_a_cpu(folders: dict[str, Path]) -> None:
    assert BlockRunner(Checkpoint(folders["llama"]), device="cpu").dtype == torch.float32


@pytest.mark.parametrize("family", ["bloom", "falcon"])
def test_blocks_that_return_more_than_their_hidden_state(family: str, tmp_path: Path) -> None:
    import transformers

    config = transformers.CONFIG_MAPPING[family](
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=256
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = BlockRunner(Checkpoint(tmp_path), device="cpu")
    tokens = documents()[1]
    expected, _ = outputs(plain(tmp_path), model.blocks, tokens)
    model.prepare(embeddings=True)
    hidden: Tensor | None = model.embed(tokens)
    for index in range(3):
        model.load_block(index)
        assert hidden is not None
        hidden = model.run(index, tokens, hidden)
        torch.testing.assert_close(hidden, expected[index], rtol=1e-5, atol=1e-5)
    assert model.extras is not None


def test_a_block_that_needs_more_than_a_hidden_state_is_refused(folders: dict[str, Path]) -> None:
    model = BlockRunner(Checkpoint(folders["llama"]), device="cpu")
    model.prepare(embeddings=False)
    base = model.module.model

    def chained(input_ids: Tensor, use_cache: bool) -> Tensor:
        hidden = base.embed_tokens(input_ids)
        rotary = base.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        hidden, extra = base.layers[0](hidden, position_embeddings=rotary)
        return base.layers[1](hidden, attention_mask=extra, position_embeddings=rotary)

    model.module.forward = chained
    model.extras = [True]
    model.load_block(1)
    with pytest.raises(CheckpointError, match=r"layers\.1: takes more from the block before"):
        model.run(1, documents()[1], torch.zeros(100, 256))
