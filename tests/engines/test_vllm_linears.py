"""The table of joined linears says what vLLM's own model classes say, for each family."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import quantkit
from benchmarks.census import families
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import Scheme
from quantkit.engines.joined import fused_groups
from quantkit.engines.readers import Folder, opened_by, refusals
from quantkit.models.families import EMBEDDINGS_IN_VLLM, HEADS_IN_VLLM

CENSUS = Path(__file__).parents[2] / "benchmarks/census.json"
ANSWERS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "benchmarks/census/vllm_linears.json").read_text(encoding="utf-8")
)["families"]
INT4 = Scheme.parse("int4:g64")


def parent_of(joined: str) -> str:
    """Name the module of a joined linear; two are called alike, and only the mapping tells them apart."""
    return "model.layers.0.linear_attn" if joined.startswith("in_proj") else "model.layers.0.part"


def test_vllm_joins_what_the_table_joins() -> None:
    for family, answers in ANSWERS.items():
        for joined, members in answers["joined"].items():
            if joined == "kv_proj":
                continue  # of an encoder-decoder's cross attention: no report names vLLM for such a model
            parent = parent_of(joined)
            modules = [f"{parent}.{member}" for member in members]
            assert fused_groups(modules) == {f"{parent}.{joined}": modules}, f"vLLM joins them in {family}"


def test_vllm_is_named_for_packed_embeddings_and_heads_of_the_families_that_it_opened() -> None:
    rows = json.loads(CENSUS.read_text(encoding="utf-8"))["families"]
    ends = {row["family"]: row["ends"] for row in rows if "ends" in row}
    opened = {end: {family for family in ends if ends[family][end] == "ok"} for end in ("embeddings", "head", "tied")}
    assert opened == {"embeddings": EMBEDDINGS_IN_VLLM, "head": HEADS_IN_VLLM, "tied": set()}


@pytest.mark.parametrize(
    ("family", "one", "other"),
    [
        ("qwen3_5", "model.language_model.layers.0.linear_attn.in_proj_z", "in_proj_qkv"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.2.w1", "w3"),
    ],
)
def test_fused_alike_treats_joined_linears_alike_and_only_then_vllm_is_named(
    family: str, one: str, other: str, tmp_path: Path
) -> None:
    source = families.write(family, tmp_path / "m")
    options: dict[str, Any] = {"skip": ["lm_head", re.escape(one)], "method": "rtn", "group_size": 64, "min_share": 0}
    apart = quantkit.quantize(source, tmp_path / "apart", **options)
    assert "vLLM" not in apart["readers"] and any("fused_alike" in line for line in apart["layout_notices"])
    alike = quantkit.quantize(source, tmp_path / "alike", **options, fused_alike=True)
    joined = {one, f"{one.rpartition('.')[0]}.{other}"}
    assert "vLLM" in alike["readers"] and not joined & set(Checkpoint(tmp_path / "alike").modules())


def test_experts_with_zero_points_name_no_reader_that_refuses_them() -> None:
    asym = Scheme.parse("int4:g64:asym")
    expert, attention = "model.layers.0.mlp.experts.0.up_proj", "model.layers.0.self_attn.o_proj"
    folders = {m: Folder("compressed-tensors", {m: (asym, (256, 256))}, ["lm_head"]) for m in (expert, attention)}
    named = {module: opened_by(folder) for module, folder in folders.items()}
    assert not any("dequantize=True" in reader for reader in named[expert]) and "vLLM" in named[expert]
    assert any("dequantize=True" in reader for reader in named[attention])
    lines = refusals(folders[expert])
    assert any("--sym" in line and "awq" in line for line in lines)
