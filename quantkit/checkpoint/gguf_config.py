"""The config of a GGUF file: each key of its architecture is used, known to be without effect here,
or refused by its name.

transformers' own reader of GGUF makes a config of the sizes and drops other keys without a word:
scaled positions, another base, a window, an epsilon. It also takes 20 seconds for a vocabulary.
Source of the keys and their defaults: llama.cpp (gguf-py/gguf/constants.py, and what each
architecture loads).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf, isclose, log, sqrt
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.io.json_files import shown

ORIGINAL = "use the model's own folder"
#: Architecture -> `model_type` of transformers, for the families whose tensors it reads.
FAMILIES = {
    "bloom": "bloom",
    "falcon": "falcon",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss",
    "gpt2": "gpt2",
    "lfm2": "lfm2",
    "llama": "llama",
    "mamba": "mamba",
    "minimax-m2": "minimax_m2",
    "nemotron": "nemotron",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
#: Other names of keys.
ALIASES = {
    "rope.global.freq_base": "rope.freq_base",
    "rope.local.freq_base": "rope.freq_base_swa",
    "rope.scale_linear": "rope.scaling.factor",
    "rope.scaling.yarn_attn_factor": "rope.scaling.attn_factor",
}
#: Key without its architecture -> entries of a config, of which the first is taken that the family
#: has.
ENTRIES = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size n_inner",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_epsilon": "layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps",
    "attention.layer_norm_rms_epsilon": (
        "rms_norm_eps norm_eps layer_norm_epsilon norm_epsilon layer_norm_eps"
    ),
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
    "shortconv.l_cache": "conv_L_cache",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.inner_size": "intermediate_size",
    "ssm.state_size": "state_size",
    "ssm.time_step_rank": "time_step_rank",
}
#: Keys that every file has; a model without attention has no heads.
NEEDED = ("embedding_length", "block_count", "attention.head_count")
#: Keys of which every file has at least one.
EPSILONS = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon")
OFF = (0, False)
#: Keys that change nothing in a family without such an entry, whatever they say.
ANY = (
    "context_length tensor_data_layout use_parallel_residual rope.scaling.finetuned "
    "rope.scaling.original_context_length"
)
#: Keys that change nothing there if they say that something is off.
IF_OFF = (
    "attention.head_count attention.clamp_kqv attention.shared_kv_layers attn_logit_softcapping "
    "final_logit_softcapping router_logit_softcapping embedding_length_per_layer_input "
    "expert_count expert_used_count expert_shared_count expert_feed_forward_length "
    "expert_shared_feed_forward_length leading_dense_block_count nextn_predict_layers "
    "pooling_type ssm.dt_b_c_rms rope.scaling.alpha rope.scaling.yarn_log_multiplier"
)
#: Keys that change nothing there if they say off or one.
IF_OFF_OR_ONE = (
    "embedding_scale residual_scale logit_scale expert_weights_scale expert_group_count "
    "expert_group_used_count interleave_moe_layer_step moe_every_n_layers"
)
#: Key -> values that change nothing in a family without such an entry; None if none does.
NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(ANY.split(), None),
    **dict.fromkeys(IF_OFF.split(), OFF),
    **dict.fromkeys(IF_OFF_OR_ONE.split(), (*OFF, 1)),
    "attention.causal": (True,),
    "attention.max_alibi_bias": (*OFF, 8),
    "expert_weights_norm": (True,),
    "rope.dimension_sections": ([0, 0, 0, 0], 0),
    "rope.scaling.yarn_ext_factor": (1, -1),
}
#: Beginnings of the keys of parts that are not read: only a text model is made.
PARTS = ("vision.", "audio.", "mm.", "clip.")
#: Layers of the models whose attention is scaled by the width of the whole, not of a head.
WIDE = {"gemma2": 46, "gemma3_text": 62}
#: How the experts are weighed: by softmax unless it is said here.
GATING = {"minimax_m2": 2, "gpt_oss": 3}


def config_of(
    stated: Mapping[str, Any],
    tensors: Collection[str],
    factors: Mapping[str, list[float]],
    path: Path,
) -> Any:
    """Make the config of a file from its metadata and the names of its tensors.

    `factors` are the tensors that divide the frequencies of positions. CheckpointError names a key
    that the family cannot follow.
    """
    from transformers import AutoConfig

    architecture = stated["general.architecture"]
    kind, start = FAMILIES[architecture], f"{architecture}."
    usual: Any = AutoConfig.for_model(kind)
    known = {*usual.to_dict(), *usual.attribute_map}
    keys = {key[len(start) :]: _one(v) for key, v in stated.items() if key.startswith(start)}
    keys = {ALIASES.get(key, key): v for key, v in keys.items() if not key.startswith(PARTS)}
    absent = [key for key in NEEDED if not keys.get(key) and (kind, key) != ("mamba", NEEDED[-1])]
    if absent or keys.keys().isdisjoint(EPSILONS):
        raise CheckpointError(
            f"does not state {start}{[*absent, *EPSILONS][0]}", ORIGINAL, subject=path
        )
    heads, hidden = keys.get("attention.head_count") or 1, keys["embedding_length"]
    width = keys.get("attention.key_length") or hidden // heads
    entries = {
        f"{name}_token_id": stated.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in {"bos": "bos", "eos": "eos", "pad": "padding"}.items()
    }
    entries["tie_word_embeddings"] = "output.weight" not in tensors or architecture in (
        "falcon",
        "bloom",
    )
    entries |= _of_family(kind, stated, tensors)
    if "num_key_value_heads" in known:
        keys.setdefault("attention.head_count_kv", heads)
    if "head_dim" in known or width != hidden // heads:
        entries["head_dim"] = width
    neutral = {
        **NEUTRAL,
        "attention.head_count_kv": (1 if kind == "falcon" else heads, 0),
        "attention.scale": (0, width**-0.5 if width else 0),
        "expert_gating_func": (0, GATING.get(kind, 1)),
        "feed_forward_length": (4 * hidden, 0),
        **dict.fromkeys(
            (f"attention.{name}_length{of}" for name in ("key", "value") for of in ("", "_swa")),
            (width,),
        ),
    }
    if "query_pre_attn_scalar" in known:
        wide = WIDE.get(kind) == keys.get("block_count")
        scale = keys.get("attention.scale") or 0
        scalar = round(scale**-2) if scale else hidden // heads if wide else width
        entries["query_pre_attn_scalar"] = scalar
        neutral["attention.scale"] = (0, scalar**-0.5)
        neutral["embedding_scale"] = (0, 1, sqrt(hidden))
    window, types = keys.get("attention.sliding_window") or 0, _layer_types(keys, usual)
    if types is not None:
        entries["layer_types"] = types
    if "sliding_attention" not in (types or getattr(usual, "layer_types", ["sliding_attention"])):
        known.discard("sliding_window")  # which no layer would have
    far = window >= (keys.get("context_length") or 0)
    neutral["attention.sliding_window"] = (0, window) if far else OFF
    rope = getattr(usual, "rope_parameters", None)
    if rope:
        entries["rope_parameters"] = _positions(rope, keys, neutral, entries, factors, width)
    else:  # a family of learned positions, or without
        keys = {key: value for key, value in keys.items() if not key.startswith("rope.")}
    for key, value in sorted(keys.items()):  # an epsilon of RMS comes after the other one
        name = next((each for each in ENTRIES.get(key, "").split() if each in known), None)
        off = value in OFF and 0 in (neutral.get(key) or ())
        listed = isinstance(value, list)  # layers that differ
        changes = not _is_neutral(value, neutral.get(key, ()))
        odd = isinstance(value, float) and not 0 <= value < inf
        if name is not None and not (listed or odd) and (not off or key.endswith("softcapping")):
            entries[usual.attribute_map.get(name, name)] = None if off else value
        elif changes or (odd and neutral[key] is None):
            raise CheckpointError(
                f"states {start}{key} {shown(value)}, which transformers' {kind} cannot follow",
                ORIGINAL,
                subject=path,
            )
    return AutoConfig.for_model(kind, **entries)


def _one(value: Any) -> Any:
    """Return a value that a file may state once for each layer; layers without attention have 0."""
    some = {each for each in value if each} if isinstance(value, list) else ()
    return some.pop() if len(some) == 1 and True not in some else value


def _of_family(kind: str, stated: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Return the entries that no key states: they follow from the tensors, or from the family."""
    if kind == "lfm2":
        heads = stated.get("lfm2.attention.head_count_kv", [])
        types = ["full_attention" if each else "conv" for each in heads]
        bias = any(name.endswith("shortconv.in_proj.bias") for name in tensors)
        return {"layer_types": types, "conv_bias": bias, "block_auto_adjust_ff_dim": False}
    if kind == "stablelm":
        return {
            "use_qkv_bias": any(name.endswith("attn_q.bias") for name in tensors),
            "use_parallel_residual": not any("ffn_norm" in name for name in tensors),
        }
    if kind == "minimax_m2":
        return {"use_routing_bias": True, "scoring_func": "sigmoid"}
    return {"norm_topk_prob": True} if kind == "qwen3_moe" else {}


