"""Tiny GGUF files, made from tiny models as llama.cpp's converter makes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_models import CHAT_TEMPLATE, byte_tokenizer, write_model

gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install gguf")

#: Family of `tests.tiny_models` -> architecture in GGUF.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "gemma2": "gemma2",
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
}
Weights = dict[str, np.ndarray[Any, Any]]


def write_gguf(
    family: str, folder: Path, kind: str = "F16", name: str = "model.gguf", stated: Mapping[str, Any] | None = None
) -> tuple[Path, Path]:
    """Write a model folder and a GGUF file of the same weights; return both paths.

    Matrices have the number format `kind`, vectors are float32. `stated` adds metadata or replaces it; None drops it.
    """
    # transformers does not read the width of an expert.
    wide = {"hidden_size": 256, "intermediate_size": 512}  # K-quants have blocks of 256
    dense = write_model(family, folder / "dense", **({"moe_intermediate_size": 768} if "moe" in family else wide))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    config, architecture = model.config, ARCHITECTURES[family]
    keys = {
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{architecture}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "general.license": "apache-2.0",
        "general.base_model.0.repo_url": "https://huggingface.co/maker/model",
        "tokenizer.chat_template": CHAT_TEMPLATE,
        **tokenizer_keys(),
    }
    if family.startswith("gemma"):
        keys[f"{architecture}.attention.key_length"] = config.head_dim
        keys[f"{architecture}.attention.sliding_window"] = config.sliding_window
    elif family == "llama":
        keys["llama.rope.dimension_count"] = config.hidden_size // config.num_attention_heads
    elif family.endswith("moe"):
        keys[f"{architecture}.expert_count"] = config.num_experts
        keys[f"{architecture}.expert_used_count"] = config.num_experts_per_tok
        keys[f"{architecture}.expert_feed_forward_length"] = config.moe_intermediate_size
        if family == "qwen3_moe":
            keys["qwen3moe.attention.key_length"] = config.head_dim
        else:
            keys["qwen2moe.expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    file = folder / name
    write_file(file, architecture, {**keys, **(stated or {})}, converted(model, architecture), kind)
    return file, dense


def tokenizer_keys() -> dict[str, Any]:
    """Return the metadata of the byte tokenizer of `tests.tiny_models`."""
    vocabulary = byte_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.ggml.padding_token_id": len(tokens) - 1,
    }


def converted(model: Any, architecture: str) -> Weights:
    """Return a model's weights under their names in GGUF, changed as the converter changes them."""
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    found: Weights = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if name.endswith("experts.gate_up_proj"):
            prefix = f"blk.{name.split('.')[2]}.ffn_"
            found[f"{prefix}gate_exps.weight"], found[f"{prefix}up_exps.weight"] = np.split(values, 2, axis=1)
        elif name.endswith("experts.down_proj"):
            found[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"] = values
        else:
            stem, _, last = name.rpartition(".")
            found[f"{names.get_name(stem)}.{last}"] = values
    return found


def write_file(
    path: Path, architecture: str, stated: Mapping[str, Any], weights: Mapping[str, np.ndarray[Any, Any]], kind: str
) -> None:
    """Write a GGUF file."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in stated.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)](key, value)
    for name, values in weights.items():
        values = np.ascontiguousarray(values, np.float32)
        if values.ndim == 1:
            writer.add_tensor(name, values)
        elif kind == "Q4_K":
            writer.add_tensor(name, q4_k(values.shape), raw_dtype=gguf.GGMLQuantizationType.Q4_K)
        else:
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(values, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def q4_k(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return random blocks of Q4_K, which the package gguf can only read: scales of 2^-10, any codes."""
    *outer, k = shape
    blocks = np.random.default_rng(0).integers(0, 256, (*outer, k // 256, 144), np.uint8)
    blocks[..., :4] = np.frombuffer(np.float16([2**-10, 2**-10]).tobytes(), np.uint8)
    return blocks.reshape(*outer, k // 256 * 144)
