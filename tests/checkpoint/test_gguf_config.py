"""Keys of GGUF files: what a file says of positions, windows and scalars reaches the config that transformers reads,
or the file is refused by the key's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantkit.checkpoint.gguf_config import config_of
from quantkit.errors import CheckpointError

#: What every file states: sizes of a small model.
SIZES: dict[str, Any] = {
    **{"context_length": 512, "embedding_length": 128, "block_count": 2, "feed_forward_length": 256},
    **{"attention.head_count": 4, "attention.head_count_kv": 4, "vocab_size": 257},
    "attention.layer_norm_rms_epsilon": 1e-5,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def made(architecture: str, stated: dict[str, Any], factors: dict[str, list[float]] | None = None) -> Any:
    """Return the config of a file with these keys; None drops a key."""
    keys = {f"{architecture}.{key}": v for key, v in {**SIZES, **stated}.items() if v is not None}
    return config_of({**keys, "general.architecture": architecture}, ["output.weight"], factors or {}, Path("a.gguf"))


LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 64}
#: Case -> architecture, keys, and entries of the config.
FOLLOWED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linear": ("qwen3", LINEAR, {"rope_parameters": {**PLAIN, "rope_type": "linear", "factor": 2.0}}),
    "an old key": (
        "llama",
        {"rope.scale_linear": 4.0},
        {"rope_parameters": {**PLAIN, "rope_type": "linear", "factor": 4.0}},
    ),
    "type none": ("llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_parameters": PLAIN}),
    "yarn": (
        "starcoder2",
        {**YARN, "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.attn_factor": 0.5},
        {
            "rope_parameters": {
                **{**PLAIN, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
                **{"beta_fast": 16.0, "attention_factor": pytest.approx(0.5 * 1.2079442)},
            }
        },
    ),
    "no scaling where the class has some": (
        "gpt-oss",
        {"rope.freq_base": 7e4},
        {"rope_parameters": {**PLAIN, "rope_theta": 7e4}},
    ),
    "two bases": (
        "gemma3",
        {**LINEAR, "rope.freq_base": 5e5, "rope.freq_base_swa": 2e4, "attention.key_length": 32},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            }
        },
    ),
    "half of a head": (
        "nemotron",
        {"rope.dimension_count": 8},
        {"head_dim": 32, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}},
    ),
    "a head of its own width": (
        "qwen3moe",
        {"attention.key_length": 64, "attention.value_length": 64},
        {"head_dim": 64},
    ),
    "a window": ("gemma2", {"attention.sliding_window": 99, "attention.key_length": 32}, {"sliding_window": 99}),
    "a pattern": (
        "gemma3",
        {"attention.sliding_window": 99, "attention.sliding_window_pattern": 2, "attention.key_length": 32},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 99},
    ),
    "flags": (
        "gemma3",
        {"attention.sliding_window_pattern": [False, True], "attention.key_length": 32},
        {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    "a window beyond the context": ("qwen2", {"attention.sliding_window": 4096}, {"sliding_window": None}),
    "an epsilon of one name": (
        "nemotron",
        {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 0.25},
        {"norm_eps": 0.25},
    ),
    "an epsilon of another": (
        "falcon",
        {
            "attention.layer_norm_rms_epsilon": None,
            "attention.layer_norm_epsilon": 0.25,
            "attention.head_count_kv": 1,
            "feed_forward_length": 512,
        },
        {"layer_norm_epsilon": 0.25},
    ),
    "no soft cap": (
        "gemma2",
        {"final_logit_softcapping": 0.0, "attention.key_length": 32},
        {"final_logit_softcapping": None},
    ),
    "a scale": ("gemma2", {"attention.scale": 0.125, "attention.key_length": 32}, {"query_pre_attn_scalar": 64}),
    "the scale of the largest": (
        "gemma2",
        {"block_count": 46, "attention.key_length": 16},
        {"query_pre_attn_scalar": 32, "head_dim": 16},
    ),
    "experts": (
        "qwen2moe",
        {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 96, "expert_weights_norm": True},
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "norm_topk_prob": True},
    ),
    "as many keys as queries": ("qwen2", {"attention.head_count_kv": None}, {"num_key_value_heads": 4}),
    "a number for each layer": ("llama", {"feed_forward_length": [192, 192]}, {"intermediate_size": 192}),
    "keys that change nothing": (
        "llama",
        {"expert_count": 0, "logit_scale": 1.0, "rope.scaling.finetuned": True, "attention.causal": True},
        {"rope_parameters": PLAIN},
    ),
    "another part": ("gemma3", {"vision.block_count": 27, "attention.key_length": 32}, {"num_hidden_layers": 2}),
    "positions of a family without": ("bloom", {"rope.freq_base": 5e5, "feed_forward_length": 512}, {"n_head": 4}),
}


@pytest.mark.parametrize("case", FOLLOWED)
def test_what_a_file_says_is_in_its_config(case: str) -> None:
    architecture, stated, expected = FOLLOWED[case]
    config = made(architecture, stated)
    assert {name: getattr(config, name) for name in expected} == expected


def test_the_two_lists_of_factors_of_a_long_model_are_in_its_config() -> None:
    factors = {"short_factor": [1.0] * 12, "long_factor": [3.0] * 12}
    stated = {"rope.dimension_count": 24, "rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.25}
    config = made("phi3", stated, factors)
    expected = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, **factors}
    assert config.rope_parameters == {**expected, "original_max_position_embeddings": 128, "attention_factor": 1.25}
    assert config.original_max_position_embeddings == 128


#: Key -> architecture and value.
REFUSED: dict[str, tuple[str, Any]] = {
    "some_new_scalar": ("qwen2", 0.5),
    "rope.scaling.type": ("llama", "longrope"),
    "rope.scaling.attn_factor": ("llama", 1.2),
    "rope.scaling.yarn_ext_factor": ("llama", 0.5),
    "rope.freq_base_swa": ("qwen3", 5e4),
    "rope.dimension_count": ("llama", 16),
    "attention.sliding_window": ("llama", 64),
    "attention.sliding_window_pattern": ("starcoder2", 4),
    "attention.scale": ("qwen2", 0.5),
    "attention.value_length": ("qwen3", 64),
    "attention.clamp_kqv": ("llama", 8.0),
    "attn_logit_softcapping": ("llama", 30.0),
    "logit_scale": ("llama", 8.0),
    "embedding_scale": ("llama", 12.0),
    "residual_scale": ("qwen2", 0.2),
    "expert_count": ("llama", 8),
    "expert_gating_func": ("qwen3moe", 2),
    "expert_weights_scale": ("qwen3moe", 2.5),
    "attention.head_count_kv": ("falcon", 2),
    "feed_forward_length": ("llama", [128, 256]),
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_the_family_cannot_follow_is_refused_by_its_name(key: str) -> None:
    architecture, value = REFUSED[key]
    with pytest.raises(CheckpointError, match=rf"a\.gguf: states {architecture}\.{key} .*use the model's own folder"):
        made(architecture, {"attention.head_count_kv": 1, key: value} if architecture == "falcon" else {key: value})


@pytest.mark.parametrize(
    "key", ["block_count", "embedding_length", "attention.head_count", "attention.layer_norm_rms_epsilon"]
)
def test_a_key_that_a_file_must_have_is_named_and_not_replaced_by_a_default(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"does not state llama.{key.replace('_rms', '(_rms)?')}"):
        made("llama", {key: None})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.freq_base", float("nan")),
        ("rope.freq_base", -1.0),
        ("attention.layer_norm_rms_epsilon", float("inf")),
        ("rope.scaling.factor", -4.0),
    ],
)
def test_numbers_that_no_model_can_have_are_refused(key: str, value: float) -> None:
    with pytest.raises(CheckpointError, match=f"states llama.{key} "):
        made("llama", {key: value})
