"""FP8 and MXFP4 folders as sources: the weights are those of the published arithmetic, and nothing else is guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quantkit.api import compare
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.evaluation.verify import verify
from quantkit.inference.load import load
from quantkit.pipeline.convert import pack
from quantkit.pipeline.quantize import quantize
from quantkit.planning.survey import plan
from quantkit.recipes.recipe import from_mapping
from tests.checkpoint.low_bit import (
    BLOCK,
    FINE,
    SMALL,
    by_blocks,
    fp8_values,
    rewritten,
    to_mxfp4,
    write_dense,
    write_fp8,
)

RTN = {"scheme": {"format": "int4", "group_size": 32}, "method": "rtn", "layout": "gptq"}


DEEPSEEK = {
    **{**SMALL, "num_key_value_heads": 4, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64},
    **{"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2},
    **{"n_group": 2, "topk_group": 1, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16},
    **{"qk_nope_head_dim": 16, "v_head_dim": 16},
}
GPT_OSS = {
    **{**SMALL, "hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "num_local_experts": 3},
    **{"num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": None},
}


COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {**COMPRESSED, "config_groups": {"group_0": group}}


def power_of_two(scales: Tensor) -> Tensor:
    return (scales.log2().ceil() + 127).to(torch.uint8)


#: Case -> what `write_fp8` is given, and what the notice says of it.
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "blocks": ({"stated": FINE, "rows": BLOCK, "columns": BLOCK}, "32x32 block scales"),
    "blocks, bfloat16 scales": (
        {"stated": FINE, "rows": BLOCK, "columns": BLOCK, "store": lambda s: s.bfloat16()},
        "32x32 block scales",
    ),
    "blocks, E8M0 scales": (
        {
            "stated": {**FINE, "scale_fmt": "ue8m0"},
            "rows": BLOCK,
            "columns": BLOCK,
            "store": lambda s: power_of_two(s).view(torch.float8_e8m0fnu),
            "suffix": "scale",
        },
        "32x32 block scales",
    ),
    "blocks, E8M0 scales as bytes": (
        {"stated": {**FINE, "scale_fmt": "ue8m0"}, "rows": BLOCK, "columns": BLOCK, "store": power_of_two},
        "32x32 block scales",
    ),
    "a tensor, static activations": (
        {
            "stated": {**FINE, "weight_block_size": None, "activation_scheme": "static"},
            "rows": None,
            "columns": None,
            "store": lambda s: s.bfloat16().reshape(()),
            "activation_scale": torch.ones(()),
        },
        "one scale a tensor",
    ),
    "compressed-tensors, a tensor": (
        {
            "stated": {**compressed("tensor"), "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
            "rows": None,
            "columns": None,
            "store": lambda s: s.reshape(1),
            "suffix": "weight_scale",
            "input_scale": torch.ones(1),
            "output_scale": torch.ones(1),
        },
        "one scale a tensor",
    ),
    "compressed-tensors, blocks": (
        {
            "stated": compressed("block", block_structure=[BLOCK, 16]),
            "rows": BLOCK,
            "columns": 16,
            "store": lambda s: s.bfloat16(),
            "suffix": "weight_scale",
        },
        "32x16 block scales",
    ),
    "compressed-tensors, groups": (
        {"stated": compressed("group", group_size=16), "rows": 1, "columns": 16, "suffix": "weight_scale"},
        "one scale for 16",
    ),
}
#: Case -> the tensors that no dense model has.
LEFT_OUT = {
    "a tensor, static activations": "14 activation_scale and ",
    "compressed-tensors, a tensor": "14 input_scale, 14 output_scale and ",
}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("deepseek")
    source = write_dense(folder / "source", "DeepseekV3Config", DEEPSEEK)
    return write_fp8(source, folder, FINE, BLOCK, BLOCK)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("gpt-oss")
    source = write_dense(folder / "source", "GptOssConfig", GPT_OSS)
    dense = load_file(source / "model.safetensors")
    low, exact = dict(dense), dict(dense)
    for name in [name for name in dense if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = to_mxfp4(dense[name])
        del low[name]
        low |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        exact[name] = convert_moe_packed_tensors(blocks, scales)
    stated = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return rewritten(source, folder / "low", low, stated), rewritten(source, folder / "exact", exact, None)


def require_equal(low: Path, exact: Path) -> Checkpoint:
    """Require that the low-bit folder presents exactly the tensors of the dense one, whole and by slices."""
    src, expected = Checkpoint(low), load_file(exact / "model.safetensors")
    assert src.layout is None and src.low_bit is not None
    assert sorted(src.names()) == sorted(expected)
    for name, tensor in expected.items():
        found = src.get(name)
        assert (src.shape(name), src.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), name
        for index in range(0, len(tensor), 7):
            assert torch.equal(src.get(name, index), tensor[index]), (name, index)
            some = slice(index, min(index + 3, len(tensor)))
            assert torch.equal(src.get(name, some), tensor[some]), (name, some)
    return src


@pytest.mark.parametrize("form", FORMS)
def test_fp8_weights_are_those_of_the_published_arithmetic(form: str, llama: Path, tmp_path: Path) -> None:
    given, words = FORMS[form]
    src = require_equal(*write_fp8(llama, tmp_path, **given))
    left_out = LEFT_OUT.get(form, "") + "the rounding of activations"
    told = f"source weights are FP8 ({words}), dequantized to bfloat16 on reading; left out: {left_out}"
    assert src.notices == [told]


def test_fp8_experts_and_blocks_that_are_cut_are_those_of_the_published_arithmetic(deepseek: tuple[Path, Path]) -> None:
    src = require_equal(*deepseek)
    assert src.shape("model.layers.0.self_attn.kv_a_proj_with_mqa.weight") == (48, 64)  # 1.5 blocks of 32


@pytest.mark.parametrize(("stated", "form"), [(FINE, "FP8"), ({"quant_method": "mxfp4"}, "MXFP4 (one scale for 32)")])
def test_a_dense_folder_with_a_stale_config_is_dense_and_says_so(
    stated: dict[str, Any], form: str, llama: Path, tmp_path: Path
) -> None:
    stale = rewritten(llama, tmp_path / "stale", load_file(llama / "model.safetensors"), stated)
    src = require_equal(stale, llama)
    assert src.notices == [f"config.json states {form}, no tensor is stored in it"]


def test_a_weight_of_one_block_has_block_scales(llama: Path, tmp_path: Path) -> None:
    low, _ = write_fp8(llama, tmp_path, {**FINE, "weight_block_size": [128, 128]}, 128, 128)
    assert Checkpoint(low).low_bit == "FP8 (128x128 block scales)"


@pytest.mark.parametrize(
    ("block", "shape"), [([32, 32], (3, 2, 2)), (None, (3,)), (None, (3, 1, 1)), (None, (3, 48, 1))]
)
def test_fp8_experts_in_one_tensor_have_the_scales_of_their_expert(
    block: list[int] | None, shape: tuple[int, ...], llama: Path, tmp_path: Path
) -> None:
    random = torch.Generator().manual_seed(0)
    codes = torch.randn(3, 48, 64, generator=random).to(torch.float8_e4m3fn)
    scales = torch.rand(shape, generator=random)
    rows, columns = block or (1 if len(shape) == 3 and shape[1] == 48 else 48, 64)
    each = [
        by_blocks(fp8_values(codes[i]), scales[i].reshape(-(-48 // rows), -1).numpy(), rows, columns) for i in range(3)
    ]
    low = {"experts.up": codes, "experts.up_scale_inv": scales, "experts.up_activation_scale": torch.ones(3)}
    stated = {**FINE, "weight_block_size": block}
    require_equal(
        rewritten(llama, tmp_path / "low", low, stated),
        rewritten(llama, tmp_path / "exact", {"experts.up": torch.stack(each)}, None),
    )


def test_mxfp4_experts_are_those_of_transformers(gpt_oss: tuple[Path, Path]) -> None:
    src = require_equal(*gpt_oss)
    assert src.notices == ["source weights are MXFP4 (one scale for 32), dequantized to bfloat16 on reading"]


def test_every_mxfp4_code_and_extreme_exponents_are_exact(gpt_oss: tuple[Path, Path], tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    tensors = load_file(gpt_oss[0] / "model.safetensors")
    tensors[f"{name}_blocks"].view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    tensors[f"{name}_scales"].view(-1)[:4] = torch.tensor([1, 120, 130, 250], dtype=torch.uint8)
    low = rewritten(gpt_oss[0], tmp_path / "m", tensors, {"quant_method": "mxfp4"})
    expected = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
    assert torch.equal(Checkpoint(low).get(name), expected)


def test_gptq_of_a_low_bit_folder_gives_the_bytes_of_the_dense_one(gpt_oss: tuple[Path, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Document {i}: " + "a scale multiplies a block " * (1 + i % 5) for i in range(8)))
    calibration = {"data": str(text), "samples": 4, "max_length": 32}
    recipe = from_mapping({**RTN, "method": "gptq", "calibration": calibration})
    assert plan(gpt_oss[0], recipe).output.rows == plan(gpt_oss[1], recipe).output.rows
    reports = [quantize(folder, tmp_path / folder.name, recipe, min_share=0) for folder in gpt_oss]
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("low", "exact")]
    assert configs[0] == configs[1] and configs[0]["quantization_config"]["quant_method"] == "gptq"
    assert ["dequantized to bfloat16 on reading" in str(each["notices"]) for each in reports] == [True, False]
    found, expected = (load_file(tmp_path / name / "model-00001-of-00001.safetensors") for name in ("low", "exact"))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_a_comparison_has_the_size_of_a_low_bit_source_not_that_of_its_dequantized_weights(
    llama: Path, tmp_path: Path
) -> None:
    low, _ = write_fp8(llama, tmp_path, FINE, BLOCK, BLOCK)
    (tmp_path / "text.txt").write_text("A scale multiplies a block of weights. " * 40)
    judged: dict[str, Any] = {"text": str(tmp_path / "text.txt"), "window": 64, "tokens": 64, "device": "cpu"}
    row = compare(low, tmp_path / "table", recipes=["int4:g32:rtn"], **judged).rows[0]
    stored = load_file(low / "model.safetensors").values()
    assert row["bytes"] == sum(tensor.nbytes for tensor in stored)
    assert row["precision"] == "FP8 (32x32 block scales)" and row["bits"] < 16


def test_the_quantization_of_a_wrapper_s_language_model_is_read_and_does_not_survive(
    llama: Path, tmp_path: Path
) -> None:
    low, exact = write_fp8(llama, tmp_path, FINE, BLOCK, BLOCK)
    config = json.loads((low / "config.json").read_text())
    config["text_config"] = {"quantization_config": config.pop("quantization_config"), "rope_theta": 7}
    (low / "config.json").write_text(json.dumps(config))
    src = require_equal(low, exact)
    assert src.dense_config() == {**src.config, "text_config": {"rope_theta": 7}}


def test_low_bit_folders_are_sources_alone(llama: Path, tmp_path: Path) -> None:
    low, _ = write_fp8(llama, tmp_path, FINE, BLOCK, BLOCK)
    with pytest.raises(CheckpointError, match="use quantkit quantize first"):
        pack(low, tmp_path / "out", "marlin")
    with pytest.raises(CheckpointError, match="or load it by transformers"):
        load(low, device="cpu")
    with pytest.raises(CheckpointError, match=r"is FP8 .32x32 block scales., and packed"):
        verify(low)
