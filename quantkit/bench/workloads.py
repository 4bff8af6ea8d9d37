"""The models, token counts and batches that benchmarks use unless others are named."""

from __future__ import annotations

from typing import Any

#: Model -> its linears as `[n, k]`: the layers of the published figures.
MODELS = {
    "llama3-8b": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
    },
    "llama2-70b": {
        "qkv": (10240, 8192),
        "o": (8192, 8192),
        "gate_up": (57344, 8192),
        "down": (8192, 28672),
    },
    "large": {"": (73728, 18432)},
}
TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024)
_LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
}
#: Model -> the entries of its config.json that affect speed.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama3-8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }
    | {"vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0},
    "llama2-70b": _LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    }
    | {"vocab_size": 32000, "max_position_embeddings": 4096},
}
#: Prompts of one batch.
BATCHES = (1, 4, 16, 64)
