"""Running block by block gives the activations of the whole model, for every family."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, RecipeError
from quantkit.models.block_runner import BlockRunner
from quantkit.models.meta_model import float32_states
from quantkit.models.passing import Passed, State, pack
from quantkit.models.whole_model import load_dense_model
from quantkit.recipes.goals import label
from quantkit.recipes.recipe import from_mapping, goal_of
from quantkit.text.tokenizer import load_tokenizer
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
    states = [model.embed(tokens) for tokens in docs]
    model.drop_embeddings()
    for index, path in enumerate(model.blocks):
        model.load_block(index)
        loaded = {n for n, p in model.module.named_parameters() if p.device.type != "meta"}
        others = tuple(f"{other}." for other in model.blocks if other != path)
        assert not any(name.startswith(others) for name in loaded)
        table = model.module.get_input_embeddings().weight
        assert table.untyped_storage().nbytes() == table[0].nbytes  # one row of zeros
        outs = [model.run(index, tokens, state) for tokens, state in zip(docs, states, strict=True)]
        model.unload_block(index)
        states = [out for out in outs if out is not None]
        for document, out in enumerate(states):
            torch.testing.assert_close(out.hidden, expected[document][index], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["deepseek_v4", "gemma3n_text"])
def test_streams_of_hidden_states_stay_together(family: str, tmp_path: Path) -> None:
    folder = families.write(family, tmp_path / "m", torch.float32)
    model, whole = BlockRunner(Checkpoint(folder), device="cpu"), plain(folder)
    model.prepare(embeddings=True)
    for tokens in documents():
        state = model.embed(tokens)
        for index, expected in enumerate(outputs(whole, model.blocks[:2], tokens)[0]):
            model.load_block(index)
            output = model.run(index, tokens, state)
            assert output is not None and output.hidden.shape[:1] == tokens.shape and output.hidden.ndim == 3
            state, hidden = output, output.hidden
            found = hidden[None, :, 0] if family == "gemma3n_text" else hidden  # `outputs` takes its first stream
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "carried"),
    [
        ("glm_moe_dsa", {0: 1}),  # the tokens that an indexer chose, for blocks without one
        ("zaya", {0: 1}),  # states of the router
        ("gemma3n_text", {0: 2, 1: 4, 2: 4}),  # keys and values, in a mapping
        ("mistral_large4", {0: 3, 1: 5, 2: 5}),  # both
        ("bloom", {0: 0}),  # attention weights that nothing uses
        ("cpmant", {0: 0}),  # 32 tokens of a prompt come before the text
        ("prophetnet", {0: 0}),  # predicted streams follow the text
        ("xlnet", {0: 0}),  # the batch is the second dimension
    ],
)
def test_what_blocks_pass_on_reaches_later_ones(family: str, carried: dict[int, int], tmp_path: Path) -> None:
    folder = families.write(family, tmp_path / "m", torch.float32)
    model, whole, docs = BlockRunner(Checkpoint(folder), device="cpu"), plain(folder), documents()[1:]
    model.prepare(embeddings=True)
    states: list[State | None] = [model.embed(tokens) for tokens in docs]
    model.drop_embeddings()
    expected = [outputs(whole, model.blocks, tokens)[0] for tokens in docs]
    for index in range(len(model.blocks)):
        model.load_block(index)
        for document, tokens in enumerate(docs):
            state = states[document]
            assert state is not None
            before = state.hidden.clone(), [tensor.clone() for tensor in state.passed]
            states[document] = found = model.run(index, tokens, state)
            assert found is not None
            assert torch.equal(before[0], state.hidden) and all(map(torch.equal, before[1], state.passed))
            streams = found.hidden[:, 0] if family == "gemma3n_text" else found.hidden  # `outputs` has the first one
            reference = expected[document][index]
            torch.testing.assert_close(streams, reference.reshape(streams.shape), rtol=1e-5, atol=1e-5)
            if index in carried:
                assert len(found.passed) == carried[index]
        assert json.loads(json.dumps(model.forms[index])) == model.forms[index]
        model.unload_block(index)


@pytest.mark.parametrize(
    ("family", "text"), [("blip", "text_decoder"), ("blip-2", "language_model"), ("kosmos-2", "text_model")]
)
def test_a_model_that_asks_for_an_image_runs_through_its_language_model(family: str, text: str, tmp_path: Path) -> None:
    folder = families.write(family, tmp_path / "m", torch.float32)
    model, tokens = BlockRunner(Checkpoint(folder), device="cpu"), documents()[2]
    assert model.text_path == text
    whole = plain(folder).get_submodule(text)
    expected, _ = outputs(whole, [path.removeprefix(f"{text}.") for path in model.blocks], tokens)
    model.prepare(embeddings=True)
    state = model.embed(tokens)
    model.drop_embeddings()
    for index, reference in enumerate(expected):
        model.load_block(index)
        found = model.run(index, tokens, state)
        assert found is not None
        state = found
        torch.testing.assert_close(state.hidden, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["git", "phi4_multimodal"])
def test_towers_are_no_blocks_and_stay_dense(family: str, tmp_path: Path) -> None:
    model = BlockRunner(Checkpoint(families.write(family, tmp_path / "m")), device="cpu")
    tower = {"git": "git.image_encoder.", "phi4_multimodal": "model.embed_tokens_extend."}[family]
    inside = [name for name in model.linears if name.startswith(tower) and ".encoder" in name]
    assert not any(path.startswith(tower) for path in model.blocks)
    assert len(inside) > 10 and {model.kept_dense.get(name) for name in inside} == {"outside the language model"}


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


@pytest.mark.parametrize(
    ("family", "says"), [("shieldgemma2", "no model that writes text"), ("diffusion_gemma", "is an encoder-decoder")]
)
def test_a_model_of_another_kind_is_refused_by_its_config(family: str, says: str, tmp_path: Path) -> None:
    families.tiny_config(family).save_pretrained(tmp_path)
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        BlockRunner(Checkpoint(tmp_path), device="cpu")


def test_a_run_can_start_in_the_middle_without_embeddings(folders: dict[str, Path], tmp_path: Path) -> None:
    gemma4 = families.write("gemma4", tmp_path / "m", torch.float32)  # each block has inputs of its own
    for folder in (folders["llama"], folders["opt"], folders["gemma2"], gemma4):
        model = BlockRunner(Checkpoint(folder), device="cpu")
        tokens = documents()[1]
        expected, _ = outputs(plain(folder), model.blocks, tokens)
        model.prepare(embeddings=False)
        model.load_block(1)
        model.forms[0] = {"returned": None, "left": {}}
        out = model.run(1, tokens, State(expected[0]))
        assert out is not None
        torch.testing.assert_close(out.hidden, expected[1], rtol=1e-5, atol=1e-5)


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
    assert torch.equal(ours.embed(tokens).hidden, same.embed(tokens).hidden)


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
    state: State | None = model.embed(tokens)
    for index in range(3):
        model.load_block(index)
        assert state is not None
        state = model.run(index, tokens, state)
        assert state is not None and not state.passed
        torch.testing.assert_close(state.hidden, expected[index], rtol=1e-5, atol=1e-5)
    assert len(model.forms[0]["returned"]) == 1


def chain(model: BlockRunner, between: Callable[[Tensor], Tensor | None]) -> None:
    """Let the model hand `between(extra)`, of an extra that block 0 returns, to block 1 as its mask."""
    base = model.module.model

    def chained(input_ids: Tensor, use_cache: bool) -> Tensor:
        hidden = base.embed_tokens(input_ids)
        rotary = base.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        hidden, extra = base.layers[0](hidden, position_embeddings=rotary)
        return base.layers[1](hidden, attention_mask=between(extra), position_embeddings=rotary)

    model.text.forward = chained


@pytest.mark.parametrize("between", [lambda extra: extra, lambda extra: extra + 1, lambda extra: extra[..., :1]])
def test_a_block_that_takes_what_was_not_stored_is_refused(
    between: Callable[[Tensor], Tensor], folders: dict[str, Path]
) -> None:
    model = BlockRunner(Checkpoint(folders["llama"]), device="cpu")
    model.prepare(embeddings=False)
    chain(model, between)
    model.forms[0] = {"returned": [{"unused": 0}], "left": {}}
    model.load_block(1)
    with pytest.raises(CheckpointError, match=r"layers\.1: takes from an earlier block .* use --method rtn"):
        model.run(1, documents()[1], State(torch.zeros(100, 256)))


@pytest.mark.parametrize(("between", "stored"), [(lambda extra: extra * 0, 1), (lambda extra: None, 0)])
def test_a_returned_value_is_stored_if_the_model_uses_it_on_the_way(
    between: Callable[[Tensor], Tensor | None], stored: int, folders: dict[str, Path]
) -> None:
    model = BlockRunner(Checkpoint(folders["llama"]), device="cpu")
    model.prepare(embeddings=True)
    tokens = documents()[2]
    block = model.module.get_submodule(model.blocks[0])
    state = model.embed(tokens)
    chain(model, between)
    visit, plain_forward = block.forward.func, block.forward.args[1]
    block.forward = partial(
        visit, 0, lambda *args, **kwargs: (plain_forward(*args, **kwargs), torch.ones(1, 1, 17, 17))
    )
    model.load_block(0)
    found = model.run(0, tokens, state)
    assert found is not None and len(found.passed) == stored


def test_code_between_blocks_that_works_in_place_leaves_the_stored_state(folders: dict[str, Path]) -> None:
    model = BlockRunner(Checkpoint(folders["llama"]), device="cpu")
    model.prepare(embeddings=False)
    tokens = documents()[2]
    model.forms[0] = {"returned": [{"tensor": 0}], "left": {}}
    chain(model, lambda extra: extra.zero_())
    state = State(torch.ones(17, 256), (torch.ones(1, 1, 17, 17),))
    model.load_block(1)
    first, second = model.run(1, tokens, state), model.run(1, tokens, state)
    assert first is not None and second is not None and torch.equal(first.hidden, second.hidden)
    assert state.hidden.eq(1).all() and state.passed[0].eq(1).all()


def test_a_value_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"passes on a value of type object, .*: use --method rtn"):
        pack(Passed(torch.zeros(1, 1), [(torch.zeros(1), object())], {}), frozenset())


def test_states_that_the_code_needs_in_float32_stay_so(tmp_path: Path) -> None:
    src = Checkpoint(families.write("inkling2_text", tmp_path / "m"))
    model = BlockRunner(src, device="cpu")
    model.dtype = torch.bfloat16
    model._in_float32 = float32_states(model.module, torch.bfloat16)
    model.load_block(0)
    dtypes = {name: p.dtype for name, p in model.module.get_submodule(model.blocks[0]).named_parameters()}
    assert dtypes["mlp.gate.weight"] == torch.float32 and dtypes["self_attn.q_proj.weight"] == torch.bfloat16
    assert float32_states(model.module, torch.float32) is None
