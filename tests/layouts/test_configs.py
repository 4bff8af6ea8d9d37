"""config.json: the `quantkit` key and the public part, read back, in contradiction, foreign, and hostile."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from quantkit.core.formats import FP5, FP6, INT4
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, LayoutError, QuantkitError
from quantkit.layouts import LAYOUTS, quantkit_key, read_config
from quantkit.layouts.schemes import Schemes
from tests.layouts.samples import HELD

PATH = "somewhere/config.json"
MODULES = [
    f"model.layers.{i}.{part}"
    for i in (0, 1, 10)
    for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj", "mlp.gate_proj")
]


def parse(*labels: str) -> list[Scheme]:
    return [Scheme.parse(label) for label in labels]


def public_part(layout: str, scheme: Scheme) -> Scheme:
    """Give the scheme as public configs have it: without 2:4 of dense values, and with AWQ's zero points."""
    return replace(scheme, sparsity=None, symmetric=scheme.symmetric and layout not in ("awq", "quick"))


def folder_config(layout: str, schemes: Schemes) -> dict[str, Any]:
    public = LAYOUTS[layout].write_config(schemes)
    key = quantkit_key(layout, schemes, "0.1.0", "ab" * 32)
    return json.loads(json.dumps({**public, "quantkit": key}))  # as it comes back from a file


def some_schemes(layout: str) -> list[Schemes]:
    labels = HELD[layout][0]
    plain = [Schemes(Scheme.parse(label), ignore=("lm_head",)) for label in labels]
    overrides = tuple((rf"model\.layers\.{i}\..*", Scheme.parse(label)) for i, label in enumerate(labels))
    return [*plain, Schemes(Scheme.parse(labels[0]), overrides, ("lm_head", "model.layers.3.mlp.down_proj"))]


CASES = [(layout, schemes) for layout in LAYOUTS for schemes in some_schemes(layout)]


def refused(config: Any, *words: str) -> str:
    with pytest.raises(CheckpointError) as refusal:
        read_config(config, PATH)
    message = str(refusal.value)
    assert "\n" not in message and message.startswith(PATH) and all(word in message for word in words), message
    return message


@pytest.mark.parametrize(("layout", "schemes"), CASES)
def test_the_quantkit_key_reads_back_exactly(layout: str, schemes: Schemes) -> None:
    found, read = read_config(folder_config(layout, schemes), PATH)
    assert found is LAYOUTS[layout] and read == schemes


@pytest.mark.parametrize(("layout", "schemes"), CASES)
def test_the_public_part_alone_gives_every_module_its_scheme(layout: str, schemes: Schemes) -> None:
    public = json.loads(json.dumps(LAYOUTS[layout].write_config(schemes)))
    if layout == "compressed-tensors" and any(
        s.format.is_float for s in (schemes.default, *dict(schemes.overrides).values())
    ):
        refused(public, "not written by quantkit", "'quantkit' key")
        return
    found, read = read_config(public, PATH)
    assert found is LAYOUTS[layout]
    is_public = layout in ("gptq", "gptq-v2", "compressed-tensors", "marlin24-ct") or not schemes.overrides
    if is_public:
        assert [public_part(layout, read.of(module)) for module in MODULES] == [
            public_part(layout, schemes.of(module)) for module in MODULES
        ]
        assert set(read.ignore) == set(schemes.ignore)


def test_the_first_of_overlapping_overrides_wins_for_every_reader() -> None:
    patterns = (r".*\.v_proj", r".*\.[vq]_proj", r".*\.down_proj", r"model\.layers\.1\..*")
    overrides = tuple(zip(patterns, parse("int4:g32", "int4:g64", "int4:g16", "int4:channel"), strict=True))
    schemes = Schemes(Scheme.parse("int4:g128"), overrides)
    expected = {module: schemes.of(module) for module in MODULES}
    for layout in ("gptq", "compressed-tensors"):
        config = LAYOUTS[layout].write_config(schemes)
        if layout == "gptq":  # readers take the first key whose pattern matches from the start
            for module in MODULES:
                hits = [v for key, v in config["dynamic"].items() if re.match(key.removeprefix("+:"), module)]
                group = (hits[0] if hits else config)["group_size"]
                assert group == (expected[module].group_size or -1)
        else:  # the library takes the first pattern in text order, so only one may match
            assert len(config["config_groups"]) == 5
            targets = [t for group in config["config_groups"].values() for t in group["targets"] if t != "Linear"]
            for module in MODULES:
                hits = [t for t in targets if re.match(t.removeprefix("re:"), module)]
                assert len(hits) == (expected[module] != schemes.default)


