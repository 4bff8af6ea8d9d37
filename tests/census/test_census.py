"""A sample of families, one of each kind: quantized in full, opened again with equal logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.census import families
from tests.census.page import SHARE, markdown
from tests.census.run import METHODS, quantized

ROOT = Path(__file__).resolve().parents[2]
#: family, or family and method -> why it is not quantized in full yet
REFUSED: dict[str, str] = {}
#: the same -> why the output does not open with equal logits yet
CLOSED: dict[str, str] = {}
SAMPLE = {
    "qwen3": "dense, with norms of queries and keys",
    "falcon": "linears of a class of its own, queries, keys and values in one",
    "gpt2": "Conv1D, weights stored transposed",
    "gemma3n_text": "matrices of 4 columns, layers that share keys and values",
    "qwen3_moe": "experts stored one by one, fused in memory",
    "deepseek_v3": "latent attention, shared experts, a dense block before the sparse ones",
    "gpt_oss": "experts stored fused, transposed, with biases",
    "llama4": "experts stored fused, inside a vision-language model",
    "granitemoehybrid": "Mamba-2 blocks and attention blocks with experts",
    "nemotron_h": "blocks of four types in one list",
    "recurrent_gemma": "recurrent blocks",
    "gemma3": "a vision-language model, with a tower whose code reads its weights",
    "qwen2_5_vl": "a vision-language model with positions of its own",
    "molmo2": "stored matrices that are several linears in memory",
    "minimax_m3_vl": "linears in memory that are several stored matrices",
    "ernie4_5_vl_moe": "experts for text and for images in one stored list",
    "step3p7": "experts stored as three tensors under another path",
}
#: Families whose weights have another shape on the disk: rounding reads them there, GPTQ from the module.
STORED = {"gpt2", "gpt_oss", "molmo2", "minimax_m3_vl", "step3p7"}


def cases(failing: dict[str, str]) -> list[object]:
    """Return family and method of each case; one that fails today is to fail, so that its entry goes when it works."""
    found = []
    for family, method in product(SAMPLE, METHODS):
        if method == "rtn" and family not in STORED:
            continue
        why = failing.get(family) or failing.get(f"{family}-{method}")
        marks = [pytest.mark.xfail(strict=True, reason=why)] if why else []
        found.append(pytest.param(family, method, marks=marks, id=f"{family}-{method}"))
    return found


@pytest.fixture(scope="module")
def survey(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], dict[str, Any]]:
    """Return a function that gives the row of a family and a method, and computes it once."""
    folder = tmp_path_factory.mktemp("census")

    @cache
    def row(family: str, method: str) -> dict[str, Any]:
        source = folder / family
        if not source.exists():
            families.write(family, source)
        return quantized(source, folder / f"{family}-{method}", method, ask_transformers=False)

    return row


@pytest.mark.parametrize(("family", "method"), cases(REFUSED))
def test_family_is_quantized_in_full(family: str, method: str, survey: Callable[[str, str], dict[str, Any]]) -> None:
    row = survey(family, method)
    assert {"traceback", "error", "reference"}.isdisjoint(row), row
    assert row["share"] >= SHARE, row


@pytest.mark.parametrize(("family", "method"), cases({**REFUSED, **CLOSED}))
def test_output_opens_with_equal_logits(family: str, method: str, survey: Callable[[str, str], dict[str, Any]]) -> None:
    assert survey(family, method).get("load") == "equal", survey(family, method)


def test_page_is_what_the_last_census_gives() -> None:
    census = json.loads((ROOT / "benchmarks/census.json").read_text(encoding="utf-8"))
    assert (ROOT / "docs/models.md").read_text(encoding="utf-8") == markdown(census), "run: make census"
