"""Test the plug-in against vLLM's real classes on a CPU: each test is a check of `inside_vllm`, run by vLLM's Python.

$VLLM_CHECK, or `.vllm-check` beside the checkout, is an environment with vLLM's Python code, and `vllm_without_gpu` of
../shared/tools/vllm stands in for what is compiled. $VLLM_RELEASE may name a folder with the Python code of another
release, which is then imported in its place.
"""

from __future__ import annotations

import os

import pytest

import quantkit
from quantkit.serving.vllm_plugin import untested
from tests.census import families
from tests.serving.engines import INT4, MODEL, TOOLS, answers, engine
from tests.serving.inside_vllm import CHECKS
from tests.tiny_models import write_model

#: Folder -> the options of `quantize` that make it of the tiny Llama.
FOLDERS = {
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


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    python, folders = engine(), tmp_path_factory.mktemp("served")
    path = os.environ.get("VLLM_RELEASE", "")
    for name, options in FOLDERS.items():
        quantkit.quantize(MODEL, folders / name, **options)
    families.write("bloom", folders / "bloom-dense")
    for family in ("qwen2", "bloom", "falcon"):
        if family != "bloom":
            write_model(family, folders / f"{family}-dense")
        quantkit.quantize(folders / f"{family}-dense", folders / family, **FOLDERS["tcfpx-fp6"])
    write_model("mixtral", folders / "mixtral-dense")
    quantkit.quantize(folders / "mixtral-dense", folders / "experts", **{**INT4, "group_size": 32}, layout="awq")
    dense = {**FOLDERS["tcfpx-fp6"], "skip": [".*experts.*"], "min_share": 0}
    quantkit.quantize(folders / "mixtral-dense", folders / "experts-dense", **dense)
    group, register = "vllm.general_plugins", "quantkit.serving.vllm_plugin:register"
    installed = tmp_path_factory.mktemp("installed")
    return answers(python, "tests.serving.inside_vllm", [TOOLS, folders], installed, group, register, path)


@pytest.mark.parametrize("check", CHECKS)
def test_inside_vllm(results: dict[str, str | None], check: str) -> None:
    assert results[check] is None, results[check]


@pytest.mark.parametrize("release", ["0.26.0", "0.29.1", "0.33.2", "0.33.0rc1"])
def test_no_warning_for_a_tested_release(release: str) -> None:
    assert untested(release) is None


@pytest.mark.parametrize("release", ["0.25.9", "0.34.0", "1.0", "dev"])
def test_a_release_outside_the_range_is_named(release: str) -> None:
    assert f"tested with vLLM 0.26 to 0.33, this is {release}" in str(untested(release))
