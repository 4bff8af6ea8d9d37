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
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.api import eval_ppl
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import CheckpointError
from quantkit.layouts.schemes import Schemes
from quantkit.pipeline.convert import pack
from quantkit.pipeline.quantize import quantize
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import from_mapping, pruning_from_mapping
from tests.checkpoint.low_bit import (
    SOUND,
    Tensors,
    config_of,
    decompressed,
    floats,
    folder_of,
    of_one,
    pairs,
    random_weight,
    weights,
)
from tests.layouts.oracle import fpx_value
from tests.layouts.samples import write_folder
from tests.tiny_models import write_model

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
RTN = {"scheme": {"format": "int4", "group_size": 32}, "method": "rtn"}


#: Case -> format, arguments and shape. The first word of a case names its numbers in the notice.
FORMS: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "int4 g128": ("pack-quantized", weights(4, "group", 128), (24, 256)),
    "int4 g32": ("pack-quantized", weights(4, "group", 32), (13, 96)),
    "int4 g20": ("pack-quantized", weights(4, "group", 20), (5, 100)),
    "int4 rows, odd": ("pack-quantized", weights(4, "channel"), (7, 61)),
    "int4 tensor": ("pack-quantized", weights(4, "tensor"), (7, 61)),
    "int4 asym g32": ("pack-quantized", weights(4, "group", 32, False), (13, 96)),
    "int4 asym rows": ("pack-quantized", weights(4, "channel", None, False), (9, 61)),
    "int4 act-order": ("pack-quantized", weights(4, "group", 32, actorder="group"), (8, 96)),
    "int4 asym act-order": ("pack-quantized", weights(4, "group", 16, False, actorder="group"), (8, 96)),
    "int8 packed rows": ("pack-quantized", weights(8, "channel"), (7, 61)),
    "int8 packed g64": ("pack-quantized", weights(8, "group", 64), (10, 128)),
    "int8 packed asym": ("pack-quantized", weights(8, "group", 32, False), (6, 64)),
    "int2 packed": ("pack-quantized", weights(2, "group", 32), (6, 64)),
    "int8 rows": ("int-quantized", weights(8, "channel"), (7, 61)),
    "int8 tensor": ("int-quantized", weights(8, "tensor"), (7, 61)),
    "int8 asym rows": ("int-quantized", weights(8, "channel", None, False), (7, 61)),
    "int8 asym g32": ("naive-quantized", weights(8, "group", 32, False), (7, 64)),
    "int4 unpacked": ("int-quantized", weights(4, "group", 32), (7, 64)),
    "fp8 rows": ("float-quantized", floats(8, "channel"), (7, 61)),
    "fp8 naive": ("naive-quantized", floats(8, "tensor"), (7, 61)),
    "fp8 mx": ("mxfp8-quantized", floats(8, "group", 32), (7, 64)),
    "mxfp4": ("mxfp4-pack-quantized", floats(4, "group", 32), (7, 96)),
    "nvfp4": ("nvfp4-pack-quantized", floats(4, "tensor_group", 16), (7, 96)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_what_the_library_decompresses(form: str, dtype: str, tmp_path: Path) -> None:
    fmt, args, (n, k) = FORMS[form]
    scale = {"channel": "a row", "tensor": "a tensor"}.get(args["strategy"], f"for {args.get('group_size')}")
    words = f"{form.split()[0].upper()} (one scale {scale}{'' if args['symmetric'] else ', zero points'})"
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4_and_mxfp4_are_the_published_arithmetic_value_by_value(dtype: str, tmp_path: Path) -> None:
    n, k = 5, 64
    every = np.array([fpx_value(code, 2, 1) for code in range(16)])
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


def test_mxfp4_of_another_tool_rounded_to_mxfp4_keeps_its_bytes(tmp_path: Path) -> None:
    source, scheme = write_model("llama", tmp_path / "source", torch.bfloat16), Scheme.parse("mxfp4")
    write_folder(source, tmp_path / "low", "compressed-tensors", Schemes(scheme, ignore=("lm_head",)), key=False)
    quantize(tmp_path / "low", tmp_path / "out", from_mapping({"scheme": {"format": "mxfp4"}, "method": "rtn"}))
    before, after = (load_file(next((tmp_path / name).glob("*.safetensors"))) for name in ("low", "out"))
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)


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


