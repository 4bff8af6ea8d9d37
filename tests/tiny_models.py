"""Tiny random models of several families, written as ordinary Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 257}
GATED = {**SMALL, "intermediate_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 512}

#: family -> (config class, its arguments)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**GATED, "num_key_value_heads": 4}),
    "mistral": ("MistralConfig", {**GATED, "sliding_window": 64}),
    "qwen2": ("Qwen2Config", {**GATED, "tie_word_embeddings": True}),
    "opt": ("OPTConfig", {**SMALL, "ffn_dim": 512, "word_embed_proj_dim": 256, "max_position_embeddings": 512}),
    "gpt_neox": ("GPTNeoXConfig", {**SMALL, "intermediate_size": 512, "max_position_embeddings": 512}),
    "gemma": ("GemmaConfig", {**GATED, "head_dim": 64}),
    "gemma2": ("Gemma2Config", {**GATED, "head_dim": 64, "sliding_window": 64}),
}


def write_model(family: str, folder: Path, dtype: torch.dtype = torch.float16, **changes: Any) -> Path:
    """Write a random model of `family` with a byte-level tokenizer to `folder`; the same weights on every call."""
    import transformers

    name, arguments = FAMILIES[family]
    ids = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    config = getattr(transformers, name)(**{**arguments, **ids, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases start as ones and zeros; make them matter
                parameter.data += 0.1 * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(folder, max_shard_size="1MB")
    byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> Any:
    """Return a tokenizer with one token a byte and `<|endoftext|>` (id 256); it adds no BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, "<|endoftext|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token=end)
