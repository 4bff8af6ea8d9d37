"""A tiny Llama whose files have the same bytes everywhere: no library's random numbers or versions are in it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

END = "<|endoftext|>"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 257,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": 256,
    "torch_dtype": "float16",
}
TEXT = "\n\n".join(f"Document {i}: " + "the quick brown fox jumps over the lazy dog " * (2 + i % 3) for i in range(80))


def weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return float16 values that depend on `name` alone, bell-shaped, with deviation 0.04."""
    count = torch.Size(shape).numel()
    data = bytearray(hashlib.shake_128(name.encode()).digest(4 * count))
    values = torch.frombuffer(data, dtype=torch.uint8).view(-1, 4).sum(1, dtype=torch.int32) - 510
    centre = 1.0 if len(shape) == 1 else 0.0  # norms are about one
    return (centre + values.reshape(shape) / 4096).half()


def shapes(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    hidden, inner, tokens = (int(str(config[key])) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (tokens, hidden)}
    for i in range(int(str(config["num_hidden_layers"]))):
        block = f"model.layers.{i}"
        found |= {f"{block}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        found |= {f"{block}.self_attn.{p}_proj.weight": (hidden, hidden) for p in "qkvo"}
        found |= {f"{block}.mlp.{p}_proj.weight": (inner, hidden) for p in ("gate", "up")}
        found |= {f"{block}.mlp.down_proj.weight": (hidden, inner)}
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (tokens, hidden)}


def write_model(folder: Path, **changes: object) -> Path:
    """Write a Llama in two shards, with a byte-level tokenizer and the side files of a hub folder."""
    folder.mkdir()
    config = CONFIG | changes
    tensors = {name: weight(name, shape) for name, shape in shapes(config).items()}
    names = sorted(tensors)
    files: dict[str, dict[str, torch.Tensor]] = {"model-00001-of-00002.safetensors": {}}
    files["model-00002-of-00002.safetensors"] = {}
    for i, name in enumerate(names):
        list(files.values())[2 * i >= len(names)][name] = tensors[name]
    for file, held in files.items():
        save_file(held, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(t.numel() * 2 for t in tensors.values())},
        "weight_map": {name: file for file, held in files.items() for name in held},
    }
    write_json(folder / "config.json", config)
    write_json(folder / "model.safetensors.index.json", index)
    write_json(folder / "generation_config.json", {"bos_token_id": 256, "eos_token_id": 256})
    write_json(folder / "tokenizer.json", tokenizer())
    ends = {f"{role}_token": END for role in ("bos", "eos", "pad")}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **ends})
    write_json(folder / "special_tokens_map.json", ends)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "LICENSE").write_text("As you like it.\n")
    (folder / "README.md").write_text("# A model\n")
    return folder


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2))


def tokenizer() -> dict[str, object]:
    """Return tokenizer.json with one token a byte, in the order of their letters, and an end token (id 256)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    letters = sorted([chr(b) for b in plain] + [chr(256 + i) for i in range(len(others))])
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 256, "content": END, **flags}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {letter: i for i, letter in enumerate([*letters, END])},
            "merges": [],
        },
    }
