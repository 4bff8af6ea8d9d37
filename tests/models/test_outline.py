"""Which stored tensor is which part of a model: blocks, linears, and what stays dense."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from benchmarks.census import families
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import label
from quantkit.errors import CheckpointError
from quantkit.models.experts import CALLS
from quantkit.models.families import EXPERT_CLASSES, FAMILIES, family_of
from quantkit.models.outline import LanguageModel
from quantkit.models.weights import load_dense_model
from quantkit.recipes.recipe import from_mapping, goal_of
from tests.folders import edit, restate, stored
from tests.tiny_models import FAMILIES as TINY, write_model


@pytest.mark.parametrize("family", ["git", "phi4_multimodal"])
def test_towers_are_no_blocks_and_stay_dense(family: str, tmp_path: Path) -> None:
    model = LanguageModel(Checkpoint(families.write(family, tmp_path / "m")), torch.float32)
    tower = {"git": "git.image_encoder.", "phi4_multimodal": "model.embed_tokens_extend."}[family]
    inside = [name for name in model.linears if name.startswith(tower) and ".encoder" in name]
    assert not any(path.startswith(tower) for path in model.blocks)
    assert len(inside) > 10 and {model.kept_dense.get(name) for name in inside} == {"outside the language model"}


@pytest.mark.parametrize("family", TINY)
def test_every_tensor_is_in_one_block_or_outside(family: str, folders: dict[str, Path]) -> None:
    src = Checkpoint(folders[family])
    model = LanguageModel(src, torch.float32)
    parts = [model.stored(0), model.stored(1), model.stored(None)]
    assert sorted(name for part in parts for name in part) == sorted(src.names())
    assert len(parts[0]) == len(parts[1]) > 0 and any("embed" in name for name in parts[2])
    for linear, shape in model.linears.items():
        assert linear in model.tied or src.shape(f"{linear}.weight") == shape
    assert not model.notices


def test_a_head_is_skipped_under_either_of_its_names(folders: dict[str, Path]) -> None:
    model = LanguageModel(Checkpoint(folders["gpt_neox"]), torch.float32)
    assert model.paths["embed_out"] == "lm_head"
    for pattern in ("lm_head", "embed_out"):
        assert goal_of(from_mapping({"skip": [pattern]}), "embed_out", model.paths["embed_out"]) is None
    everything = from_mapping({"skip": [], "overrides": {"lm_head": "fp6:channel"}})
    goal = goal_of(everything, "embed_out", model.paths["embed_out"])
    assert goal is not None and label(goal) == "fp6:channel"


def test_a_head_beside_a_table_that_is_called_the_head_stays_dense(tmp_path: Path) -> None:
    """transformers calls FSMT's table of target words its output head."""
    model = LanguageModel(Checkpoint(write_model("fsmt", tmp_path / "m")), torch.float32)
    head = "model.decoder.output_projection"
    assert model.linears[head] == (257, 128) and model.kept_dense == {head: "the output head"}


