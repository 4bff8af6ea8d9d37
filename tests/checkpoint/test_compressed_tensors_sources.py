"""compressed-tensors folders of other tools as sources: each form equals that library's own decompression."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.api import eval_ppl
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, QuantkitError
from quantkit.pipeline.convert import pack
from quantkit.pipeline.inspection import describe
from quantkit.pipeline.quantize import quantize
from quantkit.recipes.recipe import from_mapping, pruning_from_mapping
from tests.tiny_models import byte_tokenizer

Tensors = dict[str, Tensor]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
RTN = {"scheme": {"format": "int4", "group_size": 32}, "method": "rtn"}


def packed_rows(codes: np.ndarray, bits: int) -> Tensor:
    """Pack unsigned codes `[n, k]` into int32 words along a row, the first code in the lowest bits, the rest 0."""
    n, k = codes.shape
    many = 32 // bits
    words = np.zeros((n, -(-k // many)), np.uint32)
    for j in range(k):
        words[:, j // many] |= codes[:, j].astype(np.uint32) << np.uint32(bits * (j % many))
    return torch.from_numpy(words.view(np.int32).copy())


def pairs(codes: np.ndarray) -> Tensor:
    """Pack E2M1 codes into bytes, the first of two in the low bits."""
    return torch.from_numpy((codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8))


def weights(bits: int, strategy: str, size: int | None = None, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": size, "symmetric": symmetric, **more}


def floats(bits: int, strategy: str, size: int | None = None, **more: Any) -> dict[str, Any]:
    return {**weights(bits, strategy, size, **more), "type": "float"}


def random_weight(fmt: str, args: dict[str, Any], n: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensors:
    """Write any codes, scales, zero points and groups of columns as a format stores them, packed by hand."""
    draw, random = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    bits, size = args["num_bits"], args["group_size"]
    groups = k // size if size else 1
    rows = 1 if args["strategy"] == "tensor" else n
    scale = (torch.rand(rows, groups, generator=random) + 0.1).mul(0.01).to(dtype)
    codes = draw.integers(0, 2**bits, (n, k))
    zeros = draw.integers(0, 2**bits, (rows, groups))
    middle = 2 ** (bits - 1)
    found: Tensors = {"weight_scale": scale}
    if fmt == "pack-quantized":
        found |= {"weight_packed": packed_rows(codes, bits), "weight_shape": torch.tensor([n, k])}
        if not args["symmetric"]:
            found["weight_zero_point"] = packed_rows(zeros.T, bits).t().contiguous()
    elif args["type"] == "int":
        found["weight"] = torch.from_numpy((codes - middle).astype(np.int8))
        if not args["symmetric"]:
            found["weight_zero_point"] = torch.from_numpy((zeros - middle).astype(np.int8))
    elif bits == 8:
        found["weight"] = torch.randn(n, k, generator=random).mul(40).to(torch.float8_e4m3fn)
        if fmt == "mxfp8-quantized":
            found["weight_scale"] = torch.from_numpy(draw.integers(100, 140, (n, groups)).astype(np.uint8))
    else:
        found["weight_packed"] = pairs(codes)
        if fmt == "mxfp4-pack-quantized":
            found["weight_scale"] = torch.from_numpy(draw.integers(100, 140, (n, groups)).astype(np.uint8))
        else:
            found["weight_scale"] = (torch.rand(n, groups, generator=random) * 448).to(torch.float8_e4m3fn)
            found["weight_global_scale"] = torch.tensor([3171.7])
    if args.get("actorder") == "group":
        found["weight_g_idx"] = torch.randperm(k, generator=random).floor_divide(size).to(torch.int32)
    return found


def decompressed(fmt: str, args: dict[str, Any], stored: Tensors) -> Tensor:
    """Let the library decompress a weight; one with act-order, which it no longer reads, with its columns sorted."""
    stored, args = dict(stored), {key: value for key, value in args.items() if key != "actorder"}
    order = stored.pop("weight_g_idx", None)
    back = slice(None) if order is None else order.argsort(stable=True)
    if order is not None:
        words = np.repeat(stored["weight_packed"].numpy().view(np.uint32), 8, 1)
        codes = words >> np.arange(len(order), dtype=np.uint32) % 8 * 4 & 15
        stored["weight_packed"] = packed_rows(codes[:, back.numpy()], 4)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args), format=fmt)
    found = BaseCompressor.get_value_from_registry(fmt).decompress(stored, scheme)["weight"]
    out = torch.empty_like(found)
    out[:, back] = found
    return out


def config_of(groups: dict[str, dict[str, Any]], dtype: str = "bfloat16", **more: Any) -> dict[str, Any]:
    quantization = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"], **more}
    return {"model_type": "llama", "dtype": dtype, "quantization_config": quantization}


def folder_of(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def of_one(folder: Path, fmt: str, args: dict[str, Any], stored: Tensors, dtype: str = "bfloat16") -> Checkpoint:
    """Open a folder with one linear `x` in a format."""
    config = config_of({"group_0": {"targets": ["Linear"], "weights": args}}, dtype, format=fmt)
    tensors = {f"x.{name}": tensor for name, tensor in stored.items()}
    return Checkpoint(folder_of(folder, tensors, config), dequantize=True)


#: Case -> format, arguments, shape, and what the notice says.
FORMS: dict[str, tuple[str, dict[str, Any], tuple[int, int], str]] = {
    "int4 g128": ("pack-quantized", weights(4, "group", 128), (24, 256), "INT4 (one scale for 128)"),
    "int4 g32": ("pack-quantized", weights(4, "group", 32), (13, 96), "INT4 (one scale for 32)"),
    "int4 g20": ("pack-quantized", weights(4, "group", 20), (5, 100), "INT4 (one scale for 20)"),
    "int4 rows, odd": ("pack-quantized", weights(4, "channel"), (7, 61), "INT4 (one scale a row)"),
    "int4 tensor": ("pack-quantized", weights(4, "tensor"), (7, 61), "INT4 (one scale a tensor)"),
    "int4 asym g32": (
        "pack-quantized",
        weights(4, "group", 32, False),
        (13, 96),
        "INT4 (one scale for 32, zero points)",
    ),
    "int4 asym rows": (
        "pack-quantized",
        weights(4, "channel", None, False),
        (9, 61),
        "INT4 (one scale a row, zero points)",
    ),
    "int4 act-order": ("pack-quantized", weights(4, "group", 32, actorder="group"), (8, 96), "INT4 (one scale for 32)"),
    "int4 asym act-order": (
        *("pack-quantized", weights(4, "group", 16, False, actorder="group"), (8, 96)),
        "INT4 (one scale for 16, zero points)",
    ),
    "int8 packed rows": ("pack-quantized", weights(8, "channel"), (7, 61), "INT8 (one scale a row)"),
    "int8 packed g64": ("pack-quantized", weights(8, "group", 64), (10, 128), "INT8 (one scale for 64)"),
    "int8 packed asym": (
        "pack-quantized",
        weights(8, "group", 32, False),
        (6, 64),
        "INT8 (one scale for 32, zero points)",
    ),
    "int2 packed": ("pack-quantized", weights(2, "group", 32), (6, 64), "INT2 (one scale for 32)"),
    "int8 rows": ("int-quantized", weights(8, "channel"), (7, 61), "INT8 (one scale a row)"),
    "int8 tensor": ("int-quantized", weights(8, "tensor"), (7, 61), "INT8 (one scale a tensor)"),
    "int8 asym rows": (
        "int-quantized",
        weights(8, "channel", None, False),
        (7, 61),
        "INT8 (one scale a row, zero points)",
    ),
    "int8 asym g32": (
        "naive-quantized",
        weights(8, "group", 32, False),
        (7, 64),
        "INT8 (one scale for 32, zero points)",
    ),
    "int4 unpacked": ("int-quantized", weights(4, "group", 32), (7, 64), "INT4 (one scale for 32)"),
    "fp8 rows": ("float-quantized", floats(8, "channel"), (7, 61), "FP8 (one scale a row)"),
    "fp8 naive": ("naive-quantized", floats(8, "tensor"), (7, 61), "FP8 (one scale a tensor)"),
    "mxfp8": ("mxfp8-quantized", floats(8, "group", 32), (7, 64), "FP8 (one scale for 32)"),
    "mxfp4": ("mxfp4-pack-quantized", floats(4, "group", 32), (7, 96), "MXFP4 (one scale for 32)"),
    "nvfp4": ("nvfp4-pack-quantized", floats(4, "tensor_group", 16), (7, 96), "NVFP4 (one scale for 16)"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_what_the_library_decompresses(form: str, dtype: str, tmp_path: Path) -> None:
    fmt, args, (n, k), words = FORMS[form]
    stored = random_weight(fmt, args, n, k, DTYPES[dtype])
    src = of_one(tmp_path / "m", fmt, args, stored, dtype)
    found, expected = src.get("x.weight"), decompressed(fmt, args, stored)
    if fmt == "nvfp4-pack-quantized":  # the library rounds to bfloat16 in any model
        found = found.to(torch.bfloat16)
    same = expected.to(DTYPES[dtype]) if fmt.startswith("mx") else expected
    if dtype != "float16" or "fp4" not in fmt:
        assert found.dtype == same.dtype and torch.equal(found, same)
    assert src.names() == ["x.weight"] and src.shape("x.weight") == (n, k) and src.layout is None
    assert src.notices == [f"source weights are {words}, dequantized to {dtype} on reading"]
    whole = src.get("x.weight")
    for row in range(n):
        assert torch.equal(src.get("x.weight", row), whole[row])
        assert torch.equal(src.get("x.weight", slice(row, row + 2)), whole[row : row + 2])


def e2m1(code: int) -> float:
    exponent, fraction = (code >> 1) & 3, code & 1
    value = fraction / 2 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1)
    return -value if code >> 3 else value


@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4_and_mxfp4_are_the_published_arithmetic_value_by_value(dtype: str, tmp_path: Path) -> None:
    n, k = 5, 64
    every = np.array([e2m1(code) for code in range(16)])
    for fmt, args, size in (
        ("nvfp4-pack-quantized", floats(4, "tensor_group", 16), 16),
        ("mxfp4-pack-quantized", floats(4, "group", 32), 32),
    ):
        stored = random_weight(fmt, args, n, k, torch.bfloat16)
        stored["weight_packed"] = pairs(np.arange(n * k).reshape(n, k) % 16)
        if size == 16:
            stored["weight_global_scale"] = torch.tensor([2.0**11])
            scales = stored["weight_scale"].double().numpy() / 2.0**11
        else:
            scales = 2.0 ** (stored["weight_scale"].numpy().astype(np.float64) - 127)
        values = every[np.arange(n * k).reshape(n, k) % 16] * np.repeat(scales, size, 1)
        found = of_one(tmp_path / fmt, fmt, args, stored, dtype).get("x.weight")
        expected = torch.from_numpy(values).float().to(DTYPES[dtype])  # exact in float32
        assert torch.equal(found, expected) and torch.equal(found.signbit(), expected.signbit())


def test_mixed_groups_give_each_linear_its_own_form(tmp_path: Path) -> None:
    forms = {
        "a.q_proj": ("pack-quantized", weights(4, "group", 32)),
        "a.down_proj": ("float-quantized", floats(8, "channel")),
        "a.up_proj": ("nvfp4-pack-quantized", floats(4, "tensor_group", 16)),
        "a.gate_proj": ("int-quantized", weights(8, "channel", None, False)),
        "a.k_proj": ("mxfp4-pack-quantized", floats(4, "group", 32)),
    }
    groups = {
        f"group_{i}": {"targets": [target], "weights": args, "format": fmt}
        for i, (target, (fmt, args)) in enumerate(
            zip(["Linear", "re:.*down_proj$", "re:.*up", "a.gate_proj", "re:.*k_proj"], forms.values(), strict=True)
        )
    }
    stored = {name: random_weight(*form, 8, 64, torch.bfloat16) for name, form in forms.items()}
    tensors = {f"{name}.{end}": tensor for name, parts in stored.items() for end, tensor in parts.items()}
    tensors |= {"lm_head.weight": torch.ones(4, 8, dtype=torch.bfloat16), "a.o_proj.weight": torch.ones(3, 3)}
    src = Checkpoint(folder_of(tmp_path / "m", tensors, config_of(groups, format="mixed-precision")))
    for name, form in forms.items():
        assert torch.equal(src.get(f"{name}.weight"), decompressed(*form, stored[name]))
    assert {*src.names()} == {*(f"{name}.weight" for name in forms), "lm_head.weight", "a.o_proj.weight"}
    assert src.dtype("a.o_proj.weight") == torch.float32
    for words in ("INT4 (one scale for 32)", "FP8 (one scale a row)", "NVFP4 (", "INT8 (one scale a row, zero points)"):
        assert words in src.notices[0]


@pytest.mark.parametrize(
    ("fmt", "args"),
    [("pack-quantized", weights(4, "group", 32)), ("nvfp4-pack-quantized", floats(4, "tensor_group", 16))],
)
def test_stacked_experts_have_the_scales_of_their_expert(fmt: str, args: dict[str, Any], tmp_path: Path) -> None:
    each = [random_weight(fmt, args, 8, 64, torch.bfloat16, seed) for seed in range(3)]
    each[1] |= {"weight_global_scale": torch.tensor([99.0])} if "nvfp4" in fmt else {}
    stored = {name: torch.stack([one[name] for one in each]) for name in each[0] if name != "weight_shape"}
    src = of_one(tmp_path / "m", fmt, args, stored)
    expected = torch.stack([decompressed(fmt, args, one) for one in each])
    assert torch.equal(src.get("x.weight"), expected)
    assert torch.equal(src.get("x.weight", 1), expected[1]) and torch.equal(
        src.get("x.weight", slice(1, 3)), expected[1:]
    )


def unpacked(words: Tensor) -> Tensor:
    """Unpack zero points `[8, g]` from words `[1, g]`."""
    return torch.stack([((words[0] >> 4 * row) & 15) - 8 for row in range(8)]).to(torch.int8)


#: Case -> how an earlier or another writer stores the same weight.
VARIANTS: dict[str, Callable[[Tensors], Any]] = {
    "no shape": lambda t: t.pop("weight_shape"),
    "a shape of int32": lambda t: t.update(weight_shape=t["weight_shape"].int()),
    "static groups of columns": lambda t: t.update(weight_g_idx=(torch.arange(96) // 32).int()),
    "groups of columns not set": lambda t: t.update(weight_g_idx=torch.full((96,), -1, dtype=torch.int32)),
    "float32 scales": lambda t: t.update(weight_scale=t["weight_scale"].float()),
    "zero points that are not packed": lambda t: t.update(weight_zero_point=unpacked(t["weight_zero_point"])),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_writers_of_int4_give_the_same_weight(variant: str, tmp_path: Path) -> None:
    args = weights(4, "group", 32, False)
    stored = random_weight("pack-quantized", args, 8, 96, torch.bfloat16)
    expected = decompressed("pack-quantized", args, stored)
    VARIANTS[variant](stored)
    assert torch.equal(of_one(tmp_path / "m", "pack-quantized", args, stored).get("x.weight"), expected)


def test_a_config_under_its_former_name_gives_the_same_weight(tmp_path: Path) -> None:
    fmt, args = "int-quantized", weights(8, "channel")
    stored = random_weight(fmt, args, 8, 64, torch.bfloat16)
    config = config_of({"group_0": {"targets": ["Linear"], "weights": args}}, format=fmt)
    config["compression_config"] = config.pop("quantization_config")
    src = Checkpoint(folder_of(tmp_path / "m", {f"x.{name}": tensor for name, tensor in stored.items()}, config))
    assert torch.equal(src.get("x.weight"), decompressed(fmt, args, stored)) and "compression_config" not in src.config


def test_scales_of_activations_and_of_the_cache_are_left_out_and_counted(tmp_path: Path) -> None:
    fmt, args = "nvfp4-pack-quantized", floats(4, "tensor_group", 16)
    linears = {f"{i}.attn.{p}": random_weight(fmt, args, 8, 32, torch.bfloat16) for i in range(2) for p in "qkv"}
    tensors = {f"{name}.{end}": tensor for name, parts in linears.items() for end, tensor in parts.items()}
    tensors |= {f"{name}.input_global_scale": torch.ones(1) for name in linears}
    tensors["0.attn.o.input_global_scale"] = torch.ones(1)  # of a linear that stayed dense
    tensors |= {f"{i}.attn.{kind}_scale": torch.ones(1) for i in range(2) for kind in "kv"}
    tensors["0.norm.weight"] = torch.ones(8)
    group = {"targets": ["Linear"], "weights": args, "input_activations": {"num_bits": 4, "type": "float"}}
    config = config_of({"g": group}, format=fmt, kv_cache_scheme={"num_bits": 8, "type": "float"})
    src = Checkpoint(folder_of(tmp_path / "m", tensors, config))
    assert sorted(src.names()) == sorted([*(f"{name}.weight" for name in linears), "0.norm.weight"])
    assert src.notices[0].endswith(
        "left out: 7 input_global_scale, 2 k_scale, 2 v_scale and the rounding of activations"
    )


SOUND = {
    "int4": ("pack-quantized", weights(4, "group", 32, False)),
    "nvfp4": ("nvfp4-pack-quantized", floats(4, "tensor_group", 16)),
    "mxfp4": ("mxfp4-pack-quantized", floats(4, "group", 32)),
    "int8": ("int-quantized", weights(8, "channel", None, False)),
}


def first_of(tensors: Tensors, name: str, value: float) -> None:
    tensors[name].view(-1)[:1].fill_(value)


#: Case -> form, what is done to the tensors of its weight `x` [8, 64], and the error.
DAMAGE: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "no scale": ("int4", lambda t: t.pop("weight_scale"), "x.weight_packed is INT4 and has no x.weight_scale"),
    "no zero points": ("int4", lambda t: t.pop("weight_zero_point"), "INT4 and has no x.weight_zero_point"),
    "no codes": ("int4", lambda t: t.pop("weight_packed"), "is there, the INT4 weight that it scales is not"),
    "cut codes": (
        *("int4", lambda t: t.update(weight_packed=t["weight_packed"][:, :7].clone())),
        "x.weight_shape says [8, 64], and x.weight_packed has shape [8, 7]",
    ),
    "scales of other groups": (
        *("int4", lambda t: t.update(weight_scale=t["weight_scale"][:, :1].clone())),
        "x.weight_scale has shape [8, 1], config.json asks for [8, 2] with a weight of [8, 64]",
    ),
    "zero points cut": (
        *("int4", lambda t: t.update(weight_zero_point=t["weight_zero_point"][:, :1].clone())),
        "x.weight_zero_point is int32 of shape [1, 1], its weight needs [1, 2]",
    ),
    "a NaN scale": ("int4", lambda t: first_of(t, "weight_scale", float("nan")), "NaN or infinite, first at [0, 0]"),
    "a group too many": (
        *("int4", lambda t: t.update(weight_g_idx=torch.full((64,), 2, dtype=torch.int32))),
        "x.weight_g_idx names a group that is not one of 2",
    ),
    "groups of too few columns": (
        *("int4", lambda t: t.update(weight_g_idx=torch.zeros(63, dtype=torch.int32))),
        "x.weight_g_idx has shape [63], its weight needs [64]",
    ),
    "codes twice": (
        *("int4", lambda t: t.update(weight=torch.ones(8, 64))),
        "x.weight is there twice, also as x.weight_packed",
    ),
    "bytes for words": (
        *("int4", lambda t: t.update(weight_packed=t["weight_packed"].view(torch.uint8))),
        "x.weight_packed has dtype uint8, config.json says INT4",
    ),
    "scales of integers": ("int8", lambda t: t.update(weight_scale=t["weight_scale"].int()), "has dtype int32"),
    "no global scale": ("nvfp4", lambda t: t.pop("weight_global_scale"), "NVFP4 and has no x.weight_global_scale"),
    "global scale 0": ("nvfp4", lambda t: first_of(t, "weight_global_scale", 0), "x.weight_global_scale is 0.0"),
    "global scale NaN": ("nvfp4", lambda t: first_of(t, "weight_global_scale", float("nan")), "is nan"),
    "a NaN E4M3 scale": ("nvfp4", lambda t: t["weight_scale"].view(torch.uint8)[2, 1:2].fill_(127), "first at [2, 1]"),
    "a NaN E8M0 scale": ("mxfp4", lambda t: t["weight_scale"][2, 1:2].fill_(255), "first at [2, 1]"),
    "float scales": ("mxfp4", lambda t: t.update(weight_scale=torch.ones(8, 2)), "no scale of MXFP4 has"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_weights_are_one_line(case: str, tmp_path: Path) -> None:
    form, damage, words = DAMAGE[case]
    stored = random_weight(*SOUND[form], 8, 64, torch.bfloat16)
    damage(stored)
    with pytest.raises(QuantkitError) as caught:
        of_one(tmp_path / "m", *SOUND[form], stored).get("x.weight")
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fmt", "args"),
    [
        ("pack-quantized", weights(4, "group", 32)),
        ("int-quantized", weights(8, "channel", -1)),
        ("naive-quantized", weights(8, "tensor")),
    ],
)
def test_a_strategy_that_is_not_stated_is_the_library_s(fmt: str, args: dict[str, Any], tmp_path: Path) -> None:
    stored = random_weight(fmt, {**args, "group_size": max(args["group_size"] or 0, 0)}, 8, 64, torch.bfloat16)
    unstated = {key: value for key, value in args.items() if key != "strategy"}
    src = of_one(tmp_path / "m", fmt, unstated, stored)
    assert torch.equal(src.get("x.weight"), decompressed(fmt, unstated, stored))


UNREAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "MXFP6": (floats(6, "group", 32), "mxfp6-pack-quantized", "float6 weights of compressed-tensors in format"),
    "3 bits": (weights(3, "channel"), "pack-quantized", "int3 weights of compressed-tensors in format"),
    "2:4 packed": (weights(4, "channel"), "pack-quantized", "INT4 weights with 'sparsity_config' are not read"),
    "rotated": (weights(8, "channel"), "int-quantized", "INT8 weights with 'transform_config' are not read"),
    "blocks of no size": (
        floats(8, "block", block_structure="128x"),
        "float-quantized",
        "'block_structure' is '[128, 0]'",
    ),
    "a strategy": (weights(8, "token"), "int-quantized", "INT8 weights of strategy 'token' are not read"),
    "NVFP4 in groups": (floats(4, "group", 16), "nvfp4-pack-quantized", "NVFP4 weights of strategy 'group'"),
}


@pytest.mark.parametrize("case", UNREAD)
def test_forms_that_are_not_read_name_the_way_out(case: str, tmp_path: Path) -> None:
    args, fmt, words = UNREAD[case]
    more: dict[str, Any] = {
        "2:4 packed": {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "rotated": {"transform_config": {"config_groups": {"a": 1}}},
    }.get(case, {})
    config = config_of({"group_0": {"targets": ["Linear"], "weights": args}}, format=fmt, **more)
    tensors = {"x.weight_packed": torch.zeros(8, 8, dtype=torch.int32), "x.weight_scale": torch.ones(8, 1)}
    folder = folder_of(tmp_path / "m", tensors, config)
    with pytest.raises(CheckpointError, match=re.escape(words)) as caught:
        Checkpoint(folder, dequantize=True)
    assert "give the original model" in str(caught.value) or case == "blocks of no size"


# ------------------------------------------------------------- whole models


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random bfloat16 Llama of two layers with a tokenizer."""
    import transformers

    folder = tmp_path_factory.mktemp("llama")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            **{"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "num_hidden_layers": 2, "hidden_size": 64},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96},
        )
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def low_and_exact(source: Path, folder: Path, fmt: str, args: dict[str, Any]) -> tuple[Path, Path]:
    """Replace the linears of a model by random ones in a format, and by what the library decompresses."""
    dense = load_file(source / "model.safetensors")
    low, exact = dict(dense), dict(dense)
    for seed, name in enumerate(name for name in dense if name.endswith("proj.weight")):
        stored = random_weight(fmt, args, *dense[name].shape, torch.bfloat16, seed)
        del low[name]
        low |= {f"{name.removesuffix('weight')}{end}": tensor for end, tensor in stored.items()}
        exact[name] = decompressed(fmt, args, stored)
    config = json.loads((source / "config.json").read_text())
    quantization = config_of({"group_0": {"targets": ["Linear"], "weights": args}}, format=fmt)["quantization_config"]
    made = (
        folder_of(folder / "low", low, config | {"quantization_config": quantization}),
        folder_of(folder / "exact", exact, config),
    )
    for path in source.iterdir():
        for each in made:
            if path.name not in ("model.safetensors", "config.json"):
                (each / path.name).write_bytes(path.read_bytes())
    return made


