"""Files and flags beside the weights: adapters, stale configs, float32 tensors, tied heads, and paths with `~`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import quantkit
from benchmarks.census import families
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import load
from quantkit.errors import CheckpointError, NumericError
from quantkit.pipeline.convert import pack
from quantkit.pipeline.quantize import quantize
from quantkit.planning.survey import plan
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import from_mapping, pruning_from_mapping
from tests.command_line import call
from tests.folders import TEXT, edit, gptq, restate, tensors
from tests.tiny_models import write_model

RTN = {"scheme": {"format": "int4"}, "method": "rtn", "clip": "none"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model("llama", tmp_path / "model", torch.float32, num_hidden_layers=1)


@pytest.mark.parametrize(
    ("command", "weights"), [("quantize", "adapter_model.safetensors"), ("prune", "adapter_model.bin"), ("pack", None)]
)
def test_an_adapter_is_left_out_with_its_config(command: str, weights: str | None, model: Path, tmp_path: Path) -> None:
    source = model
    if command == "pack":
        quantize(model, source := tmp_path / "int4", from_mapping(RTN))
    (source / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    if weights is not None and weights.endswith("bin"):
        (source / weights).write_bytes(b"pickle")
    elif weights is not None:
        save_file({"base_model.model.lora_A.weight": torch.zeros(2, 2)}, source / weights)
    out = tmp_path / "out"
    if command == "pack":
        pack(source, out, "gptq")
    else:
        recipe = from_mapping(RTN) if command == "quantize" else pruning_from_mapping({"method": "magnitude"})
        quantize(source, out, recipe)
    report = load(out)
    assert list(out.glob("adapter*")) == []
    assert set(report["left_out"]) == {"adapter_config.json", *([weights] if weights else [])}
    if command != "pack":
        assert sum("adapter_config.json: an adapter that is not merged" in line for line in report["notices"]) == 1


GPTQ = {"bits": 4, "group_size": 128, "sym": True, "desc_act": False}
STALE = {
    "quantize_config.json": GPTQ,
    "quant_config.json": {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"},
    "hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
}


@pytest.mark.parametrize("name", list(STALE))
def test_a_stale_file_beside_dense_weights_is_named(name: str, model: Path) -> None:
    (model / name).write_text(json.dumps(STALE[name]))
    for run in (lambda: plan(model, from_mapping(RTN)), lambda: Checkpoint(model)):
        with pytest.raises(CheckpointError, match=rf"{name} states .*dense: remove {name}, which is out of date$"):
            run()


def compressed(fmt: str, kind: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": kind, "strategy": "channel"}}
    return {"quant_method": "compressed-tensors", "format": fmt, "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("quantization_config", {"quant_method": "gptq", **GPTQ}),
        ("quantization_config", {"quant_method": "modelopt"}),
        ("quantization_config", compressed("float-quantized", "float")),
        ("quantization_config", compressed("dense", "int")),
        ("compression_config", compressed("int-quantized", "int")),
    ],
)
def test_a_stale_section_of_the_config_is_named(name: str, stated: dict[str, Any], model: Path) -> None:
    restate(model / "config.json", **{name: stated})
    with pytest.raises(CheckpointError, match=rf"dense: remove {name} from config\.json, which is out of"):
        plan(model, from_mapping(RTN))


def test_a_stale_section_of_the_former_name_does_not_survive(int4: Path, tmp_path: Path) -> None:
    source = shutil.copytree(int4, tmp_path / "int4")
    restate(source / "config.json", compression_config=compressed("int-quantized", "int"))
    pack(source, tmp_path / "gptq", "gptq")
    made = json.loads((tmp_path / "gptq" / "config.json").read_text())
    assert "compression_config" not in made and made["quantization_config"]["quant_method"] == "gptq"


def test_float32_tensors_stay_with_one_notice(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "out", from_mapping(RTN))
    (notice,) = [line for line in load(tmp_path / "out")["notices"] if "float32" in line]
    assert notice.endswith("for 16 bits use --dense-dtype bfloat16") and "dense tensors stay float32" in notice
    wide = write_model("llama", tmp_path / "wide", torch.float64, num_hidden_layers=1)
    assert any("dense tensors stay float64" in line for line in plan(wide, from_mapping(RTN)).notices)
    half = write_model("llama", tmp_path / "half", torch.bfloat16, num_hidden_layers=1)
    assert not any("float32" in line for line in plan(half, from_mapping(RTN)).notices)


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_dense_dtype_changes_dense_tensors_alone(calibrated: bool, model: Path, calib: Path, tmp_path: Path) -> None:
    recipe = gptq(str(calib)) if calibrated else RTN
    asked = from_mapping({**recipe, "dense_dtype": "bfloat16"})
    planned = plan(model, asked, out=tmp_path / "bf16")
    quantize(model, tmp_path / "f32", from_mapping(recipe))
    quantize(model, tmp_path / "bf16", asked)
    before, after = Checkpoint(tmp_path / "f32"), Checkpoint(tmp_path / "bf16")
    parts = {name for module in before.modules() for name in before.parts(module).values()}
    assert before.names() == after.names() and parts
    for name in before.names():
        own, found = before.get(name), after.get(name)
        assert torch.equal(found, own if name in parts else own.bfloat16()), name
    assert after.config["dtype"] == "bfloat16" and before.config["dtype"] == "float32"
    for name, size in planned.files.items():
        assert (tmp_path / "bf16" / name).stat().st_size == size, name
    assert not any("float32" in line for line in load(tmp_path / "bf16")["notices"])
    call("verify", tmp_path / "bf16")
    pack(tmp_path / "bf16", tmp_path / "packed", "gptq")
    call("verify", tmp_path / "packed", "--against", tmp_path / "bf16")


def test_a_dense_dtype_changes_a_pruned_model_after_the_choice(model: Path, calib: Path, tmp_path: Path) -> None:
    text = {"data": str(calib), "samples": 4, "max_length": 64}
    recipe = {"method": "wanda", "skip": ["lm_head"], "calibration": text}
    quantize(model, tmp_path / "f32", pruning_from_mapping(recipe))
    quantize(model, tmp_path / "bf16", pruning_from_mapping({**recipe, "dense_dtype": "bfloat16"}))
    before, after = Checkpoint(tmp_path / "f32"), Checkpoint(tmp_path / "bf16")
    assert before.names() == after.names() and after.config["dtype"] == "bfloat16"
    assert all(torch.equal(after.get(name), before.get(name).bfloat16()) for name in before.names())
    up = after.get("model.layers.0.mlp.up_proj.weight")
    assert int((up.unflatten(1, (-1, 4)) != 0).sum(-1).max()) == 2


def test_a_dense_dtype_spares_what_transformers_keeps_in_float32(tmp_path: Path) -> None:
    source = write_model("glm4_moe", tmp_path / "model", torch.float32, num_hidden_layers=1)
    asked = from_mapping({**RTN, "scheme": {"format": "int4", "group_size": 32}, "dense_dtype": "float16"})
    planned = plan(source, asked, out=tmp_path / "out", run=RunOptions(min_share=0))
    quantize(source, tmp_path / "out", asked, run=RunOptions(min_share=0))
    made, kept = Checkpoint(tmp_path / "out"), "model.layers.0.mlp.gate.e_score_correction_bias"
    assert made.dtype(kept) == torch.float32 and torch.equal(made.get(kept), Checkpoint(source).get(kept))
    assert made.dtype("model.norm.weight") == torch.float16
    assert f"1 tensors stay float32, because transformers keeps them so: first {kept}" in planned.notices
    for name, size in planned.files.items():
        assert (tmp_path / "out" / name).stat().st_size == size, name


def test_norms_that_transformers_keeps_for_float16_alone_are_cast_to_bfloat16(tmp_path: Path) -> None:
    source = write_model("gpt_oss", tmp_path / "model", torch.float32, num_hidden_layers=1)
    for dtype, expected in (("bfloat16", torch.bfloat16), ("float16", torch.float32)):
        asked = from_mapping(
            {**RTN, "scheme": {"format": "int4", "group_size": 32}, "layout": "gptq", "dense_dtype": dtype}
        )
        quantize(source, tmp_path / dtype, asked, run=RunOptions(min_share=0))
        made = Checkpoint(tmp_path / dtype)
        assert made.dtype("model.layers.0.input_layernorm.weight") == made.dtype("model.norm.weight") == expected
        assert made.dtype("model.layers.0.self_attn.sinks") == getattr(torch, dtype)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_a_value_that_the_dense_dtype_lacks_is_refused(name: str, model: Path, tmp_path: Path) -> None:
    edit(model, lambda found: found[name][3].fill_(1e6))
    with pytest.raises(NumericError, match=rf"{name}: its value 1e\+06 is beyond 65504.*use --dense-dtype bfloat16$"):
        quantize(model, tmp_path / "out", from_mapping({**RTN, "dense_dtype": "float16"}))
    assert not (tmp_path / "out").exists()


def test_a_tied_head_that_differs_is_refused_by_its_flag(model: Path, tmp_path: Path) -> None:
    restate(model / "config.json", tie_word_embeddings=True)
    edit(model, lambda found: found.update({"lm_head.weight": found["model.embed_tokens.weight"].clone()}))
    quantize(model, tmp_path / "same", from_mapping(RTN))
    edit(model, lambda found: found["lm_head.weight"][-1, -1].add_(1))
    says = "lm_head.weight and model.embed_tokens.weight differ, .*tie_word_embeddings: true: set it to false in config"
    with pytest.raises(CheckpointError, match=says):
        quantize(model, tmp_path / "out", from_mapping(RTN))
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("flag", [False, None])
def test_an_untied_model_without_a_head_is_refused_by_its_flag(flag: bool | None, model: Path) -> None:
    restate(model / "config.json", tie_word_embeddings=False)
    edit(model, lambda found: found.pop("lm_head.weight"))
    if flag is None:
        config = json.loads((model / "config.json").read_text())
        del config["tie_word_embeddings"]
        (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r'lm_head.weight is missing .*: set "tie_word_embeddings": true in config'
    ):
        plan(model, from_mapping(RTN))


def test_a_tilde_is_the_home_folder_everywhere(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "calib.txt").write_text(TEXT)
    (tmp_path / "few.yaml").write_text(json.dumps(gptq("~/calib.txt", gptq={})))
    call("quantize", "~/model", "--recipe", "~/few.yaml", "--out=~/one")
    call("plan", "~/model", "--calib", "~/calib.txt:1", "--samples", 8, "--max-length", 64)
    quantkit.quantize("~/model", Path("~/two"), calib=["~/calib.txt"], samples=8, max_length=64, clip="none")
    assert tensors(tmp_path / "one") == tensors(tmp_path / "two")
    call("verify", "~/one", "--against", "~/two")
    call("inspect", "~/one")
    call("eval", "ppl", "~/one", "--data", "~/calib.txt", "--window", 64)
    assert quantkit.verify("~/one").ok
    quantkit.pack("~/one", layout="gptq", out="~/three")
    assert Checkpoint(tmp_path / "three").modules()


#: File beside the weights -> how it adds tokens to those of the tokenizer.
ADDS: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "tokenizer.json": lambda ids: {"added_tokens": [_added(at) for at in ids]},
    "tokenizer_config.json": lambda ids: {"added_tokens_decoder": {str(at): {"content": f"<{at}>"} for at in ids}},
    "added_tokens.json": lambda ids: {f"<{at}>": at for at in ids},
    "special_tokens_map.json": lambda ids: {"additional_special_tokens": [f"<{at}>" for at in ids]},
}


def _added(at: int) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": at, "content": f"<{at}>", "special": True, **plain}


@pytest.mark.parametrize("file", ADDS)
def test_tokens_without_an_embedding_are_noted_although_no_text_is_read(file: str, tmp_path: Path) -> None:
    folder = families.write("llama", tmp_path / "m")
    known = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    path, more = folder / file, ADDS[file]([*range(257, 386)])
    if file == "tokenizer.json":
        more["added_tokens"] = known + more["added_tokens"]
    restate(path, **more)
    notices = quantkit.plan(folder, method="rtn", group_size=64).notices
    assert "384 embeddings lack, the first is '<384>' (2 in all)" in "\n".join(map(str, notices))


@pytest.mark.parametrize(
    "left, says",
    [
        ([], "the source: has no tokenizer that transformers can read"),
        (["tokenizer_config.json"], "the source: has no tokenizer that transformers can read"),
        (["tokenizer/tokenizer.json"], "the source: has no tokenizer that transformers can read"),
        (["tokenizer.model"], "the source: the tokenizer needs the Python package sentencepiece"),
    ],
)
def test_a_source_whose_tokenizer_is_not_there_or_not_read_is_noted(
    left: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = families.write("llama", tmp_path / "m")
    for path in folder.glob("tokenizer*"):
        if path.name not in left:
            path.unlink()
    for name in left:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    monkeypatch.setattr("quantkit.text.tokenizer.find_spec", lambda package: None)
    notes = [str(note) for note in quantkit.plan(folder, method="rtn", group_size=64).notices]
    assert any(note.startswith(says) for note in notes), notes


def test_a_source_that_no_token_ends_is_noted(tmp_path: Path) -> None:
    folder = families.write("llama", tmp_path / "m")
    restate(folder / "generation_config.json", eos_token_id=[256, 999])
    notes = [str(note) for note in quantkit.plan(folder, method="rtn", group_size=64).notices]
    assert "eos_token_id 999 is none of 384 embeddings: it ends no text" in notes
