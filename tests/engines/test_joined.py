"""Linears that engines join: their groups, and the names under which engines look for them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from quantkit.core.quantized_tensor import Scheme
from quantkit.engines.joined import fused_groups, with_joined_names
from quantkit.layouts import LAYOUTS, read_config
from quantkit.layouts.schemes import Schemes

ATTENTION = [f"model.layers.{i}.self_attn.{p}_proj" for i in (1, 10) for p in "qkvo"]
MLP = [f"model.layers.{i}.mlp.{p}_proj" for i in (1, 10) for p in ("gate", "up", "down")]
MODULES = [*ATTENTION, *MLP]
DEFAULT, OTHER = {"humming": ("fp6", "fp5")}, ("int4:g128", "int4:g64")
WITH_EXCEPTIONS = ("compressed-tensors", "gptq", "gptq-v2", "humming")


def schemes(layout: str, others: list[str], dense: list[str]) -> Schemes:
    default, other = map(Scheme.parse, DEFAULT.get(layout, OTHER))
    return Schemes(default, tuple((re.escape(name), other) for name in others), ("lm_head", *dense))


def public(layout: str, stated: Schemes) -> dict[str, Any]:
    packed = [name for name in MODULES if name not in stated.ignore]
    return json.loads(json.dumps(LAYOUTS[layout].write_config(with_joined_names(stated, packed))))


def test_groups_are_those_of_one_parent() -> None:
    assert fused_groups([*MODULES, "lm_head", "model.x.w1", "model.x.w3", "model.y.w1"]) == {
        **{f"model.layers.{i}.self_attn.qkv_proj": ATTENTION[4 * j : 4 * j + 3] for j, i in enumerate((1, 10))},
        **{f"model.layers.{i}.mlp.gate_up_proj": MLP[3 * j : 3 * j + 2] for j, i in enumerate((1, 10))},
        "model.x.w13": ["model.x.w1", "model.x.w3"],
    }


def test_all_experts_of_a_layer_are_one_group() -> None:
    experts = [f"model.layers.{i}.mlp.experts.{e}.{p}_proj" for i in (0, 1) for e in (0, 1) for p in ("gate", "down")]
    assert fused_groups([*experts, "model.layers.0.mlp.shared_expert.gate_proj"]) == {
        f"model.layers.{i}.mlp.experts": [name for name in experts if f".{i}.mlp" in name] for i in (0, 1)
    }


@pytest.mark.parametrize("layout", WITH_EXCEPTIONS)
def test_a_joined_linear_is_found_under_its_own_name(layout: str) -> None:
    stated = schemes(layout, ATTENTION[:3], [])
    text = json.dumps(public(layout, stated)).replace("\\", "")
    assert "model.layers.1.self_attn.qkv_proj" in text and "model.layers.10.self_attn.qkv_proj" not in text
    assert "gate_up_proj" not in text
    split = json.dumps(public(layout, schemes(layout, ATTENTION[:2], [])))
    assert "qkv_proj" not in split, "a group of two treatments has no common one"


def test_a_dense_linear_is_ignored_under_the_name_by_which_engines_ask_for_it() -> None:
    tower = "model.visual.blocks.0.attn.qkv"
    stated = with_joined_names(Schemes(Scheme.parse("int4:g64"), (), ("lm_head", tower, "qkv")), MODULES)
    assert stated.ignore == ("lm_head", tower, "qkv", f"{tower}_proj", "qkv_proj")


@pytest.mark.parametrize("layout", WITH_EXCEPTIONS)
def test_patterns_that_miss_the_joined_name_are_completed(layout: str) -> None:
    default, other = map(Scheme.parse, DEFAULT.get(layout, OTHER))
    stated = Schemes(default, ((r".*\.[qkv]_proj", other),), ("lm_head",))
    joined = with_joined_names(stated, MODULES)
    assert joined.of("model.layers.1.self_attn.qkv_proj") == joined.of("model.layers.10.self_attn.qkv_proj") == other
    assert all(joined.of(name) == stated.of(name) for name in MODULES)


@pytest.mark.parametrize("layout", ["humming", "gptq"])
def test_exceptions_read_back_from_the_public_config(layout: str) -> None:
    stated = schemes(layout, [*ATTENTION[:3], MLP[2]], [MLP[0], MLP[1], "model.layers.1.mlp.gate"])
    _, read = read_config(public(layout, stated), "config.json")
    assert set(read.ignore) == {*stated.ignore, "model.layers.1.mlp.gate_up_proj"}
    assert [read.of(name) for name in MODULES] == [stated.of(name) for name in MODULES]


def test_hummings_dense_linears_are_exact_names() -> None:
    dense = ["model.layers.1.mlp.gate", "model.layers.1.mlp.down_proj", "re:.*vision.*"]
    ignore = LAYOUTS["humming"].write_config(schemes("humming", [], dense))["ignore"]
    assert "lm_head" in ignore and "re:.*vision.*" in ignore
    hit = {name for name in MODULES for entry in ignore if entry != "lm_head" and re.match(entry[3:], name)}
    assert hit == {"model.layers.1.mlp.down_proj"}, "layers.1 is no part of layers.10, nor gate of gate_proj"


def test_a_part_of_a_name_in_foreign_humming_files_becomes_a_pattern() -> None:
    config = {"quant_method": "humming", "b_dtype": "float6e3m2", "ignore": ["lm_head", "layers.1.mlp", "re:.*a$"]}
    assert read_config(config, "x")[1].ignore == ("lm_head", r"re:.*layers\.1\.mlp.*", "re:.*a$")


def test_dense_and_other_experts_are_stated_under_every_name_that_engines_ask_for() -> None:
    layer = "model.layers.1.block_sparse_moe.experts"
    experts = [f"{layer}.{e}.{w}" for e in (0, 1) for w in ("w1", "w2", "w3")]
    asked = {layer, *(f"{layer}.0.{part}_proj" for part in ("gate", "up", "down"))}
    dense = with_joined_names(Schemes(Scheme.parse("int4:g128"), ignore=("lm_head", *experts)), MODULES)
    assert set(dense.ignore) == {"lm_head", *experts, *asked}
    other = Scheme.parse("int4:g64")
    overrides = tuple((re.escape(name), other) for name in experts)
    joined = with_joined_names(Schemes(Scheme.parse("int4:g128"), overrides), [*MODULES, *experts])
    assert {joined.of(name) for name in asked} == {other}