def test_overrides_of_single_modules_become_names() -> None:
    modules = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(20) for j in range(20)]
    rows = [(re.escape(module), INT4_ROWS) for module in modules]
    first = (r"model\.layers\.7\..*", Scheme.parse("int4:g64"))
    schemes = Schemes(INT4_G128, (first, *rows, (r".*\.up_proj", Scheme.parse("int4:g32"))))
    config = LAYOUTS["compressed-tensors"].write_config(schemes)
    assert len(config["config_groups"]) == 4 and len(json.dumps(config)) < 60_000
    read = read_config(config, PATH)[1]
    for module in [*modules[::37], "model.layers.7.up_proj", "model.layers.8.up_proj", "model.layers.7.x", "model.x"]:
        assert read.of(module) == schemes.of(module), module


def test_patterns_with_leading_flags_are_refused() -> None:
    schemes = Schemes(INT4_G128, ((r"(?i).*Q_PROJ", Scheme.parse("int4:g64")),))
    for layout in ("gptq", "compressed-tensors"):
        with pytest.raises(LayoutError, match="flags"):
            LAYOUTS[layout].write_config(schemes)


INT4_G128, INT4_ROWS = parse("int4:g128", "int4:channel")


def test_written_configs_are_those_of_the_documentation() -> None:
    head = ("lm_head",)
    assert LAYOUTS["marlin"].write_config(Schemes(INT4_G128, ignore=head)) == {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
        "checkpoint_format": "marlin", "is_marlin_format": True, "lm_head": False,
    }  # fmt: skip
    assert LAYOUTS["humming"].write_config(Schemes(Scheme(FP6), ignore=head)) == {
        "quant_method": "humming", "b_dtype": "float6e3m2", "weight_scale_group_size": 0, "ignore": ["lm_head"]
    }  # fmt: skip
    assert LAYOUTS["tcfpx"].write_config(Schemes(Scheme(FP5), ignore=head)) == {
        "quant_method": "tcfpx", "format": "e3m1", "bits": 5, "ignore": ["lm_head"]
    }  # fmt: skip
    gptq = LAYOUTS["gptq"].write_config(Schemes(INT4_ROWS, ignore=head))
    assert gptq.items() >= {
        "quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True, "desc_act": False, "lm_head": False,
        "checkpoint_format": "gptq", "format": "gptq",
    }.items()  # fmt: skip
    v2 = LAYOUTS["gptq-v2"].write_config(Schemes(Scheme.parse("int4:g32:asym"), ignore=head))
    assert (v2["checkpoint_format"], v2["format"], v2["sym"], v2["group_size"]) == ("gptq_v2", "gptq_v2", False, 32)
    weights = LAYOUTS["compressed-tensors"].write_config(Schemes(INT4_ROWS))["config_groups"]["group_0"]["weights"]
    assert weights.items() >= {"num_bits": 4, "type": "int", "strategy": "channel", "group_size": None}.items()


def test_a_quantized_head_is_marked_and_other_dense_linears_are_named() -> None:
    for layout in ("gptq", "marlin"):
        assert LAYOUTS[layout].write_config(Schemes(INT4_G128))["lm_head"] is True
        assert LAYOUTS[layout].write_config(Schemes(INT4_G128, ignore=("embed_out",)))["lm_head"] is False
    dense = LAYOUTS["gptq"].write_config(Schemes(INT4_G128, ignore=("lm_head", "model.layers.0.mlp.up_proj")))
    assert dense["dynamic"] == {r"-:^(?:model\.layers\.0\.mlp\.up_proj)$": {}}


