"""Test the plug-in against vLLM's real classes on a CPU: each test is a check of `inside_vllm`, run by vLLM's Python.

$VLLM_CHECK, or `.vllm-check` beside the checkout, is an environment in which vLLM's Python code runs, and
`vllm_without_gpu` stands in for what is compiled. $VLLM_RELEASE may name a folder with the code of another release,
which is then imported in its place. `make engines` makes both.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import quantkit
from benchmarks.census import families
from quantkit.serving import vllm_plugin
from quantkit.serving.vllm_plugin import untested
from tests.serving.engines import INT4, answers, engine, write_llama
from tests.serving.inside_vllm import CHECKS
from tests.serving.inside_vllm_experts import OUTPUTS
from tests.tiny_models import write_model

QUANTIZATION = "vllm.model_executor.layers.quantization"
#: Folder -> the options of `quantize` that make it of the tiny Llama.
FOLDERS: dict[str, dict[str, Any]] = {
    "marlin": {**INT4, "layout": "marlin"},
    "marlin24": {**INT4, "layout": "marlin24", "prune": "2:4"},
    "tcfpx-fp6": {"format": "fp6", "method": "rtn", "layout": "tcfpx"},
    "tcfpx-fp5": {"format": "fp5", "method": "rtn", "layout": "tcfpx"},
    "quick": {**INT4, "layout": "quick", "asym": True},
    "compressed-tensors": {**INT4, "layout": "compressed-tensors"},
    "compressed-tensors-asym": {**INT4, "layout": "compressed-tensors", "asym": True, "group_size": 64},
    "gptq": {**INT4, "layout": "gptq"},
    "awq": {**INT4, "layout": "awq", "asym": True},
    "humming": {"format": "fp6", "method": "rtn", "layout": "humming"},
    "mixed": {
        **INT4,
        "layout": "marlin",
        "skip": [r".*layers\.0\.self_attn\.[qkv]_proj"],
        "override": {r".*layers\.1\.mlp\.down_proj": "int4:channel"},
        "min_share": 0.5,
    },
}


TIE = {"tie_word_embeddings": True}
#: Folder -> the family and the options of a mixture of experts.
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("mixtral", {**INT4, "group_size": 32, "layout": "awq"}),
    "experts-marlin": ("mixtral", FOLDERS["marlin"]),
    "experts-tcfpx-fp6": ("qwen3_moe", FOLDERS["tcfpx-fp6"]),
    "experts-tcfpx-fp5": ("mixtral", FOLDERS["tcfpx-fp5"]),
    "experts-marlin24": ("qwen3_moe", FOLDERS["marlin24"]),
    "experts-quick": ("qwen3_moe", FOLDERS["quick"]),
    "experts-compressed-tensors": ("mixtral", FOLDERS["compressed-tensors-asym"]),
    "experts-gptq": ("qwen3_moe", FOLDERS["gptq"]),
    "experts-humming": ("qwen3_moe", FOLDERS["humming"]),
}
ENDS = ("embed_tokens", "lm_head")
CT: dict[str, Any] = {**INT4, "layout": "compressed-tensors", "group_size": 64}
#: Folder -> the family, its changes, and the options, of packed embeddings and heads.
VOCABULARIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "vocabulary-marlin": ("llama", {}, {**FOLDERS["marlin"], "pad": True, "override": {"lm_head": "int4:g128"}}),
    "vocabulary": ("llama", {}, {**CT, "override": {"embed_tokens": "int8:channel", "lm_head": "int4:g128"}}),
    "vocabulary-asym": ("llama", {}, {**CT, "override": dict.fromkeys(["embed_tokens", "lm_head"], "int4:g64:asym")}),
    "vocabulary-fp6": ("llama", {}, {**CT, "override": dict.fromkeys(["embed_tokens", "lm_head"], "fp6")}),
    "vocabulary-humming": (
        "llama",
        {},
        {**FOLDERS["humming"], "override": dict.fromkeys(["embed_tokens", "lm_head"], "fp6")},
    ),
    "vocabulary-qwen2": ("qwen2", {}, {**CT, "override": {"embed_tokens": "int4:g64"}}),
    "vocabulary-llama": ("llama", TIE, {**CT, "override": {"embed_tokens": "int4:g128"}}),
    "vocabulary-granite": ("granite", TIE, {**CT, "override": {"embed_tokens": "int4:g128"}}),
    "vocabulary-int8": ("llama", TIE, {**CT, "override": {"embed_tokens": "int8:channel"}}),
    "vocabulary-int8-head": ("llama", {}, {**CT, "override": {"lm_head": "int8:g64"}}),
}


def keep_outputs(folder: Path, outputs: Path) -> None:
    """Write what the experts of each layer give for some tokens in the model that `load` opens, in float32."""
    model = quantkit.load(folder, device="cpu", dtype=torch.float32)
    draws = torch.Generator().manual_seed(0)
    x, weights = torch.randn(9, 256, generator=draws), torch.rand(9, 2, generator=draws)
    ids = torch.stack([torch.randperm(4, generator=draws)[:2] for _ in range(9)])
    kept = {"x": x, "weights": weights, "ids": ids}
    with torch.inference_mode():
        for index, block in enumerate(model.model.layers):
            kept[f"out.{index}"] = block.mlp.experts(x, ids, weights)
    outputs.mkdir(exist_ok=True)
    save_file(kept, outputs / f"{folder.name}.safetensors")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    python, folders = engine(), tmp_path_factory.mktemp("served")
    path = os.environ.get("VLLM_RELEASE", "")
    llama = write_llama(folders / "llama-dense")
    for name, options in FOLDERS.items():
        quantkit.quantize(llama, folders / name, **options)
    families.write("bloom", folders / "bloom-dense")
    for family in ("qwen2", "bloom", "falcon"):
        if family != "bloom":
            write_model(family, folders / f"{family}-dense")
        quantkit.quantize(folders / f"{family}-dense", folders / family, **FOLDERS["tcfpx-fp6"])
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 256)
    for family in ("mixtral", "qwen3_moe"):
        write_model(family, folders / f"{family}-dense", num_attention_heads=4, **sizes)
    for name, (family, options) in EXPERTS.items():
        quantkit.quantize(folders / f"{family}-dense", folders / name, **options)
        keep_outputs(folders / name, folders / OUTPUTS)
    for name, (family, changes, options) in VOCABULARIES.items():
        wide = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, **changes}
        quantkit.quantize(write_model(family, folders / f"{name}-dense", **wide), folders / name, **options)
    dense = {**FOLDERS["tcfpx-fp6"], "skip": [".*experts.*"], "min_share": 0}
    quantkit.quantize(folders / "mixtral-dense", folders / "experts-dense", **dense)
    group, register = "vllm.general_plugins", "quantkit.serving.vllm_plugin:register"
    installed = tmp_path_factory.mktemp("installed")
    return answers(python, "tests.serving.inside_vllm", [folders], installed, group, register, path)


@pytest.mark.parametrize("check", CHECKS)
def test_inside_vllm(results: dict[str, str | None], check: str) -> None:
    assert results[check] is None, results[check]


@pytest.mark.parametrize("release", ["0.26.0", "0.29.1", "0.33.2", "0.33.0rc1"])
def test_no_warning_for_a_tested_release(release: str) -> None:
    assert untested(release) is None


@pytest.mark.parametrize("release", ["0.25.9", "0.34.0", "1.0", "dev"])
def test_a_release_outside_the_range_is_named(release: str) -> None:
    assert f"tested with vLLM 0.26 to 0.33, this is {release}" in str(untested(release))


def test_a_vllm_that_is_too_old_or_new_is_two_lines_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packages have other names or functions, and vLLM must start all the same, for folders of others."""
    monkeypatch.setattr(vllm_plugin, "version", lambda package: "0.9.1")
    lines: list[str] = []
    monkeypatch.setattr(vllm_plugin.logger, "handle", lambda record: lines.append(record.getMessage()))
    for modules in ((), ("vllm", "vllm.model_executor", "vllm.model_executor.layers", QUANTIZATION)):
        for name in modules:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        lines.clear()
        vllm_plugin.register()
        first, second = lines
        assert first.startswith("quantkit's plug-in was tested with vLLM 0.26 to 0.33, this is 0.9.1")
        assert second.startswith("quantkit's plug-in does not fit this vLLM and serves nothing (")
        assert "\n" not in first + second
