"""Test the plug-in against SGLang's real classes on a CPU: each test is a check of `inside_sglang`.

$SGLANG_CHECK, or `.sglang-check` beside the checkout, is a folder with SGLang's Python code and what it imports
(`make engines` makes it). vLLM's Python runs it, because it has torch and transformers.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import quantkit
from tests.serving.engines import INT4, ROOT, answers, engine, write_llama
from tests.serving.inside_sglang import CHECKS

FOLDERS = {
    "marlin": {**INT4, "layout": "marlin"},
    "tcfpx": {"format": "fp6", "method": "rtn", "layout": "tcfpx"},
    "quick": {**INT4, "layout": "quick", "asym": True},
    "compressed-tensors": {**INT4, "layout": "compressed-tensors"},
    "gptq": {**INT4, "layout": "gptq"},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    python, folders = engine(), tmp_path_factory.mktemp("served")
    home = Path(os.environ.get("SGLANG_CHECK") or ROOT.parent / ".sglang-check")
    if not (home / "sglang").is_dir():
        pytest.skip(f"no SGLang in {home}")
    llama = write_llama(tmp_path_factory.mktemp("dense") / "llama")
    for name, options in FOLDERS.items():
        quantkit.quantize(llama, folders / name, **options)
    group, register = "sglang.srt.plugins", "quantkit.serving.sglang_plugin:register"
    installed = tmp_path_factory.mktemp("installed")
    return answers(python, "tests.serving.inside_sglang", [folders], installed, group, register, str(home))


@pytest.mark.parametrize("check", CHECKS)
def test_inside_sglang(results: dict[str, str | None], check: str) -> None:
    assert results[check] is None, results[check]