def _layer_types(keys: dict[str, Any], usual: Any) -> list[str] | None:
    """Return which layers slide, if the file says it: by a flag each, or by every nth that does
    not.
    """
    name, layers = "attention.sliding_window_pattern", keys.get("block_count") or 0
    flags = keys.get(name)
    if type(flags) is int and flags > 1:
        flags = [(layer + 1) % flags != 0 for layer in range(layers)]
    if not isinstance(flags, list) or len(flags) != layers or not hasattr(usual, "layer_types"):
        return None
    del keys[name]
    return ["sliding_attention" if flag else "full_attention" for flag in flags]


def _positions(
    usual: dict[str, Any],
    keys: Mapping[str, Any],
    neutral: dict[str, tuple[Any, ...] | None],
    entries: dict[str, Any],
    factors: Mapping[str, list[float]],
    width: int,
) -> dict[str, Any]:
    """Return the rotary parameters that a file states, and say in `neutral` which of its keys they
    follow.
    """
    nested = "full_attention" in usual
    rope = {**(usual["full_attention"] if nested else usual)}
    base = keys.get("rope.freq_base") or rope["rope_theta"]
    rope["rope_theta"] = base
    turned, factor = keys.get("rope.dimension_count") or width, keys.get("rope.scaling.factor") or 1
    betas = {name: f"rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow")}
    neutral |= dict.fromkeys(("rope.freq_base", "rope.scaling.factor", *betas.values()))
    neutral["rope.dimension_count"] = (width,)
    neutral["rope.dimension_count_swa"] = (turned,)
    neutral["rope.freq_base_swa"] = None if nested else (base,)
    if "partial_rotary_factor" in usual or "scoring_func" in entries:
        rope["partial_rotary_factor"] = turned / width
        neutral["rope.dimension_count"] = None
    stated = keys.get("rope.scaling.type", "none" if factor == 1 else "linear")
    kind = "longrope" if factors else stated
    weight = keys.get("rope.scaling.attn_factor") or 1
    weighs = kind in ("yarn", "longrope")
    neutral["rope.scaling.attn_factor"] = None if weighs else (*OFF, 1)
    neutral["rope.scaling.type"] = ("none", "linear", "yarn", *(["longrope"] if factors else []))
    limit = keys.get("rope.scaling.original_context_length") or keys.get("context_length")
    plain = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if kind == "longrope":
        entries["original_max_position_embeddings"] = limit
        rope = {**plain, **factors, "original_max_position_embeddings": limit}
    elif kind == "yarn":
        same = rope if rope["rope_type"] == kind else plain
        found = {name: keys[key] for name, key in betas.items() if key in keys}
        rope = {**same, **found, "factor": factor, "original_max_position_embeddings": limit}
    elif kind == "linear" and factor != 1:
        rope = {**plain, "factor": factor}
    elif rope["rope_type"] == "yarn":  # of the class, not of the file
        rope = plain
    scaled = "factor" in rope or "long_factor" in rope
    rope["rope_type"] = kind if scaled else rope.get("rope_type", "default")
    if weighs and weight != 1:  # yarn weighs by its factor besides
        rope["attention_factor"] = weight * (0.1 * log(factor) + 1 if kind == "yarn" else 1)
    if not nested:
        return rope
    local = usual["sliding_attention"]
    local = {**local, "rope_theta": keys.get("rope.freq_base_swa") or local["rope_theta"]}
    return {**usual, "full_attention": rope, "sliding_attention": local}


def _is_neutral(value: Any, neutral: tuple[Any, ...] | None) -> bool:
    if neutral is None or not isinstance(value, (int, float)):
        return neutral is None or value in neutral
    return any(
        isinstance(each, (int, float)) and isclose(value, each, rel_tol=1e-5) for each in neutral
    )