FOREIGN = {
    "AutoGPTQ": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True}, "gptq"),
    "v2 by the older key": (
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True, "checkpoint_format": "gptq_v2"}, "gptq-v2"
    ),
    "v2 by the newer key": (
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True, "format": "gptq_v2"}, "gptq-v2"
    ),
    "marlin by the flag": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "is_marlin_format": True}, "marlin"
    ),
    "marlin by the format": (
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True, "checkpoint_format": "marlin"}, "marlin"
    ),
    "marlin by the method": ({"quant_method": "marlin", "group_size": 128}, "marlin"),
    "humming, short keys": ({"quant_method": "humming", "dtype": "float5e3m1", "group_size": 0}, "humming"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_published_configs_are_read(name: str) -> None:
    config, layout = FOREIGN[name]
    found, schemes = read_config(config, PATH)
    assert layout == found.NAME
    group = config["group_size"]
    expected = Scheme(FP5) if layout == "humming" else Scheme(INT4, None if group == -1 else group)
    assert schemes == Schemes(expected, ignore=() if layout == "humming" else ("lm_head",))


def test_per_module_overrides_of_foreign_gptq_files() -> None:
    config = {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True,
        "dynamic": {r"-:.*\.mlp\.down": {}, r".*\.1\.": {"group_size": 64}, r"+:.*q_proj$": {"sym": False}},
    }  # fmt: skip
    schemes = read_config(config, PATH)[1]
    assert schemes.of("model.layers.1.self_attn.q_proj").label == "int4:g64"
    assert schemes.of("model.layers.2.self_attn.q_proj").label == "int4:g128:asym"
    assert schemes.of("model.layers.2.self_attn.k_proj").label == "int4:g128"
    refused({**config, "dynamic": {".*": {"bits": 8}}}, "8 bits")
    refused({**config, "dynamic": {"(": {}}}, "regular expression")
    refused({**config, "dynamic": {".*": 4}}, "object")


def ct(**changes: Any) -> dict[str, Any]:
    config = copy.deepcopy(LAYOUTS["compressed-tensors"].write_config(Schemes(INT4_G128, ignore=("lm_head",))))
    weights = config["config_groups"]["group_0"]["weights"]
    weights.update({k: v for k, v in changes.items() if k in weights})
    group = config["config_groups"]["group_0"]
    group.update({k: v for k, v in changes.items() if k in ("input_activations", "targets")})
    config.update({k: v for k, v in changes.items() if k not in weights and k not in group})
    return config


def test_foreign_compressed_tensors_other_than_weights_of_integers_are_refused() -> None:
    assert read_config(ct(actorder="group"), PATH)[1].default == INT4_G128  # the tensors decide
    for bits in (2, 3, 5, 6, 8):
        assert read_config(ct(num_bits=bits), PATH)[1].default.label == f"int{bits}:g128"
    for bits in (0, 1, 7, 16):
        refused(ct(num_bits=bits), f"int{bits} in format")
    refused(ct(format="float-quantized", num_bits=8, type="float"), "float8", "not written by quantkit", "fp6")
    refused(ct(format="nvfp4-pack-quantized", type="float"), "nvfp4-pack-quantized")
    refused(ct(strategy="tensor", group_size=None), "tensor")
    refused(ct(strategy="group", group_size=None), "group_size None")
    refused(ct(strategy="group", group_size=-1))
    refused(ct(group_size=True), "'group_size' must be int")
    refused(ct(input_activations={"num_bits": 8}), "activations")
    refused(ct(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme")
    refused(ct(transform_config={"config_groups": {"a": 1}}), "transform_config")
    refused(ct(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config")
    refused(ct(targets=["re:("]), "regular expression")
    refused(ct(targets=[]), "no target")
    refused(ct(ignore="lm_head"), "'ignore' must be")
    assert read_config(ct(sparsity_config={}, transform_config={}, version="0.9.1"), PATH)[1].default == INT4_G128


def test_targets_of_compressed_tensors_are_matched_in_the_librarys_order() -> None:
    config = ct()
    weights = config["config_groups"]["group_0"]["weights"]
    for name, target, size in (("b", "re:.*proj", 64), ("a", "re:.*q_", 32), ("c", MODULES[0], 16)):
        config["config_groups"][name] = {"targets": [target], "weights": {**weights, "group_size": size}}
    schemes = read_config(config, PATH)[1]
    assert schemes.of(MODULES[0]).group_size == 16
    assert schemes.of("model.layers.5.self_attn.q_proj").group_size == 64  # "re:.*p" before "re:.*q"
    assert schemes.of("model.layers.5.mlp.fc1").group_size == 128


def test_a_config_of_no_layout_is_refused() -> None:
    refused({"quant_method": "aqlm", "bits": 4}, "aqlm")
    refused({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "format": "marlin_2"}, "marlin_2")
    refused({}, "a method without a name are not read")
    for value in (None, [], "gptq", 4):
        refused(value, "must be an object")
    refused({"quant_method": ["gptq"]}, "['gptq'] are not read")


#: What other tools state -> the name in the message.
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "'bitsandbytes'"),
    ({"load_in_8bit": True, "llm_int8_threshold": 6.0}, "bitsandbytes"),
    ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, "'torchao'"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt' 'NVFP4'"),
    ({"group_size": 64, "bits": 4}, "MLX, or a method without a name,"),
    *(
        ({"quant_method": name}, repr(name))
        for name in ("quark", "fbgemm_fp8", "aqlm", "hqq", "eetq", "spqr", "vptq", "quanto", "higgs", "bitnet")
    ),
]


@pytest.mark.parametrize(("stated", "name"), OTHERS, ids=lambda value: str(value)[:40])
def test_weights_of_other_tools_are_named_with_the_way_out(stated: dict[str, Any], name: str) -> None:
    refused(stated, f"weights quantized by {name} are not read: give the original model")


def test_variants_that_are_not_read_name_the_way_out() -> None:
    gptq = {"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": True}
    for stated in (gptq, {**gptq, "quant_method": "awq"}, ct(num_bits=7), ct(input_activations={"num_bits": 8})):
        refused(stated, "give the original model")
    refused({"quant_method": "awq", "version": "gemv", "bits": 4, "group_size": 128}, "gemv", "give the original model")


def test_contradictions_are_refused() -> None:
    refused(
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "format": "gptq", "checkpoint_format": "x"},
        "contradicts",
    )
    refused({"quant_method": "gptq", "bits": 3, "group_size": 128, "sym": True}, "3 bits")
    refused({"quant_method": "gptq", "bits": 4, "group_size": 0, "sym": True}, "group_size 0")
    refused({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "pack_dtype": "int8"}, "pack_dtype")
    refused({"quant_method": "marlin", "group_size": 64}, "128 or -1")
    refused({"quant_method": "marlin", "group_size": 128, "sym": False}, "sym False")
    refused({"quant_method": "humming", "b_dtype": "float4e2m1"}, "float4e2m1")
    refused({"quant_method": "humming", "b_dtype": "uint7"}, "uint7")
    refused({"quant_method": "humming", "b_dtype": "uint4", "weight_scale_group_size": -1}, "groups of -1")
    refused({"quant_method": "humming", "b_dtype": "float6e3m2", "has_zero_point": True}, "zero points")
    refused({"quant_method": "humming", "b_dtype": "float6e3m2", "weight_scale_group_size": 128}, "groups of 128")
    refused({"quant_method": "tcfpx", "format": "e4m1", "bits": 6}, "e4m1")
    refused({"quant_method": "tcfpx", "format": "e3m2", "bits": 5}, "bits 5")
    refused({"quant_method": "tcfpx", "bits": 6}, "'format' is missing")
    config = folder_config("marlin", Schemes(INT4_G128))
    for key, value in (("quant_method", "awq"), ("checkpoint_format", "gptq"), ("is_marlin_format", False)):
        refused({**config, key: value}, key, "contradict")
    for layout in ("gptq", "humming", "compressed-tensors"):
        refused({**config, "quantkit": {**config["quantkit"], "layout": layout}}, "contradict")
    six = folder_config("humming", Schemes(Scheme(FP6)))
    refused({**six, "quantkit": {**six["quantkit"], "scheme": "fp5:channel"}}, "b_dtype", "contradict")
    planes = folder_config("tcfpx", Schemes(Scheme(FP6)))
    refused({**planes, "quantkit": {**planes["quantkit"], "scheme": "fp6-e2m3:channel"}}, "'format'", "contradict")


HOSTILE_OWN: list[dict[str, Any]] = [
    {"layout": "exl3"}, {"layout": None}, {"layout": ["marlin"]}, {"layout": 1}, {"layout": "__init__"},
    {"scheme": "int4:g0"}, {"scheme": "int4:g²"}, {"scheme": "int4:g" + "9" * 5000}, {"scheme": "int7"}, {"scheme": 4},
    {"scheme": ""}, {"scheme": "fp6:asym"}, {"scheme": "int4:g64"}, {"scheme": "fp6:channel:24"}, {"scheme": "fp6"},
    {"overrides": []}, {"overrides": {"(": "int4:g128"}}, {"overrides": {".*": 4}}, {"overrides": {".*": "int1"}},
    {"overrides": {".*": "int4:g64"}}, {"overrides": {"a{99999999999}": "int4:g128"}}, {"overrides": None},
    {"ignore": "lm_head"}, {"ignore": [1]}, {"ignore": [["lm_head"]]}, {"ignore": {}},
    {"version": 1}, {"version": None}, {"recipe_sha256": 5}, {"layouts": "marlin"},
]  # fmt: skip


@pytest.mark.parametrize("change", HOSTILE_OWN, ids=lambda change: str(change)[:40])
def test_hostile_quantkit_keys_give_an_error_of_one_line(change: dict[str, Any]) -> None:
    config = folder_config("marlin", Schemes(INT4_G128, ((r"a.*", INT4_ROWS),), ("lm_head",)))
    config["quantkit"].update(change)
    refused(config)


def test_an_incomplete_quantkit_key_is_refused() -> None:
    config = folder_config("marlin", Schemes(INT4_G128))
    for value in (None, [], "marlin", 1, {}):
        refused({**config, "quantkit": value})
    for name in ("layout", "scheme", "version"):
        refused({**config, "quantkit": {k: v for k, v in config["quantkit"].items() if k != name}}, name)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150)
@given(st.sampled_from([folder_config(*case) for case in CASES] + [c for c, _ in FOREIGN.values()]), st.data())
def test_configs_with_any_entry_replaced_give_no_traceback(config: dict[str, Any], data: st.DataObject) -> None:
    config = copy.deepcopy(config)
    if data.draw(st.booleans()):
        config.pop("quantkit", None)
    place = config
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if not (isinstance(place[key], dict) and place[key]) or data.draw(st.integers(0, 3)) == 0:
            break
        place = place[key]
    place[key] = data.draw(json_values)
    try:
        _, schemes = read_config(config, PATH)
    except CheckpointError as error:
        assert "\n" not in str(error)
    else:
        schemes.of("model.layers.0.mlp.down_proj")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_config_is_written_for_a_scheme_that_the_layout_lacks(layout: str) -> None:
    good = Scheme.parse(HELD[layout][0][0])
    for label in ("fp6:g128",) + (("int4",) if layout == "tcfpx" else ()):
        for schemes in (Schemes(Scheme.parse(label)), Schemes(good, (("x", Scheme.parse(label)),))):
            with pytest.raises(QuantkitError):
                LAYOUTS[layout].write_config(schemes)


def test_the_key_of_a_checkpoint_without_a_recipe() -> None:
    key = quantkit_key("gptq", Schemes(INT4_G128, ((r"a", INT4_ROWS), (r"a", INT4_G128))), "1.2", None)
    assert key["recipe_sha256"] is None and key["overrides"] == {"a": "int4:channel"}
    config = LAYOUTS["gptq"].write_config(Schemes(INT4_G128))
    assert read_config({**config, "quantkit": key}, PATH)[1].of("a") == INT4_ROWS


def test_humming_states_groups_and_zero_points_of_each_scheme_that_differ() -> None:
    default, grouped, rows = parse("int6:g64:asym", "int3:g32", "fp6:channel")
    schemes = Schemes(default, ((r".*\.down_proj", grouped), (r".*\.v_proj", rows)))
    config = LAYOUTS["humming"].write_config(schemes)
    assert (config["b_dtype"], config["weight_scale_group_size"], config["has_zero_point"]) == ("uint6", 64, True)
    assert list(config["dynamic"].values()) == [
        {"has_zero_point": False, "b_dtype": "uint3", "weight_scale_group_size": 32},
        {"has_zero_point": False, "b_dtype": "float6e3m2", "weight_scale_group_size": 0},
    ]
    read = read_config(config, PATH)[1]
    assert [read.of(module) for module in MODULES] == [schemes.of(module) for module in MODULES]
