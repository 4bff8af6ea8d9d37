"""Which kernel serves a planned weight, in which program, on which GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from quantkit.engines.tables import ENGINES, GPUS
from tests.command_line import RTN, call, refused
from tests.folders import NEWEST
from tests.tiny_models import write_model


def kinds(model: Path, target: str, gpu: str, *options: object, code: int = 0) -> dict[str, dict[str, Any]]:
    """Return the kinds of linears of a plan by the last part of their names."""
    args = (*RTN, "--min-share", 0, "--target", target, "--gpu", gpu, *options)
    found = json.loads(call("plan", model, *args, "--json", code=code).stdout)["serving"]
    assert (found["target"], found["gpu"]) == (target, gpu)
    return {kind["name"].rpartition(".")[2]: kind for kind in found["kinds"]}


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one block with four heads, two of keys, and 7 x 128 intermediate channels."""
    changes = {"num_hidden_layers": 1, "hidden_size": 256, "num_key_value_heads": 2, "intermediate_size": 896}
    return write_model("llama", tmp_path_factory.mktemp("grouped") / "model", **changes)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose joined gate and up have 704 rows, no multiple of 128."""
    changes = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 352}
    return write_model("llama", tmp_path_factory.mktemp("odd") / "model", **changes)


def test_vllm_joins_linears_and_takes_a_kernel_by_shape_and_group(grouped: Path, odd: Path) -> None:
    found = kinds(grouped, "vllm", "h100")
    assert list(found) == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"]
    assert found["qkv_proj"]["members"] == ["q_proj", "k_proj", "v_proj"]
    assert (found["qkv_proj"]["shape"], found["qkv_proj"]["count"]) == ([512, 256], 1)
    assert {found[name]["kernel"] for name in found if name != "lm_head"} == {"Machete"}
    assert (found["lm_head"]["kernel"], found["lm_head"]["why"]) == (None, "dense")
    small = kinds(odd, "vllm", "h100", "--group-size", 32)
    assert {small[name]["kernel"] for name in small if name != "lm_head"} == {"Marlin"}
    rows = kinds(odd, "vllm", "h100", "--group-size", "channel")
    kernels = {name: rows[name]["kernel"] for name in ("qkv_proj", "gate_up_proj", "down_proj")}
    assert kernels == {"qkv_proj": "Machete", "gate_up_proj": "Marlin", "down_proj": "Marlin"}


def test_packed_embeddings_have_no_kernel_and_a_head_has_that_of_its_shape(grouped: Path, tmp_path: Path) -> None:
    options = ("--embeddings", "int8", "--head", "int4:g128")
    found = kinds(grouped, "vllm", "h100", *options)
    table = found["embed_tokens"]
    assert (table["kernel"], table["why"]) == (None, "its rows are gathered and decoded")
    assert found["lm_head"]["kernel"] == "Marlin" and found["o_proj"]["kernel"] == "Machete"
    tied = write_model("llama", tmp_path / "tied", tie_word_embeddings=True)
    said = call("plan", tied, *RTN, "--target", "vllm", "--gpu", "h100", *options[:2]).stdout
    assert "vLLM will not open this folder because of packed embeddings that are the output head too: " in said
    assert "leave them dense: drop --embeddings" in said and "loads in       vLLM asked for quantkit[vllm]" in said


@pytest.mark.parametrize(
    ("family", "option", "what"),
    [
        pytest.param("gemma", "--embeddings", "packed embeddings", marks=NEWEST),  # tied: the plug-in refuses them too
        ("glm4_moe", "--embeddings", "packed embeddings"),
        ("opt", "--head", "a packed output head"),
    ],
)
def test_a_plan_for_vllm_refuses_packed_ends_that_the_class_does_not_open(
    family: str, option: str, what: str, tmp_path: Path
) -> None:
    model = write_model(family, tmp_path / "model", tie_word_embeddings=family == "gemma")
    args = (*RTN, "--min-share", 0, "--group-size", 64, "--target", "vllm", "--gpu", "h100")
    said = refused("plan", model, *args, option, "int8", code=2)
    assert f"vllm: it does not open a folder with {what}, which vLLM 0.26.0 does not take in this family: leave" in said
    assert f"drop {option}" in said


def test_what_no_row_covers_is_not_known(grouped: Path) -> None:
    found = kinds(grouped, "sglang", "a100")
    assert (found["o_proj"]["kernel"], found["o_proj"]["why"], found["o_proj"]["source"]) == (None, "not known", None)
    assert kinds(grouped, "vllm", "h100", "--group-size", 16)["o_proj"]["why"] == "not known"
    assert kinds(grouped, "vllm", "a100")["o_proj"]["kernel"] == "Marlin"
    assert kinds(grouped, "vllm", "rtx5090", "--layout", "gptq", "--group-size", 32)["o_proj"]["kernel"] is None


def test_a_folder_that_a_program_does_not_open_has_no_kernel_there(grouped: Path) -> None:
    asym = kinds(grouped, "vllm", "h100", "--layout", "gptq", "--asym", code=2)
    assert asym["o_proj"]["kernel"] is None and "zero points" in asym["o_proj"]["why"]
    other = kinds(grouped, "sglang", "h100", "--layout", "marlin", code=2)
    assert "does not read the layout marlin" in other["o_proj"]["why"]
    split = kinds(grouped, "vllm", "h100", "--override", "k_proj=int4:g64", code=2)
    assert "treated differently" in split["qkv_proj"]["why"]


def test_each_width_has_the_kernel_that_vllm_named(grouped: Path) -> None:
    for gpu, options, kernel in (
        ("h100", ("--format", "int6"), "Humming"),
        ("rtx4090", ("--format", "int3", "--group-size", "channel"), "Humming"),
        ("h100", ("--format", "int8", "--group-size", 64), "Machete"),
        ("a100", ("--format", "int8", "--group-size", "channel"), "AllSpark"),
        ("t4", ("--format", "int8", "--group-size", 64, "--asym"), "Humming"),
    ):
        assert kinds(grouped, "vllm", gpu, *options)["o_proj"]["kernel"] == kernel, (gpu, options)


def test_experts_are_one_kind(folders: dict[str, Path]) -> None:
    found = kinds(folders["mixtral"], "vllm", "h100", "--group-size", 64)
    assert found["experts"]["kernel"] == "Marlin for fused experts" and found["experts"]["shape"] == [128, 128]
    floating = kinds(folders["mixtral"], "vllm", "h100", "--format", "fp6", code=2)
    assert "experts in a floating format" in floating["experts"]["why"]


def test_quantkit_names_its_own_kernel(grouped: Path) -> None:
    marlin = ("--layout", "marlin", "--skip", "[kv]_proj")
    assert kinds(grouped, "quantkit", "h100", *marlin)["o_proj"]["kernel"] == "marlin_hopper"
    assert kinds(grouped, "quantkit", "rtx4090", *marlin)["o_proj"]["kernel"] == "marlin_portable"
    old = kinds(grouped, "quantkit", "t4", *marlin)["o_proj"]
    assert old["kernel"] is None and "8.0 (Ampere) or newer" in old["why"]
    recast = kinds(grouped, "quantkit", "a100")["q_proj"]
    assert (recast["kernel"], recast["why"]) == ("marlin_portable", "after load has recast it to marlin")


def test_transformers_decodes_compressed_tensors(grouped: Path) -> None:
    found = kinds(grouped, "transformers", "h100")["q_proj"]
    assert found["kernel"] is None and "decodes" in found["why"] and "transformers 5" in found["source"]
    assert kinds(grouped, "transformers", "h100", "--format", "fp6")["q_proj"]["kernel"] == "tcfpx_hopper"
    assert kinds(grouped, "transformers", "h100", "--layout", "gptq")["q_proj"]["why"] == "not known"


def test_vllm_with_the_plug_in_runs_quantkits_kernel_on_what_it_joins(grouped: Path, odd: Path) -> None:
    found = kinds(grouped, "vllm", "h100", "--layout", "marlin")
    assert (found["qkv_proj"]["kernel"], found["qkv_proj"]["shape"]) == ("marlin_hopper", [512, 256])
    rows = kinds(odd, "vllm", "h100", "--format", "fp6", "--layout", "tcfpx", "--set", "pad=true")
    assert rows["gate_up_proj"]["kernel"] == "tcfpx_hopper"


def test_a_target_prints_a_table_with_its_sources(grouped: Path) -> None:
    text = call("plan", grouped, *RTN, "--target", "vllm", "--gpu", "h100").stdout
    assert re.search(r"vllm on h100 \(9\.0\) +count +n x k +scheme +kernel\n", text)
    assert re.search(r"layers\.N\.self_attn\.qkv_proj +1 +512x256 +int4:g128 +Machete \[1\]\n", text)
    assert "[1] vLLM 0.26.0" in text


@pytest.mark.parametrize(
    ("options", "target", "told"),
    [
        (("--set", "signed=true", "--layout", "gptq"), "vllm", True),
        (("--set", "signed=true", "--layout", "marlin"), "vllm", False),
        (("--set", "signed=true"), "quantkit", False),
        ((), "vllm", False),
    ],
)
def test_a_plan_for_vllm_says_what_negative_scales_break(
    options: tuple[str, ...], target: str, told: bool, grouped: Path
) -> None:
    text = " ".join(call("plan", grouped, *RTN, "--target", target, "--gpu", "a100", *options).stdout.split())
    assert ("VLLM_MARLIN_INPUT_DTYPE=int8" in text) == told
    assert (
        "for W4A8 quantize with --set signed=false (https://github.com/vllm-project/vllm/issues/48905" in text
    ) == told


def test_every_row_of_the_table_has_a_dated_source() -> None:
    for row in (row for engine in ENGINES for row in engine.kernels):
        assert re.search(r"20\d\d-\d\d-\d\d", row.source), row
        assert row.kernel is not None or row.why, row
        assert row.capabilities is None or set(row.capabilities) <= set(GPUS.values()), row
