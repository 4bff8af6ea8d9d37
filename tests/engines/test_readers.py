"""Cards and notes name a reader only if it opens this folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from quantkit.core.quantized_tensor import Scheme
from quantkit.engines.readers import TRAITS, Folder, engine_kernel, opened_by, refusals
from quantkit.engines.tables import ENGINES, PUBLISHED, UNTRIED, VLLM
from quantkit.layouts import LAYOUTS
from quantkit.names import KERNELS

INTEGER = ("compressed-tensors", "gptq", "awq")
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
MODULES = [f"model.layers.0.{part}" for part in PARTS]
EXPERTS = [f"model.layers.0.mlp.experts.{i}.{part}_proj" for i in range(2) for part in ("gate", "up", "down")]


def folder(layout: str, label: str, changes: Mapping[str, str | None] = {}, **facts: Any) -> Folder:
    """Make the facts of a block; `changes` gives linears another scheme, or None for dense."""
    labels = {**dict.fromkeys(facts.pop("modules", MODULES), label), **changes}
    linears = {module: (Scheme.parse(scheme), (256, 512)) for module, scheme in labels.items() if scheme}
    dense = ["lm_head", *(module for module, scheme in labels.items() if scheme is None)]
    return Folder(layout, linears, dense, **facts)


def ends(module: str, label: str, family: str, layout: str = "compressed-tensors", **facts: Any) -> Folder:
    """Make the facts of a block with packed embeddings or a packed head, in a model of a family."""
    default = "fp6" if layout == "humming" else "int4:g64"
    return folder(layout, default, {module: label}, config={"model_type": family}, **facts)


#: the experts of two layers, and those of the first one, left dense
TWO_LAYERS = [*EXPERTS, *(name.replace(".0.mlp", ".1.mlp") for name in EXPERTS)]
ALL_DENSE: dict[str, str | None] = dict.fromkeys(EXPERTS)
#: experts as Nemotron-H has them
NO_GATES = [name for name in EXPERTS if "gate_proj" not in name]
DOWN, Q = "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"
#: What vLLM 0.26.0's own loader said of such folders (docs/layouts.md 10).
ASKED = [
    (folder("compressed-tensors", "int4:g128"), True),
    (folder("compressed-tensors", "int4:g128:asym"), True),
    (folder("compressed-tensors", "fp6"), True),
    (folder("compressed-tensors", "int4:g128", {DOWN: "fp6"}), True),
    (folder("compressed-tensors", "int4:g128", {Q: None}), False),
    (folder("compressed-tensors", "int4:g128", {Q: "int4:g64"}), False),
    (folder("compressed-tensors", "int4:g128", dict.fromkeys(MODULES[:3])), True),
    (folder("compressed-tensors", "int4:g128", padded=True), False),
    (folder("gptq", "int4:g128"), True),
    (folder("gptq", "int4:g128", {DOWN: "int4:g64"}), True),
    (folder("gptq", "int4:g128:asym"), False),
    (folder("gptq-v2", "int4:g128:asym"), False),
    (folder("awq", "int4:g128:asym"), True),
    (folder("awq", "int4:g128", {DOWN: "int4:g64"}), False),
    (folder("humming", "fp6"), True),
    (folder("humming", "fp6", {DOWN: "fp5"}), True),
    (folder("humming", "fp6", {Q: "fp5"}), False),
    (folder("humming", "fp6", {Q: None}), False),
    (folder("humming", "fp6", config={"text_config": {}}), True),
    (folder("humming", "fp6", {DOWN: "fp5"}, config={"text_config": {}}), False),
    (folder("compressed-tensors", "int4:g128", {DOWN: "int4:g64"}, config={"text_config": {}}), True),
    (folder("marlin", "int4:g128"), False),
    (folder("compressed-tensors", "int4:g128", modules=EXPERTS), True),
    (folder("gptq", "int4:g128", modules=EXPERTS), True),
    (folder("awq", "int4:g128", modules=EXPERTS), True),
    (folder("compressed-tensors", "fp6", modules=EXPERTS), False),
    (folder("humming", "fp6", modules=EXPERTS), False),
    (folder("compressed-tensors", "int4:g128", {EXPERTS[2]: "int4:g64"}, modules=EXPERTS), False),
    (folder("compressed-tensors", "int4:g128", {EXPERTS[2]: None}, modules=EXPERTS), False),
    *((folder(layout, "int4:g64:asym", modules=EXPERTS), True) for layout in ("compressed-tensors", "awq")),
    *((folder(layout, "int4:g64", ALL_DENSE, modules=TWO_LAYERS), True) for layout in ("gptq", "awq")),
    (folder("gptq", "int4:g64", {DOWN: "int4:g32"}, config={"text_config": {"model_type": "qwen3_5_text"}}), False),
    (folder("compressed-tensors", "int4:channel", modules=EXPERTS), True),
    *((folder(layout, "int4:g64", modules=NO_GATES), layout == "compressed-tensors") for layout in INTEGER),
    *((folder("compressed-tensors", f"int{bits}:g64"), True) for bits in (2, 3, 5, 6, 8)),
    *((folder("compressed-tensors", f"int{bits}:channel:asym"), bits == 8) for bits in (2, 3, 5, 6, 8)),
    *((folder("compressed-tensors", f"int{bits}:g64", modules=EXPERTS), bits == 8) for bits in (2, 3, 5, 6, 8)),
    (folder("compressed-tensors", "int8:g128:asym", modules=EXPERTS), False),
    *((ends("lm_head", label, "llama"), True) for label in ("int2:g64", "int5:g64", "int8:g64:asym")),
    *((ends("lm_head", "int4:g64", family), False) for family in ("afmoe", "opt", "qwen3_next", "llama4")),
    *((ends("lm_head", "int4:g64", "llama", layout), layout == "gptq") for layout in ("gptq", "awq", "humming")),
    *((ends("model.embed_tokens", f"int{bits}:g64", "qwen2"), bits in (2, 4, 8)) for bits in (2, 3, 4, 5, 6, 8)),
    *((ends("model.embed_tokens", label, "llama"), False) for label in ("int8:g64:asym", "fp6:channel")),
    *((ends("model.embed_tokens", "int8", family), False) for family in ("falcon", "gemma2", "mixtral", "new")),
    (ends("model.embed_tokens", "int8", "llama", tied=True), False),
    *((folder("humming", label), True) for label in ("int2:g64", "int4:g128", "int6:channel:asym", "int8:g64")),
    (folder("humming", "int4:g128", modules=EXPERTS), False),
]


@pytest.mark.parametrize(("facts", "opens"), ASKED)
def test_vllm_is_named_exactly_for_folders_that_it_opened(facts: Folder, opens: bool) -> None:
    assert ("vLLM" in opened_by(facts)) is opens
    refused = any(line.startswith("vLLM") or "such as vLLM" in line for line in refusals(facts))
    assert refused is (not opens and facts.layout != "marlin" and not facts.padded)


PLUGIN, ASKED_FOR = "vLLM with quantkit[vllm]", "vLLM asked for quantkit[vllm]"


def test_the_plug_in_is_named_for_experts_and_for_a_packed_head_only_in_families_that_show_it_theirs() -> None:
    assert PLUGIN in opened_by(folder("tcfpx", "fp6", modules=["model.layers.0.mlp.experts.3.up_proj"]))
    assert PLUGIN in opened_by(ends("lm_head", "int4:g128", "llama", "marlin"))
    mixed = {DOWN: "int4:channel", "model.layers.0.self_attn.o_proj": None}
    assert PLUGIN in opened_by(folder("marlin", "int4:g128", mixed, padded=True))
    facts = ends("lm_head", "int4:g128", "opt", "marlin")
    assert PLUGIN not in opened_by(facts)
    assert any(line.startswith(f"{PLUGIN} will not open this folder because of a packed") for line in refusals(facts))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantkit_opens_every_folder_and_others_only_layouts_of_their_own(layout: str) -> None:
    named = opened_by(folder(layout, "fp6" if layout in ("humming", "tcfpx") else "int4:g128"))
    assert named[-1] == "quantkit.load"
    assert ("transformers (after quantkit.register())" in named) is (layout in ("humming", "tcfpx"))
    assert (PLUGIN in named) is (layout in KERNELS), "the plug-in is for the layouts of kernels"


def test_asymmetric_gptq_names_the_program_that_opens_it() -> None:
    for layout in ("gptq", "gptq-v2"):
        assert opened_by(folder(layout, "int4:g128:asym"))[0] == f"GPTQModel{UNTRIED}"
        assert any("zero points" in line and "--sym" in line for line in refusals(folder(layout, "int4:g128:asym")))


def test_asymmetric_compressed_tensors_need_an_option_of_transformers() -> None:
    plain, option = "transformers (with compressed-tensors)", "dequantize=True"
    assert plain in opened_by(folder("compressed-tensors", "int4:g128"))
    assert option not in " ".join(opened_by(folder("compressed-tensors", "int4:g128")))
    asymmetric = opened_by(folder("compressed-tensors", "int4:g128:asym"))
    assert plain not in asymmetric and option in " ".join(asymmetric)
    # transformers 5.23 decodes all weights by the scheme of the first group then
    mixed = folder("compressed-tensors", "int4:g128:asym", {DOWN: "int8:g128:asym"})
    experts = folder("compressed-tensors", "int4:g128:asym", modules=EXPERTS)
    assert option not in " ".join(opened_by(mixed)) and option not in " ".join(opened_by(experts))


def test_a_dense_linear_named_like_the_start_of_a_packed_one_has_no_place_in_awq() -> None:
    router = {"model.layers.0.mlp.gate": None}
    assert "vLLM" not in opened_by(folder("awq", "int4:g128", router))
    assert "vLLM" in opened_by(folder("awq", "int4:g128", {"model.layers.0.mlp.router": None}))
    assert "vLLM" in opened_by(folder("humming", "fp6", router))


def test_mixed_groups_are_named_once_with_their_number_and_the_option() -> None:
    changes = {**{Q: "int4:g64"}, "model.layers.0.mlp.up_proj": None}
    [line] = refusals(folder("compressed-tensors", "int4:g128", changes))
    assert "model.layers.0.self_attn: q_proj, k_proj, v_proj mix int4:g128 and int4:g64 (and 1 more" in line
    assert "--set fused_alike=true" in line


def test_advice_for_several_schemes_does_not_name_an_override_which_a_target_size_has_not() -> None:
    said = " ".join(refusals(folder("humming", "fp6", {DOWN: "fp5"})))
    assert "quantize all linears in one scheme, or use --layout compressed-tensors" in said
    assert "--override" not in said


def test_sglang_is_not_named_where_it_would_leave_a_table_or_a_head_without_values() -> None:
    assert any("SGLang" in reader for reader in opened_by(ends("lm_head", "int4:g64", "llama")))
    for facts in (ends("model.embed_tokens", "int8", "llama"), ends("lm_head", "int4:g64", "mixtral")):
        assert not any("SGLang" in reader for reader in opened_by(facts))


@pytest.mark.parametrize(
    ("facts", "opens"),
    [
        (ends("model.embed_tokens", "int8", "qwen2", tied=True), True),
        (ends("model.embed_tokens", "int6:g64:asym", "gemma3_text", "humming", tied=True), True),
        (ends("model.embed_tokens", "int8", "qwen2"), False),  # vLLM itself opens it
        (ends("model.embed_tokens", "int8", "falcon", tied=True), False),
    ],
)
def test_the_plug_in_is_named_for_embeddings_that_are_the_head_too(facts: Folder, opens: bool) -> None:
    assert (ASKED_FOR in opened_by(facts)) is opens
    assert f"{ASKED_FOR} will" not in " ".join(refusals(facts)) or not opens


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (
            ends("model.embed_tokens", "int8", "falcon"),
            "vLLM 0.26.0 does not take in this family: leave them dense: drop",
        ),
        (ends("model.embed_tokens", "int6:g64", "llama"), "not symmetric INT2, INT4 or INT8: use --embeddings int8"),
        (ends("model.embed_tokens", "int8", "qwen2", tied=True), "embeddings that are the output head too: leave them"),
        (ends("lm_head", "int4:g64", "opt"), "vLLM 0.26.0 does not take in this family: leave it dense: drop --head"),
    ],
)
def test_a_line_says_why_vllm_does_not_open_packed_ends_and_what_to_type(facts: Folder, line: str) -> None:
    assert any(said.startswith("vLLM will not open") and line in said for said in map(str, refusals(facts)))


@pytest.mark.parametrize("label", ["nvfp4", "mxfp4"])
def test_fp4_is_named_where_a_program_has_a_method_for_it(label: str) -> None:
    plain = "transformers (with compressed-tensors)"
    named, half = (folder("compressed-tensors", label, is_half=half) for half in (False, True))
    assert {"vLLM", plain} <= {*opened_by(named)} and plain not in opened_by(half)
    assert any("--dense-dtype bfloat16" in line for line in map(str, refusals(half)))
    assert any("SGLang" in reader for reader in opened_by(named)) is (label == "nvfp4")
    kernels = {
        gpu: engine_kernel(VLLM, "compressed-tensors", Scheme.parse(label), 256, 256, gpu, False)[0]
        for gpu in ((9, 0), (10, 0))
    }
    rounding = ["rounds activations" in (kernels[gpu] or "") for gpu in kernels]  # an H200's failed `verify --engine`
    assert rounding == [label == "mxfp4"] * 2 and (kernels[9, 0] or "").startswith("Humming")


def test_every_row_of_the_table_is_about_known_layouts_and_traits() -> None:
    readers = [reader for engine in ENGINES for reader in engine.readers]
    assert all(set(reader.layouts) <= LAYOUTS.keys() and reader.source for reader in readers)
    assert {trait for reader in readers for trait in (*reader.refuses, reader.only) if trait} == TRAITS.keys()


def test_a_reader_that_nobody_asked_is_marked() -> None:
    llama = {"model_type": "llama"}
    named = opened_by(folder("compressed-tensors", "int4:g128", config=llama))
    assert named[:2] == ["vLLM", "SGLang"]
    assert {"SGLang"} <= {*opened_by(folder("awq", "int4:g128:asym", config=llama))}
    mixed = folder("awq", "int4:g128:asym", {Q: "int4:g64:asym"}, config=llama)
    assert "SGLang" not in opened_by(mixed), "the public config has no place for two schemes"
    untried, other = "SGLang (by its documentation, not tried)", {"model_type": "gemma3_text"}
    assert untried in opened_by(folder("compressed-tensors", "int4:g128", config=other))
    for label, expected in {"int8:g128": True, "int4:g128:asym": True, "fp6:channel": True, "int3:g128": False}.items():
        readers = opened_by(folder("compressed-tensors", label, config=llama))
        assert (untried in readers) is expected and "SGLang" not in readers
    asked = {reader.name for engine in ENGINES for reader in engine.readers if reader.source != PUBLISHED}
    assert asked.isdisjoint({"GPTQModel", "transformers (through gptqmodel)"}) and "vLLM" in asked
