"""FP8 and MXFP4 folders as sources: the weights are those of the published arithmetic, and nothing else is guessed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quantkit.algorithms import rtn
from quantkit.api import compare
from quantkit.checkpoint import low_bit_sources
from quantkit.checkpoint.low_bit_weights import unpack_float8
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import Scheme
from quantkit.layouts import LAYOUTS
from quantkit.pipeline.quantize import quantize
from quantkit.planning.survey import plan
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import from_mapping
from tests.checkpoint.low_bit import (
    BLOCK,
    FINE,
    SMALL,
    Tensors,
    by_blocks,
    floats,
    folder_of,
    fp8_values,
    rewritten,
    to_fp8,
    to_mxfp4,
    write_dense,
    write_fp8,
)

RTN = {"scheme": {"format": "int4", "group_size": 32}, "method": "rtn", "layout": "gptq"}


GPT_OSS = {
    **{**SMALL, "hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "num_local_experts": 3},
    **{"num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": None},
}


class Form(NamedTuple):
    """How an FP8 weight is stored, and what the notice says of it."""

    stated: dict[str, Any]
    words: str
    block: tuple[int, int] = (BLOCK, BLOCK)
    store: Callable[[Tensor], Tensor] = lambda scales: scales
    suffix: str = "weight_scale_inv"
    beside: tuple[str, ...] = ()


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": floats(8, strategy, **more), "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


def power_of_two(scales: Tensor) -> Tensor:
    return (scales.log2().ceil() + 127).to(torch.uint8)


N, K = 48, 64
EXPONENTS = {**FINE, "scale_fmt": "ue8m0"}
STATIC = {**FINE, "weight_block_size": None, "activation_scheme": "static"}
CACHE = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
FORMS = {
    "blocks": Form(FINE, "32x32 block scales"),
    "bfloat16 scales": Form(FINE, "32x32 block scales", store=Tensor.bfloat16),
    "E8M0 scales": Form(
        EXPONENTS, "32x32 block scales", store=lambda s: power_of_two(s).view(torch.float8_e8m0fnu), suffix="scale"
    ),
    "E8M0 scales as bytes": Form(EXPONENTS, "32x32 block scales", store=power_of_two),
    "one block": Form({**FINE, "weight_block_size": [128, 128]}, "128x128 block scales", (128, 128)),
    "a tensor, static activations": Form(
        STATIC, "one scale a tensor", (N, K), lambda s: s.bfloat16().reshape(()), beside=("activation_scale",)
    ),
    "compressed-tensors, a tensor": Form(
        {**compressed("tensor"), **CACHE},
        *("one scale a tensor", (N, K), lambda s: s.reshape(1), "weight_scale", ("input_scale", "output_scale")),
    ),
    "compressed-tensors, blocks": Form(
        compressed("block", block_structure=[BLOCK, 16]),
        *("32x16 block scales", (BLOCK, 16), Tensor.bfloat16, "weight_scale"),
    ),
    "compressed-tensors, groups": Form(
        compressed("group", size=16), "one scale for 16", (1, 16), suffix="weight_scale"
    ),
}


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


def require_equal(low: Path, expected: Tensors) -> Checkpoint:
    """Require that a low-bit folder presents exactly these tensors, whole and by slices."""
    src = Checkpoint(low)
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


def weights_in(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def stored_as(folder: Path, tensors: Tensors, stated: dict[str, Any]) -> Path:
    return folder_of(folder, tensors, {"model_type": "llama", "dtype": "bfloat16", "quantization_config": stated})


@pytest.mark.parametrize("case", FORMS)
def test_fp8_weights_are_those_of_the_published_arithmetic(case: str, tmp_path: Path) -> None:
    form = FORMS[case]
    codes, scales = to_fp8(torch.randn(N, K, generator=torch.Generator().manual_seed(0)), *form.block)
    stored = form.store(scales)
    powers = stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored
    expected = by_blocks(fp8_values(codes), powers.float().reshape(scales.shape).numpy(), *form.block)
    tensors = {"x.weight": codes, f"x.{form.suffix}": stored, **{f"x.{name}": torch.ones(1) for name in form.beside}}
    src = require_equal(stored_as(tmp_path / "m", tensors, form.stated), {"x.weight": expected})
    left_out = "".join(f"1 {name}, " for name in form.beside)[:-2] + " and " if form.beside else ""
    told = f"source weights are FP8 ({form.words}), dequantized to bfloat16 on reading; left out: "
    assert src.notices == [f"{told}{left_out}the rounding of activations"]


@pytest.mark.parametrize(("stated", "form"), [(FINE, "FP8"), ({"quant_method": "mxfp4"}, "MXFP4 (one scale for 32)")])
def test_a_dense_folder_with_a_stale_config_is_dense_and_says_so(
    stated: dict[str, Any], form: str, llama: Path, tmp_path: Path
) -> None:
    src = require_equal(rewritten(llama, tmp_path / "stale", weights_in(llama), stated), weights_in(llama))
    assert src.notices == [f"config.json states {form}, no tensor is stored in it"]


@pytest.mark.parametrize(
    ("block", "shape"), [([32, 32], (3, 2, 2)), (None, (3,)), (None, (3, 1, 1)), (None, (3, 48, 1))]
)
def test_fp8_experts_in_one_tensor_have_the_scales_of_their_expert(
    block: list[int] | None, shape: tuple[int, ...], tmp_path: Path
) -> None:
    random = torch.Generator().manual_seed(0)
    codes = torch.randn(3, 48, 64, generator=random).to(torch.float8_e4m3fn)
    scales = torch.rand(shape, generator=random)
    rows, columns = block or (1 if len(shape) == 3 and shape[1] == 48 else 48, 64)
    each = [
        by_blocks(fp8_values(codes[i]), scales[i].reshape(-(-48 // rows), -1).numpy(), rows, columns) for i in range(3)
    ]
    low = {"experts.up": codes, "experts.up_scale_inv": scales, "experts.up_activation_scale": torch.ones(3)}
    folder = stored_as(tmp_path / "m", low, {**FINE, "weight_block_size": block})
    require_equal(folder, {"experts.up": torch.stack(each)})


def test_mxfp4_experts_are_those_of_transformers(gpt_oss: tuple[Path, Path]) -> None:
    src = require_equal(gpt_oss[0], weights_in(gpt_oss[1]))
    assert src.notices == ["source weights are MXFP4 (one scale for 32), dequantized to bfloat16 on reading"]


def test_every_mxfp4_code_and_extreme_exponents_are_exact(gpt_oss: tuple[Path, Path], tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    tensors = load_file(gpt_oss[0] / "model.safetensors")
    tensors[f"{name}_blocks"].view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    tensors[f"{name}_scales"].view(-1)[:4] = torch.tensor([1, 120, 130, 250], dtype=torch.uint8)
    low = rewritten(gpt_oss[0], tmp_path / "m", tensors, {"quant_method": "mxfp4"})
    expected = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
    assert torch.equal(Checkpoint(low).get(name), expected)


def test_experts_of_gpt_oss_rounded_to_mxfp4_keep_their_codes_and_scales(gpt_oss: tuple[Path, Path]) -> None:
    src, stored, layout = Checkpoint(gpt_oss[0]), weights_in(gpt_oss[0]), LAYOUTS["compressed-tensors"]
    for name in (name for name in src.names() if name.endswith(("gate_up_proj", "down_proj"))):
        for expert, dense in enumerate(src.get(name)):
            packed = layout.pack(rtn.quantize(dense.T.contiguous(), Scheme.parse("mxfp4"))[0])
            assert torch.equal(packed["weight_packed"], stored[f"{name}_blocks"][expert].flatten(1))
            assert torch.equal(packed["weight_scale"], stored[f"{name}_scales"][expert])


def test_gptq_of_a_low_bit_folder_gives_the_bytes_of_the_dense_one(gpt_oss: tuple[Path, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Document {i}: " + "a scale multiplies a block " * (1 + i % 5) for i in range(8)))
    calibration = {"data": str(text), "samples": 4, "max_length": 32}
    recipe = from_mapping({**RTN, "method": "gptq", "calibration": calibration})
    assert plan(gpt_oss[0], recipe).output.rows == plan(gpt_oss[1], recipe).output.rows
    reports = [quantize(folder, tmp_path / folder.name, recipe, run=RunOptions(min_share=0)) for folder in gpt_oss]
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("low", "exact")]
    assert configs[0] == configs[1] and configs[0]["quantization_config"]["quant_method"] == "gptq"
    assert ["dequantized to bfloat16 on reading" in str(each["notices"]) for each in reports] == [True, False]
    found, expected = (load_file(tmp_path / name / "model-00001-of-00001.safetensors") for name in ("low", "exact"))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_a_comparison_has_the_size_of_a_low_bit_source_not_that_of_its_dequantized_weights(
    llama: Path, tmp_path: Path
) -> None:
    low, _ = write_fp8(llama, tmp_path)
    (tmp_path / "text.txt").write_text("A scale multiplies a block of weights. " * 40)
    judged: dict[str, Any] = {"text": str(tmp_path / "text.txt"), "window": 64, "tokens": 64, "device": "cpu"}
    row = compare(low, tmp_path / "table", recipes=["int4:g32:rtn"], **judged).rows[0]
    stored = load_file(low / "model.safetensors").values()
    assert row["bytes"] == sum(tensor.nbytes for tensor in stored)
    assert row["precision"] == "FP8 (32x32 block scales)" and row["bits"] < 16


def test_the_quantization_of_a_wrapper_s_language_model_is_read_and_does_not_survive(
    llama: Path, tmp_path: Path
) -> None:
    low, exact = write_fp8(llama, tmp_path)
    config = json.loads((low / "config.json").read_text())
    config["text_config"] = {"quantization_config": config.pop("quantization_config"), "rope_theta": 7}
    (low / "config.json").write_text(json.dumps(config))
    src = require_equal(low, weights_in(exact))
    assert src.dense_config() == {**src.config, "text_config": {"rope_theta": 7}}


def test_all_codes_of_float8_have_torch_s_values() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    for dtype in low_bit_sources.FP8:
        found, known = unpack_float8(codes.view(dtype)), codes.view(dtype).float()
        assert torch.equal(found.view(torch.int32), known.view(torch.int32))
