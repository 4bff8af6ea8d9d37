"""FP8 and MXFP4 folders as sources: the weights are those of the published arithmetic, and nothing else is guessed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quantkit.api import compare, eval_ppl
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, QuantkitError
from quantkit.evaluation.verify import verify
from quantkit.inference.load import load
from quantkit.pipeline.convert import pack
from quantkit.pipeline.inspection import describe
from quantkit.pipeline.quantize import quantize
from quantkit.planning.survey import plan
from quantkit.recipes.recipe import from_mapping
from tests.tiny_models import byte_tokenizer

RTN = {"scheme": {"format": "int4", "group_size": 32}, "method": "rtn", "layout": "gptq"}
BLOCK = 32  # instead of 128, so that tiny weights have several blocks, the last of them cut

Tensors = dict[str, Tensor]


# ------------------------------------------------------------- the published arithmetic, on its own


def fp8_values(stored: Tensor) -> np.ndarray:
    """Decode E4M3 (1, 4 and 3 bits, bias 7, 0x7F and 0xFF NaN) byte by byte, as the FP8 paper defines it."""
    table = np.zeros(256, np.float32)
    for byte in range(256):
        sign, exponent, fraction = 1 - 2 * (byte >> 7), (byte >> 3) & 15, byte & 7
        value = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
        table[byte] = sign * (np.nan if byte & 127 == 127 else value)
    return table[stored.view(torch.uint8).numpy()]


def by_blocks(values: np.ndarray, scales: np.ndarray, rows: int, columns: int) -> Tensor:
    """Multiply each block of a matrix by its scale, in float32, and round to bfloat16."""
    out = np.empty(values.shape, np.float32)
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            out[i, j] = values[i, j] * scales[i // rows, j // columns]
    return torch.from_numpy(out).to(torch.bfloat16)


def to_fp8(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Quantize a matrix to FP8 with a float32 scale for each block; return the codes and scales."""
    n, k = weight.shape
    grid, codes = torch.empty(-(-n // rows), -(-k // columns)), torch.empty(n, k, dtype=torch.float8_e4m3fn)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            some = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            grid[i, j] = weight[some].float().abs().max() / 448
            codes[some] = (weight[some].float() / grid[i, j]).to(torch.float8_e4m3fn)
    return codes, grid


def to_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize experts `[e, k, n]` to MXFP4: blocks `[e, n, k / 32, 16]` and scales `[e, n, k / 32]`, both uint8."""
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weight.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor() - 2
    scaled = groups / exponents.exp2().unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - magnitudes).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponents + 127).to(torch.uint8)


# ------------------------------------------------------------- tiny models, as published ones are

IDS = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256, "max_position_embeddings": 512}
SMALL = {**IDS, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = {**SMALL, "hidden_size": 64, "intermediate_size": 96}
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


def write_dense(folder: Path, name: str, arguments: dict[str, Any]) -> Path:
    """Write a random bfloat16 model with a byte-level tokenizer."""
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**arguments))
    model.to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def rewritten(source: Path, folder: Path, tensors: Tensors, stated: dict[str, Any] | None) -> Path:
    """Copy a folder with other tensors and another `quantization_config`."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.name not in ("model.safetensors", "config.json"):
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | ({"quantization_config": stated} if stated else {})))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def linears(tensors: Tensors) -> list[str]:
    """List the weights that published FP8 models quantize: all linears but the head and the routers."""
    kept = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
    return [name for name, tensor in tensors.items() if tensor.ndim == 2 and not name.endswith(kept)]


def write_fp8(
    source: Path,
    folder: Path,
    stated: dict[str, Any],
    rows: int | None,
    columns: int | None,
    store: Callable[[Tensor], Tensor] = lambda scales: scales,
    suffix: str = "weight_scale_inv",
    **more: Tensor,
) -> tuple[Path, Path]:
    """Write an FP8 folder, and a dense one with the values that the published arithmetic gives; return both.

    Each block of `rows` and `columns` (None: all) has a scale, changed by `store`. `more` are tensors of each linear.
    """
    dense = load_file(source / "model.safetensors")
    low, exact = dict(dense), dict(dense)
    for name in linears(dense):
        block = rows or dense[name].shape[0], columns or dense[name].shape[1]
        codes, scales = to_fp8(dense[name], *block)
        stored = store(scales)
        powers = stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored
        module = name.removesuffix("weight")
        low |= {name: codes, module + suffix: stored.clone(), **{module + last: t.clone() for last, t in more.items()}}
        grid = powers.float().reshape(scales.shape).numpy()
        exact[name] = by_blocks(fp8_values(codes), grid, *block)
    return rewritten(source, folder / "low", low, stated), rewritten(source, folder / "exact", exact, None)


FINE = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}
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
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense(tmp_path_factory.mktemp("llama"), "LlamaConfig", LLAMA)


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


def test_fp8_blocks_have_the_values_of_transformers(deepseek: tuple[Path, Path]) -> None:
    from types import SimpleNamespace

    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    src, stored = Checkpoint(deepseek[0]), load_file(deepseek[0] / "model.safetensors")
    theirs = Fp8Dequantize(SimpleNamespace())
    for name in src.names():
        scale = f"{name}_scale_inv"
        if name.endswith("proj.weight") and src.shape(name)[0] % BLOCK == 0:
            found = theirs._dequantize_one(stored[name], stored[scale], torch.bfloat16)
            assert torch.equal(src.get(name), found)


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