def test_a_router_of_many_experts_stays_dense_where_experts_have_names(tmp_path: Path) -> None:
    """With fewer than 64 experts it stays dense for its size."""
    import transformers

    sizes = {"d_model": 64, "d_ff": 64, "num_layers": 2, "num_sparse_encoder_layers": 1, "num_heads": 1}
    config = transformers.SwitchTransformersConfig(**sizes, vocab_size=64, num_experts=64)
    transformers.SwitchTransformersForConditionalGeneration(config).save_pretrained(tmp_path)
    model = LanguageModel(Checkpoint(tmp_path), torch.float32)
    routers = [name for name in model.linears if ".router." in name]
    assert routers and {model.kept_dense.get(name) for name in routers} == {"a router"}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "no_such_model"},
        {"hidden_size": "many"},
        {"num_attention_heads": 0},
        {"hidden_act": "os.system"},
        {"rope_scaling": {"rope_type": "unheard_of"}},
    ],
)
def test_a_config_that_cannot_be_built_gives_a_one_line_error(config: dict[str, Any], changed: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        LanguageModel(Checkpoint(changed("llama", **config)), torch.float32)
    assert "\n" not in str(caught.value)


def test_matrices_outside_linears_are_reported(tmp_path: Path) -> None:
    model = LanguageModel(Checkpoint(families.write("jamba", tmp_path / "m")), torch.float32)
    assert any("conv1d" in notice and "left dense" in notice for notice in model.notices)


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("musicgen", "is no model that writes text"),
        ("qwen2_5_omni", "transformers names no embeddings of Qwen2_5Omni"),
        ("shieldgemma2", "no model that writes text"),
        ("diffusion_gemma", "by diffusion"),
    ],
)
def test_a_model_of_several_texts_or_none_is_refused_by_its_config(family: str, says: str, tmp_path: Path) -> None:
    import transformers

    transformers.CONFIG_MAPPING[family]().save_pretrained(tmp_path)
    save_file({"a.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=says):
        LanguageModel(Checkpoint(tmp_path), torch.float32)


def test_an_encoder_decoder_without_named_embeddings_is_rounded(tmp_path: Path) -> None:
    folder = families.write("pp_formulanet", tmp_path / "m")
    assert LanguageModel(Checkpoint(folder), torch.float32).ends[0] == ("", "")
    assert quantkit.plan(folder, method="rtn", group_size=64).verdict.refusal is None


def test_what_text_alone_never_calls_is_told(tmp_path: Path) -> None:
    model = LanguageModel(Checkpoint(families.write("ernie4_5_vl_moe", tmp_path / "m")), torch.float32)
    said = {name: model.why_uncalled(name) for name in model.linears}
    images = [name for name, expert in model.experts.items() if ".vision_moe." in expert.owner]
    assert images and {said[name] for name in images} == {"text alone never calls vision experts"}
    assert all(why is None for name, why in said.items() if name not in images)


def test_each_entry_of_the_families_names_what_is_there() -> None:
    from transformers import CONFIG_MAPPING

    assert FAMILIES.keys() <= set(CONFIG_MAPPING.keys())
    assert {form.call for form in EXPERT_CLASSES.values()} <= CALLS.keys()
    assert family_of("llama") == family_of("no_such_family")


def sharded(folder: Path, change: dict[str, torch.Tensor], forget: str = "", ask: str = "", lose: bool = False) -> Path:
    """Write a tiny Llama whose one file has an index, with more tensors, and an entry less or more in the index.

    With `lose`, the file lacks the tensor that the index asks for.
    """
    path = families.write("llama", folder) / "model.safetensors"
    tensors = {name: tensor for name, tensor in (load_file(path) | change).items() if not lose or name != ask}
    save_file(tensors, path, metadata={"format": "pt"})
    names = [*(name for name in tensors if name not in (forget, *change)), *([ask] if ask else [])]
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_an_index_that_lacks_a_tensor_of_the_model_is_completed_and_other_leftovers_stay_out(tmp_path: Path) -> None:
    old = {"model.layers.7.mlp.up_proj.weight": torch.ones(4, 4)}
    src = Checkpoint(sharded(tmp_path / "m", old, forget="model.norm.weight", ask="model.rotary_emb.inv_freq"))
    assert "model.norm.weight" not in src.names()
    LanguageModel(src, torch.float32).require_complete()
    assert "model.norm.weight" in src.names() and not old.keys() & set(src.names())
    assert len(load_dense_model(Checkpoint(tmp_path / "m")).state_dict()) >= len(src.names())
    needed = sharded(tmp_path / "needed", {}, ask="model.layers.1.mlp.up_proj.weight", lose=True)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is in the index, and its file does not hold it"):
        LanguageModel(Checkpoint(needed), torch.float32).require_complete()


def rewritten(
    folder: Path, name: Callable[[str], str | None], more: dict[str, torch.Tensor], **config: Any
) -> Checkpoint:
    """Write a tiny Llama under other names (None: without the tensor), with more tensors and keys of config.json."""
    path = families.write("llama", folder) / "model.safetensors"
    tensors = {named: tensor for stored, tensor in load_file(path).items() if (named := name(stored)) is not None}
    save_file(tensors | more, path, metadata={"format": "pt"})
    restate(folder / "config.json", **config)
    return Checkpoint(folder)


def unmerged(name: str) -> str:
    return f"base_model.model.{name}".replace("up_proj.", "up_proj.base_layer.")


def one(name: str, width: int = 128) -> dict[str, torch.Tensor]:
    return {name: torch.ones(width)}


ATTENTION, LORA = "model.layers.0.self_attn", "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight"
MERGE = r"is not part of the model.*: save what model\.merge_and_unload"
DECLARE = r"is not part of the model.* declare it in config\.json"
PACKED = {f"{ATTENTION}.q_proj.{part}": torch.ones(8, 8) for part in ("trellis", "suh")}


@pytest.mark.parametrize(
    ("name", "more", "config", "says"),
    [
        ("student.{}".format, {}, {}, r"student\.model\.\S+, as stored, is model\.\S+ in \w+: save"),
        (unmerged, one(LORA), {}, r"adapter of PEFT that is not merged.*merge_and_unload"),
        (str, one(f"{ATTENTION}.q_proj.lora_A.weight"), {}, MERGE),
        (str, one(f"{ATTENTION}.q_proj.lora_magnitude_vector"), {}, MERGE),
        (str, one(f"{ATTENTION}.ia3_l"), {}, MERGE),
        (
            lambda name: None if "lm_head" in name else name,
            {},
            {"architectures": ["LlamaModel"]},
            r"config\.json names LlamaModel, use the model that writes text",
        ),
        (str, one("model.layers.1.self_attn.q_proj.bias"), {}, DECLARE),
        (str, one("lm_head.bias"), {}, DECLARE),
        (str, one("model.layers.0.self_attn.q_norm.weight"), {}, DECLARE),
        (
            lambda name: None if "q_proj" in name else name,
            PACKED,
            {},
            r"_proj\.\w+ is stored in place of a weight, and no quantization_config",
        ),
    ],
)
def test_tensors_that_are_not_those_of_the_model_are_named_with_their_cause(
    name: Any, more: dict[str, torch.Tensor], config: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        LanguageModel(rewritten(tmp_path / "m", name, more, **config), torch.float32).require_complete()
    assert "save_pretrained" not in str(caught.value) or says != DECLARE


@pytest.mark.parametrize(
    ("begin", "head"),
    [
        *(("model.model.", head) for head in ("model.lm_head", "lm_head")),
        *(("language_model.model.", "language_model.lm_head"), ("model.language_model.", "lm_head")),
    ],
)
def test_names_that_begin_twice_or_as_in_a_model_of_images_are_written_as_engines_read_them(
    begin: str, head: str, tmp_path: Path
) -> None:
    src = rewritten(tmp_path / "m", lambda name: re.sub(r"^model\.", begin, name).replace("lm_head", head), {})
    LanguageModel(src, torch.float32).require_complete()
    assert src.wrapped is not None and {"lm_head.weight", "model.norm.weight"} < set(src.names())


@pytest.mark.parametrize("family", ["llama", "falcon", "gemma3n_text"])
def test_names_of_a_decoder_without_its_head_are_written_as_engines_read_them(family: str, tmp_path: Path) -> None:
    def bare(path: Path) -> dict[str, torch.Tensor]:
        stored = load_file(path)
        save_file({re.sub(r"^(model|transformer)\.", "", name): tensor for name, tensor in stored.items()}, path)
        return stored

    folder = families.write(family, tmp_path / "m")
    whole = bare(folder / "model.safetensors")
    src = Checkpoint(folder)
    LanguageModel(src, torch.float32).require_complete()
    assert set(src.names()) == set(whole) and "the class of its head" in str(src.notices)
    quantkit.quantize(folder, out := tmp_path / "out", method="rtn", group_size=64)
    (out / "model.safetensors.index.json").unlink()
    whole = bare((out / "model-00001-of-00001.safetensors").rename(out / "model.safetensors"))
    assert not whole.keys() & set(Checkpoint(out).names()) - {"lm_head.weight"}  # its config names modules so


def test_tied_embeddings_that_are_stored_as_the_head_alone_are_written_as_engines_read_them(tmp_path: Path) -> None:
    folder = write_model("qwen2", tmp_path / "m")
    table = stored(folder)["model.embed_tokens.weight"]
    # as safetensors' save_model does
    edit(folder, lambda found: found.update({"lm_head.weight": found.pop("model.embed_tokens.weight")}))
    report = quantkit.quantize(folder, out := tmp_path / "out", method="rtn", group_size=64)
    found = stored(out)
    assert torch.equal(found["model.embed_tokens.weight"], table) and "lm_head.weight" not in found
    assert "lm_head.weight is written as model.embed_tokens.weight, to which it is tied" in report["notices"]


def test_zero_biases_that_the_model_lacks_are_left_out_and_others_are_refused(tmp_path: Path) -> None:
    biases = {"model.layers.0.mlp.up_proj.bias": torch.zeros(256), "model.layers.1.mlp.up_proj.bias": torch.zeros(256)}
    src = rewritten(tmp_path / "zero", str, biases)
    model = LanguageModel(src, torch.float32)
    model.require_complete()
    assert not biases.keys() & set(src.names()) and any("left out, as it is zero" in line for line in src.notices)
    biases["model.layers.1.mlp.up_proj.bias"][3] = 1e-5
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.bias is not part of the model"):
        LanguageModel(rewritten(tmp_path / "one", str, biases), torch.float32).require_complete()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
@pytest.mark.parametrize(("family", "part"), [("llama", "up_proj.weight"), ("mixtral", "w1.weight")])
def test_codes_that_no_configuration_explains_are_refused(
    family: str, part: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = families.write(family, tmp_path / "m") / "model.safetensors"
    many = 2 if dtype == torch.uint8 else 1  # codes in a byte
    codes = {name: t.to(dtype)[..., ::many] for name, t in load_file(path).items() if name.endswith(part)}
    save_file({**load_file(path), **{name: t.contiguous() for name, t in codes.items()}}, path)
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(CheckpointError, match=rf"{part} is stored as {kind}, and no quantization_config explains it"):
        LanguageModel(Checkpoint(tmp_path / "m"), torch.float32)


MASKS: dict[str, dict[str, torch.Tensor]] = {
    "gpt2": {"attn.bias": torch.ones(1, 1, 8, 8), "attn.masked_bias": torch.tensor(-1e4)},
    "gpt_neo": {
        "attn.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),
        "attn.attention.masked_bias": torch.ones(()),
    },
    "gptj": {"attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool), "attn.masked_bias": torch.ones(())},
    "codegen": {"attn.causal_mask": torch.ones(1, 1, 8, 8).byte(), "attn.embed_positions": torch.ones(8, 8)},
}


@pytest.mark.parametrize("family", MASKS)
def test_masks_that_older_releases_stored_are_no_stray_tensors(family: str, tmp_path: Path) -> None:
    path = families.write(family, tmp_path / "m") / "model.safetensors"
    masks = {f"transformer.h.{layer}.{name}": t.clone() for name, t in MASKS[family].items() for layer in (0, 1)}
    save_file(load_file(path) | masks, path, metadata={"format": "pt"})
    LanguageModel(Checkpoint(tmp_path / "m"), torch.float32).require_complete()
