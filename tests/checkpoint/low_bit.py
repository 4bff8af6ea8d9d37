"""Folders whose weights are stored in few bits, and the published arithmetic of their values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from tests.layouts.oracle import e4m3_value
from tests.tiny_models import byte_tokenizer

Tensors = dict[str, Tensor]

BLOCK = 32  # instead of 128, so that tiny weights have several blocks, the last of them cut

FINE = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}

IDS = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256, "max_position_embeddings": 512}

SMALL = {**IDS, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}

LLAMA = {**SMALL, "hidden_size": 64, "intermediate_size": 96}


def fp8_values(stored: Tensor) -> np.ndarray:
    """Decode E4M3 (1, 4 and 3 bits, bias 7, 0x7F and 0xFF NaN) byte by byte, as the FP8 paper defines it."""
    return np.float32([e4m3_value(byte) for byte in range(256)])[stored.view(torch.uint8).numpy()]


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


def write_fp8(source: Path, folder: Path) -> tuple[Path, Path]:
    """Write an FP8 folder of `FINE`, and a dense one with the values that the published arithmetic gives; return both.

    As in published models, all linears are quantized but the head and the routers.
    """
    dense = load_file(source / "model.safetensors")
    low, exact = dict(dense), dict(dense)
    for name, tensor in dense.items():
        if tensor.ndim == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")):
            low[name], low[f"{name}_scale_inv"] = codes, scales = to_fp8(tensor, BLOCK, BLOCK)
            exact[name] = by_blocks(fp8_values(codes), scales.numpy(), BLOCK, BLOCK)
    return rewritten(source, folder / "low", low, FINE), rewritten(source, folder / "exact", exact, None)


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


SOUND = {
    "int4": ("pack-quantized", weights(4, "group", 32, False)),
    "nvfp4": ("nvfp4-pack-quantized", floats(4, "tensor_group", 16)),
    "mxfp4": ("mxfp4-pack-quantized", floats(4, "group", 32)),
    "int8": ("int-quantized", weights(8, "channel", None, False)),
}