def test_perplexity_of_a_low_bit_folder_is_that_of_the_dense_one(deepseek: tuple[Path, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A scale multiplies a block of weights. " * 40)
    found, expected = (eval_ppl(folder, data=str(text), window=64, device="cpu") for folder in deepseek)
    assert found.perplexity == expected.perplexity


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


Q, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts.down_proj"
#: Case -> what is done to the tensors of an FP8 folder, or of an MXFP4 one, and what the error says.
DAMAGE: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "no scale": ("fp8", lambda t: t.pop(f"{Q}_scale_inv"), f"{Q} is FP8 and has no {Q}_scale_inv"),
    "no weight": ("fp8", lambda t: t.pop(Q), f"{Q}_scale_inv is there, the FP8 weight that it scales is not"),
    "a float weight with a scale": (
        "fp8",
        lambda t: t.update({Q: t[Q].bfloat16()}),
        f"{Q}_scale_inv is there, the FP8 weight that it scales is not",
    ),
    "a scale too few": (
        "fp8",
        lambda t: t.update({f"{Q}_scale_inv": torch.ones(2, 1)}),
        f"{Q}_scale_inv has shape [2, 1], config.json asks for [2, 2] with a weight of [64, 64]",
    ),
    "scales of integers": (
        "fp8",
        lambda t: t.update({f"{Q}_scale_inv": torch.ones(2, 2, dtype=torch.int32)}),
        f"{Q}_scale_inv has dtype int32",
    ),
    "a vector in FP8": ("fp8", lambda t: t.update({Q: t[Q][0].clone()}), f"{Q} is FP8 of shape [64]"),
    "an infinite scale": (
        "fp8",
        lambda t: t[f"{Q}_scale_inv"].view(-1)[2:3].fill_(float("inf")),
        f"{Q}_scale_inv has a scale that is NaN or infinite, first at [1, 0]",
    ),
    "a NaN code": (
        "fp8",
        lambda t: t[Q].view(torch.uint8)[3, 5:6].fill_(127),
        f"{Q.removesuffix('.weight')}: 1 of 4096 weights are NaN or infinite, the first [3, 5]",
    ),
    "blocks without scales": (
        "mxfp4",
        lambda t: t.pop(f"{DOWN}_scales"),
        f"{DOWN}_blocks is MXFP4 and {DOWN}_scales is missing",
    ),
    "scales without blocks": (
        "mxfp4",
        lambda t: t.pop(f"{DOWN}_blocks"),
        f"{DOWN}_scales is MXFP4 and {DOWN}_blocks is missing",
    ),
    "scales of another shape": (
        "mxfp4",
        lambda t: t.update({f"{DOWN}_scales": t[f"{DOWN}_scales"][:, 1:].clone()}),
        f"{DOWN}_blocks has shape [3, 64, 1, 16] and {DOWN}_scales [3, 63, 1]",
    ),
    "an E8M0 scale of NaN": (
        "mxfp4",
        lambda t: t[f"{DOWN}_scales"][1, 2:3].fill_(255),
        f"{DOWN}_scales has a scale that is NaN or infinite, first at [1, 2, 0]",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_low_bit_folders_are_one_line_and_leave_no_output(
    case: str, llama: Path, gpt_oss: tuple[Path, Path], tmp_path: Path
) -> None:
    form, damage, words = DAMAGE[case]
    low = write_fp8(llama, tmp_path, FINE, BLOCK, BLOCK)[0] if form == "fp8" else gpt_oss[0]
    tensors = load_file(low / "model.safetensors")
    damage(tensors)
    stated = json.loads((low / "config.json").read_text())["quantization_config"]
    folder = rewritten(low, tmp_path / "damaged", tensors, stated)
    with pytest.raises(QuantkitError) as caught:
        quantize(folder, tmp_path / "out", from_mapping(RTN), min_share=0)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "blocks of no size": ({**FINE, "weight_block_size": [128, 0]}, "'weight_block_size' is '[128, 0]'"),
    "blocks of one size": ({**FINE, "weight_block_size": 128}, "'weight_block_size' is '128'"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_of_fp8_that_cannot_be_read_are_refused(case: str, llama: Path, tmp_path: Path) -> None:
    stated, words = CONFIGS[case]
    low, _ = write_fp8(llama, tmp_path, stated, BLOCK, BLOCK)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        Checkpoint(low)


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


def test_inspect_counts_the_stored_bytes_and_the_dequantized_shapes(llama: Path, tmp_path: Path) -> None:
    low, exact = (describe(Checkpoint(folder)) for folder in write_fp8(llama, tmp_path, FINE, BLOCK, BLOCK))
    assert low["shapes"] == exact["shapes"] and low["parameters"] == exact["parameters"]
    assert low["bytes"]["total"] < 0.8 * exact["bytes"]["total"]
    assert low["bytes"]["total"] == sum(t.nbytes for t in load_file(tmp_path / "low" / "model.safetensors").values())
