"""config.json: the `quantkit` key and the public part, read back, in contradiction, foreign, and hostile."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.formats import FP6
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import CheckpointError, LayoutError, QuantkitError
from quantkit.layouts import LAYOUTS, quantkit_key, read_config
from quantkit.layouts.schemes import Schemes
from tests.layouts.samples import HELD, record

PATH = "somewhere/config.json"
MODULES = [
    f"model.layers.{i}.{part}"
    for i in (0, 1, 10)
    for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj", "mlp.gate_proj")
]


HEAD = ("lm_head",)


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
def test_the_key_reads_back_exactly_and_the_public_part_alone_gives_every_module_its_scheme(
    layout: str, schemes: Schemes
) -> None:
    assert read_config(folder_config(layout, schemes), PATH) == (LAYOUTS[layout], schemes)
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


INT4_G128, INT4_ROWS, INT4_ASYM = parse("int4:g128", "int4:channel", "int4:g128:asym")


def test_a_quantized_head_is_marked_and_other_dense_linears_are_named() -> None:
    for layout in ("gptq", "marlin"):
        assert LAYOUTS[layout].write_config(Schemes(INT4_G128))["lm_head"] is True
        assert LAYOUTS[layout].write_config(Schemes(INT4_G128, ignore=("embed_out",)))["lm_head"] is False
    dense = LAYOUTS["gptq"].write_config(Schemes(INT4_G128, ignore=("lm_head", "model.layers.0.mlp.up_proj")))
    assert dense["dynamic"] == {r"-:^(?:model\.layers\.0\.mlp\.up_proj)$": {}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
GEMM = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
OLDER = {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}
SPARSE = {**GPTQ, "checkpoint_format": "marlin_24"}
AWQ, QUICK = LAYOUTS["awq"], LAYOUTS["quick"]


def ct(layout: str = "compressed-tensors", **changes: Any) -> dict[str, Any]:
    """Make a config as the library does, with the format at the top only, and change some entries."""
    label = "int4:g128:24" if layout == "marlin24-ct" else "int4:g128"
    config = copy.deepcopy(LAYOUTS[layout].write_config(Schemes(Scheme.parse(label), ignore=HEAD)))
    group = config["config_groups"]["group_0"]
    group.pop("format", None)
    for key, value in changes.items():
        places = (group["weights"], group)
        next((place for place in places if key in place), config)[key] = value
    return config


#: What published configs state, as layout, scheme and dense linears.
READ: list[tuple[dict[str, Any], str, str, tuple[str, ...]]] = [
    ({**GPTQ, "desc_act": True}, "gptq", "int4:g128", HEAD),
    ({**GPTQ, "group_size": -1, "checkpoint_format": "gptq_v2"}, "gptq-v2", "int4", HEAD),
    ({**GPTQ, "group_size": -1, "format": "gptq_v2"}, "gptq-v2", "int4", HEAD),
    ({**GPTQ, "sym": False, "checkpoint_format": "gptq_p"}, "gptq-v2", "int4:g128:asym", HEAD),
    ({**GPTQ, "is_marlin_format": True}, "marlin", "int4:g128", HEAD),
    ({**GPTQ, "group_size": -1, "checkpoint_format": "marlin"}, "marlin", "int4", HEAD),
    ({"quant_method": "marlin", "group_size": 128}, "marlin", "int4:g128", HEAD),
    ({"quant_method": "humming", "dtype": "float5e3m1", "group_size": 0}, "humming", "fp5", ()),
    (SPARSE, "marlin24", "int4:g128:24", HEAD),
    ({**GPTQ, "format": "marlin_24"}, "marlin24", "int4:g128:24", HEAD),
    ({"quant_method": "gptq_marlin_24", "bits": 4, "group_size": 128}, "marlin24", "int4:g128:24", HEAD),
    ({**GPTQ, "group_size": -1, "format": "marlin_24", "lm_head": True}, "marlin24", "int4:channel:24", ()),
    (ct("marlin24-ct"), "marlin24-ct", "int4:g128:24", HEAD),
    (ct("marlin24-ct", strategy="channel", group_size=None), "marlin24-ct", "int4:channel:24", HEAD),
    (ct("marlin24-ct", sparsity_config={"format": "dense", "targets": []}), "marlin24-ct", "int4:g128:24", HEAD),
    (ct("marlin24-ct", format="pack-quantized"), "compressed-tensors", "int4:g128", HEAD),
    *[(ct(num_bits=bits), "compressed-tensors", f"int{bits}:g128", HEAD) for bits in (2, 3, 5, 6, 8)],
    (ct(actorder="group"), "compressed-tensors", "int4:g128", HEAD),  # the tensors decide
    (ct(sparsity_config={}, transform_config={}, version="0.9"), "compressed-tensors", "int4:g128", HEAD),
    (GEMM, "awq", "int4:g128:asym", HEAD),
    ({**GEMM, "version": "GEMM"}, "awq", "int4:g128:asym", HEAD),
    ({**GEMM, "version": None}, "awq", "int4:g128:asym", HEAD),
    ({**GEMM, "version": None, "format": "gemm"}, "awq", "int4:g128:asym", HEAD),
    ({**GEMM, "group_size": -1}, "awq", "int4:channel:asym", HEAD),
    ({**GEMM, "zero_point": False}, "awq", "int4:g128", HEAD),
    ({**GEMM, "w_bit": 4, "q_group_size": 64}, "awq", "int4:g64:asym", HEAD),
    ({"quant_method": "awq", **OLDER}, "awq", "int4:g128:asym", HEAD),
    ({**GEMM, "version": "Quick"}, "quick", "int4:g128:asym", HEAD),
    ({**GEMM, "lm_head": True, "modules_to_not_convert": ["lm_head"]}, "awq", "int4:g128:asym", ()),
]


@pytest.mark.parametrize(("config", "layout", "label", "ignore"), READ)
def test_published_configs_are_read(config: dict[str, Any], layout: str, label: str, ignore: tuple[str, ...]) -> None:
    found, schemes = read_config(config, PATH)
    assert layout == found.NAME and schemes == Schemes(Scheme.parse(label), ignore=ignore)


#: Configs that are refused, and words of the message: the entry, or its value.
REFUSED: list[tuple[Any, str]] = [
    *[(value, "must be an object") for value in (None, [], "gptq", 4)],
    ({}, "a method without a name are not read"),
    ({"quant_method": ["gptq"]}, "['gptq'] are not read"),
    ({"quant_method": "aqlm", "bits": 4}, "aqlm"),
    ({**GPTQ, "format": "marlin_2"}, "marlin_2"),
    ({**GPTQ, "format": "gptq", "checkpoint_format": "x"}, "contradicts"),
    *[({**GPTQ, "checkpoint_format": name}, name) for name in ("bitblas", "qqq", "exl3", "qvq_v4", "GPTQ", "gptq_v3")],
    ({**GPTQ, "bits": 5, "checkpoint_format": "gptq_p"}, "'bits'"),
    ({**GPTQ, "checkpoint_format": "gptq_p", "dynamic": {".*up": {"bits": 3}}}, "'bits'"),
    ({**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, "auto-round"),
    ({**SPARSE, "format": "gptq"}, "contradicts"),
    ({**GPTQ, "bits": 8}, "'bits'"),
    ({**GPTQ, "group_size": 0}, "group size 0"),
    ({**GPTQ, "pack_dtype": "int8"}, "'pack_dtype'"),
    ({key: value for key, value in GPTQ.items() if key != "sym"}, "`sym`"),
    ({**GPTQ, "dynamic": {".*": {"bits": 8}}}, "'bits'"),
    ({**GPTQ, "dynamic": {"(": {}}}, "regular expression"),
    ({**GPTQ, "dynamic": {".*": 4}}, "dynamic"),
    ({"quant_method": "marlin", "group_size": 64}, "groups of 128"),
    ({"quant_method": "marlin", "group_size": 128, "sym": False}, "symmetric only"),
    *[({**SPARSE, **change}, word) for change, word in (
        ({"bits": 8}, "'bits'"), ({"group_size": 64}, "groups of 128"), ({"sym": False}, "symmetric")
    )],
    ({"quant_method": "humming", "b_dtype": "float4e2m1"}, "float4e2m1"),
    ({"quant_method": "humming", "b_dtype": "uint4", "weight_scale_group_size": -1}, "'weight_scale_group_size'"),
    ({"quant_method": "humming", "b_dtype": "float6e3m2", "has_zero_point": True}, "symmetric only"),
    ({"quant_method": "humming", "b_dtype": "float6e3m2", "weight_scale_group_size": 128}, "one scale per row"),
    ({"quant_method": "tcfpx", "format": "e4m1", "bits": 6}, "e4m1"),
    ({"quant_method": "tcfpx", "format": "e3m2", "bits": 5}, "bits 5"),
    ({"quant_method": "tcfpx", "bits": 6}, "`format`"),
    *[({**GEMM, "version": name}, name) for name in ("gemv", "GEMV_fast", "exllama", "marlin")],
    *[({**GEMM, key: name}, name) for key in ("format", "checkpoint_format") for name in ("gemv", "llm-awq", "marlin")],
    ({**GEMM, "version": None, "format": "llm-awq"}, "llm-awq"),
    ({**GEMM, "backend": "llm-awq"}, "llm-awq"),
    ({**GEMM, "modules_to_not_convert": "lm_head"}, "'modules_to_not_convert'"),
    ({**GEMM, "version": "quick", "group_size": -1}, "one scale per row"),
    ({**GEMM, "version": "quick", "group_size": 16}, "multiple of 32"),
    *[(ct(num_bits=bits), f"int{bits} in format") for bits in (0, 1, 7, 16)],
    (ct(format="float-quantized", num_bits=8, type="float"), "not written by quantkit"),
    (ct(format="nvfp4-pack-quantized", type="float"), "nvfp4-pack-quantized"),
    (ct(strategy="tensor", group_size=None), "tensor"),
    (ct(strategy="group", group_size=None), "group_size None"),
    (ct(strategy="group", group_size=-1), "group_size -1"),
    (ct(group_size=True), "weights.group_size'"),
    (ct(weights=None), "activations"),
    (ct(input_activations={"num_bits": 8}), "activations"),
    (ct(output_activations={}), "activations"),
    (ct(kv_cache_scheme={"num_bits": 8}), "'kv_cache_scheme'"),
    (ct(transform_config={"config_groups": {"a": 1}}), "'transform_config'"),
    (ct(sparsity_config={"format": "sparse-24-bitmask"}), "'sparsity_config'"),
    (ct(targets=["re:("]), "regular expression"),
    (ct(targets=[]), "no target"),
    (ct(ignore="lm_head"), "'ignore'"),
    (ct("marlin24-ct", sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
    (ct("marlin24-ct", group_size=64), "groups of 128"),
    (ct("marlin24-ct", symmetric=False), "symmetric"),
    (ct("marlin24-ct", num_bits=8), "int8"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "word"), REFUSED)
def test_other_variants_and_malformed_entries_are_refused_by_name(config: Any, word: str) -> None:
    refused(config, word)


def test_per_module_overrides_of_foreign_gptq_files() -> None:
    config = {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True,
        "dynamic": {r"-:.*\.mlp\.down": {}, r".*\.1\.": {"group_size": 64}, r"+:.*q_proj$": {"sym": False}},
    }  # fmt: skip
    schemes = read_config(config, PATH)[1]
    assert schemes.of("model.layers.1.self_attn.q_proj").label == "int4:g64"
    assert schemes.of("model.layers.2.self_attn.q_proj").label == "int4:g128:asym"
    assert schemes.of("model.layers.2.self_attn.k_proj").label == "int4:g128"


def test_targets_of_compressed_tensors_are_matched_in_the_librarys_order() -> None:
    config = ct()
    weights = config["config_groups"]["group_0"]["weights"]
    for name, target, size in (("b", "re:.*proj", 64), ("a", "re:.*q_", 32), ("c", MODULES[0], 16)):
        config["config_groups"][name] = {"targets": [target], "weights": {**weights, "group_size": size}}
    schemes = read_config(config, PATH)[1]
    assert schemes.of(MODULES[0]).group_size == 16
    assert schemes.of("model.layers.5.self_attn.q_proj").group_size == 64  # "re:.*p" before "re:.*q"
    assert schemes.of("model.layers.5.mlp.fc1").group_size == 128


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


def test_a_key_that_contradicts_the_public_part_is_refused() -> None:
    config = folder_config("marlin", Schemes(INT4_G128))
    for key, value in (("quant_method", "awq"), ("checkpoint_format", "gptq"), ("is_marlin_format", False)):
        refused({**config, key: value}, key, "contradict")
    for layout in ("gptq", "humming", "compressed-tensors"):
        refused({**config, "quantkit": {**config["quantkit"], "layout": layout}}, "contradict")
    six = folder_config("humming", Schemes(Scheme(FP6)))
    refused({**six, "quantkit": {**six["quantkit"], "scheme": "fp5:channel"}}, "b_dtype", "contradict")
    planes = folder_config("tcfpx", Schemes(Scheme(FP6)))
    refused({**planes, "quantkit": {**planes["quantkit"], "scheme": "fp6-e2m3:channel"}}, "'format'", "contradict")
    for layout, version in (("awq", "quick"), ("quick", "gemm"), ("awq", "gemv"), ("awq", None)):
        config = folder_config(layout, Schemes(Scheme.parse("int4:g128:asym"), ignore=HEAD))
        assert layout == read_config(config, PATH)[0].NAME
        refused({**config, "version": version}, "'version' is", "contradict")


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


def test_dense_linears_are_written_as_substrings() -> None:
    assert AWQ.write_config(Schemes(INT4_ASYM, ignore=HEAD)) == {**GEMM, "modules_to_not_convert": None}
    assert AWQ.write_config(Schemes(INT4_ASYM)) == {**GEMM, "modules_to_not_convert": None, "lm_head": True}
    ignore = ("lm_head", "model.layers.3.mlp.up_proj", r"re:.*vision\.tower.*", "re:.*[kv]_proj", "re:.*")
    config = AWQ.write_config(Schemes(INT4_ASYM, ignore=ignore))
    assert config["modules_to_not_convert"] == ["model.layers.3.mlp.up_proj", "vision.tower"]
    read = AWQ.read_config(config)
    assert read is not None and read.ignore == (
        "lm_head", r"re:.*model\.layers\.3\.mlp\.up_proj.*", r"re:.*vision\.tower.*"
    )  # fmt: skip
    assert AWQ.write_config(read)["modules_to_not_convert"] == config["modules_to_not_convert"]


def test_the_side_file_has_exactly_the_keys_of_the_loader() -> None:
    config = LAYOUTS["quick"].write_config(
        Schemes(Scheme.parse("int4:g64"), ignore=("lm_head", "model.layers.0.mlp.up_proj"))
    )
    assert config["version"] == "quick" and config["quant_method"] == "awq"
    assert LAYOUTS["quick"].SIDE_FILE is not None and LAYOUTS["quick"].SIDE_FILE.name == "quant_config.json"
    assert LAYOUTS["quick"].SIDE_FILE.contents({**config, "quantkit": {}}) == {
        "zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "QUICK",
        "modules_to_not_convert": ["model.layers.0.mlp.up_proj"],
    }  # fmt: skip


@pytest.mark.parametrize("version", ["GEMM", "QUICK"])
def test_a_folder_with_only_the_older_side_file_is_read(tmp_path: Path, version: str) -> None:
    layout = LAYOUTS["quick" if version == "QUICK" else "awq"]
    q = record(INT4_ASYM, 128, 256)
    save_file({f"a.q_proj.{name}": tensor for name, tensor in layout.pack(q).items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    side = tmp_path / "quant_config.json"
    side.write_text(json.dumps({**OLDER, "version": version}))
    source = Checkpoint(tmp_path)
    assert source.layout is layout and source.quantized("a.q_proj").equal(q)
    side.write_text(json.dumps({**OLDER, "version": "GEMV"}))
    with pytest.raises(CheckpointError, match=r"quant_config\.json: .*GEMV"):
        Checkpoint(tmp_path)
    side.write_text(json.dumps({"bits": 6, "group_size": 512}))  # how to quantize while loading (docs/layouts.md 7.6)
    assert Checkpoint(tmp_path).layout is None