ENDS = ("embed_tokens.weight", "lm_head.weight")


def low_and_exact(
    source: Path, folder: Path, fmt: str, args: dict[str, Any], more: tuple[str, ...] = ()
) -> tuple[Path, Path]:
    """Replace the linears of a model by random ones in a format, and by what the library decompresses."""
    dense = load_file(source / "model.safetensors")
    low, exact = dict(dense), dict(dense)
    for seed, name in enumerate(name for name in dense if name.endswith(("proj.weight", *more))):
        stored = random_weight(fmt, args, *dense[name].shape, torch.bfloat16, seed)
        del low[name]
        low |= {f"{name.removesuffix('weight')}{end}": tensor for end, tensor in stored.items()}
        exact[name] = decompressed(fmt, args, stored)
    config = json.loads((source / "config.json").read_text())
    group = {"targets": ["Linear", *(["Embedding", "re:.*lm_head"] if more else [])], "weights": args}
    quantization = config_of({"group_0": group}, format=fmt)["quantization_config"]
    quantization["ignore"] = [] if more else ["lm_head"]
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
        report[folder.name] = quantize(
            folder, tmp_path / f"q-{folder.name}", from_mapping(RTN), run=RunOptions(min_share=0)
        )
        quantize(folder, tmp_path / f"p-{folder.name}", asked, run=RunOptions(min_share=0))
    for kind in "qp":
        found, expected = weights_of(tmp_path / f"{kind}-low"), weights_of(tmp_path / f"{kind}-exact")
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
        card = (tmp_path / f"{kind}-low" / "README.md").read_text()
        assert f"{Checkpoint(low, dequantize=True).low_bit}, dequantized" in " ".join(card.split())
    said = Checkpoint(low, dequantize=True).low_bit
    assert report["low"]["source"]["weights"] == f"{said}, dequantized" and "weights" not in report["exact"]["source"]
    assert f"source weights are {said}, dequantized to bfloat16 on reading" in report["low"]["notices"]
    assert "quantization_config" not in json.loads((tmp_path / "p-low" / "config.json").read_text())


@pytest.mark.parametrize("form", ["int4", "nvfp4"])
def test_packed_embeddings_and_heads_are_what_the_library_decompresses(form: str, llama: Path, tmp_path: Path) -> None:
    low, exact = low_and_exact(llama, tmp_path, *SOUND[form], ENDS)
    src, dense = Checkpoint(low, dequantize=True), load_file(exact / "model.safetensors")
    assert {*src.names()} == {*dense}
    assert all(torch.equal(src.dense(name, torch.bfloat16), dense[name].bfloat16()) for name in dense)
    quantize(low, tmp_path / "out", from_mapping(RTN), run=RunOptions(min_share=0))
    found = weights_of(tmp_path / "out")
    names = [name for name in found if name.endswith(ENDS)]
    assert len(names) == 2 and all(torch.equal(found[name], dense[name].bfloat16()) for name in names)


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


def test_packing_int4_of_another_tool_stays_lossless(llama: Path, tmp_path: Path) -> None:
    fmt, args = "pack-quantized", weights(4, "group", 32, False)
    low, _ = low_and_exact(llama, tmp_path, fmt, args)
    packed, back = tmp_path / "packed", tmp_path / "back"
    pack(low, packed, "gptq-v2")
    pack(packed, back, "compressed-tensors")
    stored, found = load_file(low / "model.safetensors"), weights_of(back)
    names = [name for name in stored if name.endswith(("weight_packed", "weight_zero_point"))]
    assert len(names) == 28 and all(torch.equal(found[name], stored[name]) for name in names)
