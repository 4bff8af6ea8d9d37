"""Tensors outside the model, such as draft layers and heads: stated as dense, or refused with a way out that helps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from benchmarks.census import families
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError
from tests.checkpoint.low_bit import write_fp8
from tests.folders import restate
from tests.tiny_models import write_model

DRAFT = "model.layers.2"


def model(family: str, folder: Path, moved: dict[str, str], extra: dict[str, Tensor], **config: Any) -> Path:
    """Write the tiny model of a family with layers copied to other names, further tensors and keys of config.json."""
    tensors = load_file(families.write(family, folder) / "model.safetensors")
    for old, new in moved.items():
        tensors |= {new + name.removeprefix(old): t for name, t in tensors.items() if name.startswith(f"{old}.")}
    tensors |= {name: tensor.bfloat16() for name, tensor in extra.items()}
    save_file({name: t.clone() for name, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    restate(folder / "config.json", **config)
    return folder


def quantized(source: Path, out: Path, layout: str) -> Any:
    return quantkit.quantize(source, out, method="rtn", clip="none", group_size=64, layout=layout, min_share=0)


def dense_in(folder: Path, names: list[str]) -> list[str]:
    """Return those of `names` that the public config states as dense, as engines match them."""
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    if stated["quant_method"] == "gptq":
        tests = [re.compile(key[2:]).match for key in stated["dynamic"] if key.startswith("-:")]
    elif stated["quant_method"] == "awq":
        tests = [(lambda name, part=part: part in name) for part in stated["modules_to_not_convert"]]
    else:
        tests = [re.compile(e[3:] if e.startswith("re:") else re.escape(e) + "$").match for e in stated["ignore"]]
    return [name for name in names if any(test(name) for test in tests)]


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a GLM-4.5 of two layers with a draft layer, at a depth that transformers does not list."""
    extra = {f"{DRAFT}.eh_proj.weight": torch.ones(128, 256), f"{DRAFT}.shared_head.head.weight": torch.ones(384, 128)}
    moved = {"model.layers.1": DRAFT}
    return model("glm4_moe", tmp_path_factory.mktemp("glm") / "m", moved, extra, num_nextn_predict_layers=1)


@pytest.mark.parametrize("layout", ["compressed-tensors", "awq"])
def test_a_draft_layer_of_a_shallower_relative_is_stated_as_dense(layout: str, glm: Path, tmp_path: Path) -> None:
    report = quantized(glm, tmp_path / "out", layout)
    asked = [f"{DRAFT}.{part}" for part in ("eh_proj", "shared_head.head", "mlp.experts.3.up_proj", "self_attn.o_proj")]
    # names of vLLM's own: of joined linears, of all experts, of the head
    asked += [f"{DRAFT}.{part}" for part in ("self_attn.qkv_proj", "mlp.experts", "head", "mtp_block.self_attn.o_proj")]
    assert dense_in(tmp_path / "out", asked) == asked
    assert not dense_in(tmp_path / "out", ["model.layers.1.self_attn.o_proj", "model.layers.1.mlp.experts.0.up_proj"])
    assert report["outside"] == 22 and "vLLM" in report["readers"]
    assert any(line.startswith(f"{DRAFT}.eh_proj.weight: not part of the model") for line in report["notices"])
    assert len(Checkpoint(tmp_path / "out").shape(f"{DRAFT}.self_attn.o_proj.weight")) == 2


def test_pack_states_draft_layers_that_the_source_does_not(glm: Path, tmp_path: Path) -> None:
    quantized(glm, tmp_path / "gptq", "gptq")
    path = tmp_path / "gptq" / "config.json"
    config = json.loads(path.read_text())
    stated = config["quantization_config"]
    stated["dynamic"] = {key: value for key, value in stated["dynamic"].items() if "layers\\.2" not in key}
    del stated["quantkit"]
    path.write_text(json.dumps(config))
    (tmp_path / "gptq" / "quantkit_report.json").unlink()
    report = quantkit.pack(tmp_path / "gptq", tmp_path / "out", "compressed-tensors")
    asked = [f"{DRAFT}.eh_proj", f"{DRAFT}.mlp.experts", f"{DRAFT}.self_attn.qkv_proj"]
    assert dense_in(tmp_path / "out", asked) == asked and report["outside"] == 22
    assert any("not part of the model" in line for line in report["notices"])


def test_experts_of_a_draft_in_one_tensor_are_stated_as_dense(tmp_path: Path) -> None:
    experts = {"mtp.layers.0.mlp.experts.gate_up_proj": torch.ones(4, 256, 128), "mtp.fc.weight": torch.ones(128, 256)}
    report = quantized(model("qwen3_5_moe_text", tmp_path / "m", {}, experts), tmp_path / "out", "compressed-tensors")
    asked = ["mtp.fc", "mtp.layers.0.mlp.experts", "mtp.layers.0.mlp.experts.0.gate_proj"]
    assert dense_in(tmp_path / "out", asked) == asked and report["outside"] == 2


