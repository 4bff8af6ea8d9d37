"""A family of each kind is quantized in full and opened again with equal logits; the page shows the last census."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.census import families
from benchmarks.census.page import SHARE, markdown
from benchmarks.census.run import quantized

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = {
    "gpt2": "Conv1D, weights stored transposed",
    "deepseek_v3": "latent attention, shared experts, a dense block before the sparse ones",
    "gpt_oss": "experts stored fused, transposed, with biases",
    "nemotron_h": "blocks of four types in one list",
    "gemma3": "a vision-language model, with a tower whose code reads its weights",
    "molmo2": "stored matrices that are several linears in memory",
}
#: Families whose weights have another shape on the disk: rounding reads them there, GPTQ from the module.
STORED = ("gpt2", "gpt_oss", "molmo2")


@pytest.mark.parametrize(
    ("family", "method"), [*((family, "gptq") for family in SAMPLE), *((family, "rtn") for family in STORED)]
)
def test_a_family_of_each_kind_is_quantized_in_full_and_opens(family: str, method: str, tmp_path: Path) -> None:
    source = families.write(family, tmp_path / family)
    row = quantized(source, tmp_path / method, method, ask_transformers=False)
    assert {"traceback", "error", "reference"}.isdisjoint(row), row
    assert row["share"] >= SHARE and row.get("load") == "equal", row


def test_page_is_what_the_last_census_gives() -> None:
    census = json.loads((ROOT / "benchmarks/census.json").read_text(encoding="utf-8"))
    assert (ROOT / "docs/models.md").read_text(encoding="utf-8") == markdown(census), "run: make census"
