"""vLLM itself says that it opens the draft model of a tiny folder; docs/models.md has the whole table."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.census.draft_table import table

ROOT = Path(__file__).resolve().parents[2]
CHECK = Path(os.environ.get("VLLM_CHECK", ROOT.parent / ".vllm-check"))
TOOLS = Path(os.environ.get("VLLM_TOOLS", ROOT.parent / "shared/tools/vllm"))


@pytest.mark.skipif(not (CHECK / "bin/python").exists(), reason=f"no environment with vLLM in {CHECK} ($VLLM_CHECK)")
@pytest.mark.skipif(not TOOLS.exists(), reason=f"no {TOOLS} ($VLLM_TOOLS)")
def test_vllm_opens_a_draft_model_whose_target_is_quantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CHECK", str(CHECK))
    monkeypatch.setenv("VLLM_TOOLS", str(TOOLS))
    script = ROOT / "benchmarks/census/vllm_folder.py"
    found = table(script, tmp_path, ["qwen3_next"], ["compressed-tensors"], ["draft"])
    assert found == {"qwen3_next": {"compressed-tensors": {"draft": "ok"}}}
