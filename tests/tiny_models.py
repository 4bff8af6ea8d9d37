"""Tiny random models of several families, written as ordinary Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.byte_tokenizer import byte_tokenizer

SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 257}
GATED = {**SMALL, "intermediate_size": 256, "num_key_value_heads": 2, "max_position_embeddings": 512}

#: Of mixtures of four experts, two for a token.
EXPERTS = {
    **{**GATED, "intermediate_size": 128, "num_attention_heads": 2, "head_dim": 64},
    **{"moe_intermediate_size": 64, "num_experts_per_tok": 2},
}

#: family -> (config class, its arguments)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**GATED, "num_key_value_heads": 4}),
    "mistral": ("MistralConfig", {**GATED, "sliding_window": 64}),
    "qwen2": ("Qwen2Config", {**GATED, "tie_word_embeddings": True}),
    "opt": ("OPTConfig", {**SMALL, "ffn_dim": 256, "word_embed_proj_dim": 128, "max_position_embeddings": 512}),
    "gpt_neox": ("GPTNeoXConfig", {**SMALL, "intermediate_size": 256, "max_position_embeddings": 512}),
    "gemma": ("GemmaConfig", {**GATED, "head_dim": 32}),
    "gemma2": ("Gemma2Config", {**GATED, "head_dim": 32, "sliding_window": 64}),
}
#: Families that only some tests use.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {"n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 512, "vocab_size": 257}),
    "granite": ("GraniteConfig", {**GATED, "num_key_value_heads": 4}),
    "falcon": ("FalconConfig", {**SMALL, "num_attention_heads": 2}),
    "bart": (
        "BartConfig",
        {
            **{"d_model": 128, "decoder_layers": 1, "decoder_ffn_dim": 128, "decoder_attention_heads": 2},
            **{"vocab_size": 257, "max_position_embeddings": 512, "is_decoder": True, "is_encoder_decoder": False},
        },
    ),
    "mixtral": ("MixtralConfig", {**EXPERTS, "num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 4}),
    "qwen2_moe": ("Qwen2MoeConfig", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 128}),
    "gpt_oss": ("GptOssConfig", {**EXPERTS, "num_local_experts": 4, "intermediate_size": 64}),
    "glm4_moe": ("Glm4MoeConfig", {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 0}),
    "llama4_text": ("Llama4TextConfig", {**EXPERTS, "num_local_experts": 4, "intermediate_size_mlp": 128}),
    "granitemoe": ("GraniteMoeConfig", {**EXPERTS, "num_local_experts": 4}),
    "dbrx": (
        "DbrxConfig",
        {
            **{"d_model": 128, "n_heads": 2, "n_layers": 2, "vocab_size": 257, "max_seq_len": 512},
            "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 128},
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **EXPERTS,
            **{"layers_block_type": ["mamba", "moe", "attention"], "num_hidden_layers": 3, "n_routed_experts": 4},
            **{"moe_shared_expert_intermediate_size": 64, "n_group": 1, "topk_group": 1, "mamba_num_heads": 4},
            **{"mamba_head_dim": 64, "ssm_state_size": 16, "time_step_limit": [0.0, 100.0], "n_groups": 2},
        },
    ),
}

_ENCODER = {
    **{"d_model": 128, "encoder_layers": 1, "encoder_ffn_dim": 256, "encoder_attention_heads": 2},
    **{"decoder_layers": 2, "decoder_ffn_dim": 256, "decoder_attention_heads": 2, "vocab_size": 257},
    **{"decoder_start_token_id": 256, "forced_eos_token_id": None},
}
_T5 = {"d_model": 128, "d_kv": 64, "d_ff": 256, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 256}
#: Encoder-decoders; `whisper` reads sound.
ENCODER_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "encoder-bart": ("BartConfig", {**_ENCODER, "max_position_embeddings": 64}),
    "pegasus": ("PegasusConfig", {**_ENCODER, "max_position_embeddings": 64}),
    "marian": ("MarianConfig", {**_ENCODER, "max_position_embeddings": 64}),
    "led": (
        "LEDConfig",
        {**_ENCODER, "attention_window": 16}
        | {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 32},
    ),
    "fsmt": (
        "FSMTConfig",
        {**_ENCODER, "langs": ["en", "de"], "src_vocab_size": 257, "tgt_vocab_size": 257}
        | {"max_position_embeddings": 64},
    ),
    "t5": ("T5Config", {**_T5, "vocab_size": 257}),
    "flan-t5": ("T5Config", {**_T5, "vocab_size": 257, "feed_forward_proj": "gated-gelu"}),
    "whisper": (
        "WhisperConfig",
        {**_ENCODER, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64}
        | {"suppress_tokens": None, "begin_suppress_tokens": None},
    ),
}

#: Writes BOS, then each message as `role:content` and a line end.
CHAT_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"


def write_model(family: str, folder: Path, dtype: torch.dtype = torch.float16, **changes: Any) -> Path:
    """Write a random model of `family` with a byte-level tokenizer to `folder`; the same weights on every call."""
    import transformers

    name, arguments = {**FAMILIES, **OTHERS, **ENCODER_DECODERS}[family]
    ids = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    config = getattr(transformers, name)(**{**arguments, **ids, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        reads = "Speech" if family == "whisper" else ""
        kind = f"{reads}Seq2Seq{'' if reads else 'LM'}" if family in ENCODER_DECODERS else "CausalLM"
        model = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases start as ones and zeros; make them matter
                parameter.data += 0.1 * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(folder, max_shard_size="300KB")
    byte_tokenizer().save_pretrained(folder)
    return folder