def weights_of(folder: Path) -> Tensors:
    return load_file(folder / "model-00001-of-00001.safetensors")


def test_quantizing_and_pruning_a_release_give_what_its_dense_weights_give(llama: Path, tmp_path: Path) -> None:
    low, exact = low_and_exact(llama, tmp_path, *SOUND["nvfp4"])
    asked = pruning_from_mapping({"method": "magnitude", "skip": ["lm_head"]})
    report = {}
    for folder in (low, exact):
        report[folder.name] = quantize(folder, tmp_path / f"q-{folder.name}", from_mapping(RTN), min_share=0)
        quantize(folder, tmp_path / f"p-{folder.name}", asked, min_share=0)
    for kind in "qp":
        found, expected = weights_of(tmp_path / f"{kind}-low"), weights_of(tmp_path / f"{kind}-exact")
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
        card = (tmp_path / f"{kind}-low" / "README.md").read_text()
        assert f"{Checkpoint(low, dequantize=True).low_bit}, dequantized" in " ".join(card.split())
    said = Checkpoint(low, dequantize=True).low_bit
    assert report["low"]["source"]["weights"] == f"{said}, dequantized" and "weights" not in report["exact"]["source"]
    assert f"source weights are {said}, dequantized to bfloat16 on reading" in report["low"]["notices"]
    assert "quantization_config" not in json.loads((tmp_path / "p-low" / "config.json").read_text())