def test_a_pattern_that_also_matches_a_draft_layer_changes_only_the_model(glm: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"override": {".*o_proj": "int4:g32"}, "group_size": 64, "min_share": 0}
    report = quantkit.quantize(glm, tmp_path / "out", method="rtn", clip="none", layout="gptq", **changes)
    made = Checkpoint(tmp_path / "out")
    assert {made.scheme(f"model.layers.{i}.self_attn.o_proj").group_size for i in (0, 1)} == {32}
    asked = [f"{DRAFT}.self_attn.o_proj"]
    assert asked[0] not in made.modules() and dense_in(tmp_path / "out", asked) == asked and "vLLM" in report["readers"]
    dynamic = list(json.loads((tmp_path / "out/config.json").read_text())["quantization_config"].get("dynamic", {}))
    assert dynamic == sorted(dynamic, key=lambda key: key.startswith("+:")), "the first pattern that matches decides"


def test_a_draft_layer_of_an_fp8_source_is_decoded_and_stated_as_dense(glm: Path, tmp_path: Path) -> None:
    low, exact = write_fp8(glm, tmp_path)
    report = quantized(low, tmp_path / "out", "compressed-tensors")
    made, expected = Checkpoint(tmp_path / "out"), load_file(exact / "model.safetensors")
    name = f"{DRAFT}.mlp.experts.1.up_proj"
    assert report["outside"] == 22 and dense_in(tmp_path / "out", [name]) == [name]
    assert torch.equal(made.get(f"{name}.weight"), expected[f"{name}.weight"])
    assert not [each for each in made.names() if each.startswith(DRAFT) and "scale" in each]


@pytest.mark.parametrize("layout", ["humming", "awq"])
def test_a_draft_layer_inside_a_wrapper_and_in_a_file_of_its_own_is_stated(layout: str, tmp_path: Path) -> None:
    source = families.write("glm_ocr", tmp_path / "m", draft=True)
    tensors = load_file(source / "model.safetensors")
    start = "model.language_model.layers.2."
    draft = {name: tensor for name, tensor in tensors.items() if name.startswith(start)}
    parts = {"model-1.safetensors": {n: t for n, t in tensors.items() if n not in draft}, "mtp.safetensors": draft}
    (source / "model.safetensors").unlink()
    for file, some in parts.items():
        save_file(some, source / file, metadata={"format": "pt"})
    places = {name: file for file, some in parts.items() for name in some}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    options: Any = {"format": "fp6"} if layout == "humming" else {"group_size": 64}
    report = quantkit.quantize(
        source, tmp_path / "out", method="rtn", clip="none", layout=layout, min_share=0, **options
    )
    asked = [f"{start}{part}" for part in ("eh_proj", "self_attn.o_proj", "self_attn.qkv_proj", "mlp.gate_up_proj")]
    asked.append("model.layers.2.mtp_block.self_attn.o_proj")  # vLLM's own name
    assert dense_in(tmp_path / "out", asked) == asked and report["outside"] == sum(t.ndim > 1 for t in draft.values())
    assert not dense_in(tmp_path / "out", ["model.language_model.layers.1.self_attn.o_proj"])


STRAY: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "v_head.summary.weight": ({"v_head.summary.bias": torch.ones(1)}, {"architectures": ["AValueHead"]}, "num_labels"),
    "score.weight": ({}, {"num_labels": 1}, "num_labels"),
    "model.layers.2.mlp.up_proj.weight": ({}, {"num_nextn_predict_layers": 1}, '"num_hidden_layers": 3'),
    "mtp.fc.weight": ({"mtp.norm.weight": torch.ones(128)}, {"mtp_num_layers": 1}, '"num_nextn_predict_layers": 1'),
}


@pytest.mark.parametrize("name", STRAY)
def test_a_stray_tensor_is_refused_by_name_and_copied_if_config_json_declares_it(name: str, tmp_path: Path) -> None:
    more, declared, way = STRAY[name]
    source = model("llama", tmp_path / "m", {}, {name: torch.ones(2, 128), **more})
    with pytest.raises(CheckpointError, match="is not part of the model") as caught:
        quantized(source, tmp_path / "out", "compressed-tensors")
    text = str(caught.value)
    assert "\n" not in text and "download" not in text and way in text and "save_pretrained" in text
    assert not (tmp_path / "out").exists() and all(other in text for other in (name, *more))
    restate(source / "config.json", **declared)
    report = quantized(source, tmp_path / "out", "compressed-tensors")
    assert dense_in(tmp_path / "out", [name.removesuffix(".weight")]) and report["outside"] == 1
    with torch.no_grad():
        assert quantkit.load(tmp_path / "out", device="cpu")(torch.arange(8)[None]).logits.isfinite().all()


@pytest.mark.parametrize(
    ("named", "is_said"),
    [("LlamaForSequenceClassification", True), ("LlamaModel", True), ("LlamaForCausalLM", False), (None, False)],
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_class_without_a_head_beside_one_in_the_files_is_named(
    named: str | None, is_said: bool, tied: bool, tmp_path: Path
) -> None:
    folder = write_model("llama", tmp_path / "m", tie_word_embeddings=tied)
    restate(folder / "config.json", architectures=None if named is None else [named])
    found = [line for line in quantkit.plan(folder, method="rtn", group_size=64).notices if "engines open" in line]
    assert len(found) == is_said and all(str(named) in line and "LlamaForCausalLM" in line for line in found)
    report = quantkit.quantize(folder, tmp_path / "out", method="rtn", group_size=64, clip="none").report
    assert set(found) <= set(report["notices"])