def test_scales_that_float16_does_not_hold_are_evaluated_all_the_same(llama: Path, tmp_path: Path) -> None:
    low, exact = low_and_exact(llama, tmp_path, "pack-quantized", weights(4, "group", 32))
    name = "model.layers.0.mlp.up_proj.weight"
    for folder, tensor in ((low, f"{name}_scale"), (exact, name)):
        tensors = load_file(folder / "model.safetensors")
        tensors[tensor] *= 2.0**-20
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    text = tmp_path / "text.txt"
    text.write_text("A scale multiplies a group of weights. " * 20)
    found, expected = (eval_ppl(folder, data=str(text), window=64, device="cpu") for folder in (low, exact))
    assert found.perplexity == expected.perplexity


def test_inspect_names_the_form_of_a_release(llama: Path, tmp_path: Path) -> None:
    low, _ = low_and_exact(llama, tmp_path, *SOUND["nvfp4"])
    found = describe(Checkpoint(low))
    assert found["dequantized_from"] == "NVFP4 (one scale for 16)" and found["layout"] is None
    assert found["readers"] == "anything that reads Hugging Face folders of NVFP4 (one scale for 16)"


def test_packing_int4_of_another_tool_stays_lossless(llama: Path, tmp_path: Path) -> None:
    fmt, args = "pack-quantized", weights(4, "group", 32, False)
    low, _ = low_and_exact(llama, tmp_path, fmt, args)
    packed, back = tmp_path / "packed", tmp_path / "back"
    pack(low, packed, "gptq-v2")
    pack(packed, back, "compressed-tensors")
    stored, found = load_file(low / "model.safetensors"), weights_of(back)
    names = [name for name in stored if name.endswith(("weight_packed", "weight_zero_point"))]
    assert len(names) == 28 and all(torch.equal(found[name], stored[name]) for name in names)
