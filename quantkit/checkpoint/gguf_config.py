"""The config of a GGUF file: each key of its architecture is used, known to be without effect here,
or refused by its name.

transformers' own reader makes a config from the sizes and drops other keys without a word: scaled
positions, another base, a window, an epsilon. So the keys are compared with the config that it
made, and written into it. Source of the keys and their defaults: llama.cpp (gguf-py/gguf/constants
and the `load_hparams` of each architecture).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isclose, log, sqrt
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.io.json_files import shown

ORIGINAL = "use the model's own folder"
#: In place of a key's neutral values: no value has an effect on the models that transformers has.
ANY = None
OFF = (0, False)
#: Key without its architecture -> entries of a config, the first that the family has is taken, and
#: values that change nothing in a family that has none of them.
KEYS: dict[str, tuple[str, tuple[Any, ...] | None]] = {
    "vocab_size": ("vocab_size", ()),
    "context_length": ("max_position_embeddings", ANY),
    "embedding_length": ("hidden_size", ()),
    "block_count": ("num_hidden_layers", ()),
    "feed_forward_length": ("intermediate_size n_inner ffn_hidden_size", OFF),
    "attention.head_count": ("num_attention_heads", OFF),
    "attention.head_count_kv": ("num_key_value_heads", OFF),
    "attention.layer_norm_epsilon": ("layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps", ()),
    "attention.layer_norm_rms_epsilon": (
        "rms_norm_eps norm_eps layer_norm_epsilon norm_epsilon layer_norm_eps",
        (),
    ),
    "attention.causal": ("", (True,)),
    "attention.clamp_kqv": ("", OFF),
    "attention.max_alibi_bias": ("", (*OFF, 8)),
    "attention.shared_kv_layers": ("num_kv_shared_layers", OFF),
    "attn_logit_softcapping": ("attn_logit_softcapping", OFF),
    "final_logit_softcapping": ("final_logit_softcapping", OFF),
    "router_logit_softcapping": ("", OFF),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input", OFF),
    "embedding_scale": ("", (*OFF, 1)),
    "residual_scale": ("", (*OFF, 1)),
    "logit_scale": ("", (*OFF, 1)),
    "expert_count": ("num_experts", OFF),
    "expert_used_count": ("num_experts_per_tok top_k_experts", OFF),
    "expert_shared_count": ("", OFF),
    "expert_group_count": ("", (*OFF, 1)),
    "expert_group_used_count": ("", (*OFF, 1)),
    "expert_feed_forward_length": ("moe_intermediate_size intermediate_size", OFF),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size", OFF),
    "expert_weights_norm": ("norm_topk_prob", (True,)),
    "expert_weights_scale": ("routed_scaling_factor", (*OFF, 1)),
    "interleave_moe_layer_step": ("", (*OFF, 1)),
    "leading_dense_block_count": ("", OFF),
    "moe_every_n_layers": ("", (*OFF, 1)),
    "nextn_predict_layers": ("", OFF),
    "pooling_type": ("", OFF),
    "shortconv.l_cache": ("conv_L_cache", ()),
    "ssm.conv_kernel": ("conv_kernel", ()),
    "ssm.dt_b_c_rms": ("", OFF),
    "ssm.inner_size": ("intermediate_size", ()),
    "ssm.state_size": ("state_size", ()),
    "ssm.time_step_rank": ("time_step_rank", ()),
    "tensor_data_layout": ("", ANY),
    "use_parallel_residual": ("", ANY),  # read off the tensors
}
#: Beginnings of the keys of parts that are not read: only a text model is made.
PARTS = ("vision.", "audio.", "mm.", "clip.")
#: Layers of the models whose attention is scaled by the width of the whole, not of a head.
WIDE = {"gemma2": 46, "gemma3_text": 62}


class Adoption:
    """Writes the keys of an architecture into the config that transformers made of its sizes."""

    def __init__(self, config: Any, architecture: str, stated: Mapping[str, Any], path: Path):
        self.config, self.architecture, self.path = config, architecture, path
        #: The config of the class, which says what entries the family has.
        self.usual: Any = type(config)()
        start = f"{architecture}."
        self.left = {key[len(start) :]: v for key, v in stated.items() if key.startswith(start)}
        heads = self.one("attention.head_count") or 1
        self.hidden = self.one("embedding_length") or 0
        self.width = self.hidden // heads

    def adopt(self, factors: Mapping[str, Sequence[float]]) -> None:
        """Use every key. `factors` are the tensors that divide the frequencies of positions.

        CheckpointError names a key that the family cannot follow.
        """
        self._heads()
        self._positions(factors)
        self._windows()
        for key in sorted(self.left):  # an epsilon of RMS comes after the other one
            self._entry(key)

    def has(self, name: str) -> bool:
        return hasattr(self.usual, name)

    def one(self, key: str) -> Any:
        """Return a value, which the file may state once for each layer; None if it is missing."""
        value = self.left.get(key)
        if not isinstance(value, list):
            return value
        some = {each for each in value if each}  # layers without attention have no heads
        if len(some) != 1:
            self.refuse(key)
        self.left[key] = some.pop()
        return self.left[key]

    def take(self, *keys: str) -> Any:
        """Return the value of the first key that is stated, and count all as used."""
        found = [self.left.pop(key) for key in keys if key in self.left]
        return found[0] if found else None

    def refuse(self, key: str) -> None:
        raise CheckpointError(
            f"states {self.architecture}.{key} {shown(self.left.get(key))}, which transformers' "
            f"{self.config.model_type} cannot follow",
            ORIGINAL,
            subject=self.path,
        )

    def require(self, key: str, neutral: Iterable[Any]) -> None:
        """Refuse a key whose value is not among those that change nothing."""
        value = self.left.get(key)
        number = isinstance(value, (int, float))
        if value is not None and not any(
            isclose(value, each, rel_tol=1e-5) if number else value == each for each in neutral
        ):
            self.refuse(key)
        self.left.pop(key, None)

    def _entry(self, key: str) -> None:
        """Write a key into its entry of the config, if the family has one."""
        if key.startswith(PARTS):
            return
        if key not in KEYS:
            self.refuse(key)
        names, neutral = KEYS[key]
        value = self.one(key)
        name = next((each for each in names.split() if self.has(each)), None)
        if name is not None and key.endswith("softcapping"):
            setattr(self.config, name, value or None)
        elif name is not None and not (value in OFF and neutral == OFF):
            setattr(self.config, name, value)
        elif neutral is not ANY:
            self.require(key, neutral)

    def _heads(self) -> None:
        """Set the width of a head, and what is usual for a file that does not state it."""
        heads = self.hidden // self.width if self.width else 0
        key, config = "attention.key_length", self.config
        if not self.has("num_key_value_heads"):
            self.require("attention.head_count_kv", (1 if self.has("multi_query") else heads, 0))
        elif self.one("attention.head_count_kv") is None:
            config.num_key_value_heads = heads
        if not self.has("intermediate_size") and not self.has("n_inner"):
            self.require("feed_forward_length", (4 * self.hidden, 0))
        if self.has("global_head_dim"):
            config.global_head_dim = self.width = self.take(key) or self.width
            config.head_dim = self.take("attention.key_length_swa") or config.head_dim
            self.require("attention.value_length_swa", (config.head_dim,))
        elif key in self.left or self.has("head_dim"):
            self.width = self.take(key) or self.width
            if self.width != getattr(config, "head_dim", None):
                config.head_dim = self.width
        self.require("attention.value_length", (self.width,))
        for key in ("attention.key_length_swa", "attention.value_length_swa"):
            self.require(key, (self.width,))
        scale = self.take("attention.scale") if self.has("query_pre_attn_scalar") else None
        if self.has("query_pre_attn_scalar"):
            wide = WIDE.get(config.model_type) == config.num_hidden_layers
            usual = self.hidden // heads if wide else self.width
            config.query_pre_attn_scalar = scale**-2 if scale else usual
            self.require("embedding_scale", (0, 1, sqrt(self.hidden)))
        self.require("attention.scale", (0, self.width**-0.5 if self.width else 0))
        kind = config.model_type
        gating = 2 if kind == "minimax_m2" else 3 if kind == "gpt_oss" else 1
        self.require("expert_gating_func", (0, gating))

    def _positions(self, factors: Mapping[str, Sequence[float]]) -> None:
        """Write base, scaling and rotated width into the rotary parameters."""
        config, known = self.config, getattr(self.config, "rope_parameters", None)
        if not known:  # a family of learned positions, or without
            self.left = {key: v for key, v in self.left.items() if not key.startswith("rope.")}
            return
        nested = any(isinstance(value, dict) for value in known.values())
        ropes = {**known} if nested else {"full_attention": {**known}}
        rope = {**ropes["full_attention"]}
        base = self.take("rope.freq_base", "rope.global.freq_base")
        rope["rope_theta"] = base or rope["rope_theta"]
        if nested and "sliding_attention" in ropes:
            local = self.take("rope.freq_base_swa", "rope.local.freq_base")
            usual = ropes["sliding_attention"]
            ropes["sliding_attention"] = {**usual, "rope_theta": local or usual["rope_theta"]}
        for key in ("rope.freq_base_swa", "rope.local.freq_base"):
            self.require(key, (rope["rope_theta"],))
        turned = self.take("rope.dimension_count")
        self.require("rope.dimension_count_swa", (turned, getattr(config, "head_dim", turned)))
        self.require("rope.dimension_sections", ([0, 0, 0, 0],))
        if not nested and "partial_rotary_factor" in {**self.usual.rope_parameters, **rope}:
            rope["partial_rotary_factor"] = (turned or self.width) / self.width
        elif turned not in (None, self.width):
            self.left["rope.dimension_count"] = turned
            self.refuse("rope.dimension_count")
        ropes["full_attention"] = self._scaled(rope, factors)
        config.rope_parameters = ropes if nested else ropes["full_attention"]

    def _scaled(
        self, rope: dict[str, Any], factors: Mapping[str, Sequence[float]]
    ) -> dict[str, Any]:
        """Return rotary parameters with the scaling that the file states."""
        factor = self.take("rope.scaling.factor", "rope.scale_linear") or 1.0
        kind = self.left.get("rope.scaling.type", "none" if factor == 1 else "linear")
        original = self.take("rope.scaling.original_context_length")
        weight = self.take("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor") or 1.0
        betas = {
            name: self.take(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")
        }
        for key in ("alpha", "yarn_log_multiplier"):
            self.require(f"rope.scaling.{key}", OFF)
        self.require("rope.scaling.yarn_ext_factor", (1, -1))
        if factors:
            kind = "longrope"
        elif kind not in ("none", "linear", "yarn") or (kind != "yarn" and weight != 1):
            self.refuse("rope.scaling.type" if weight == 1 else "rope.scaling.attn_factor")
        self.take("rope.scaling.type", "rope.scaling.finetuned")
        same = rope["rope_type"] == kind
        plain: dict[str, Any] = {
            key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope
        }
        if kind == "longrope":
            config = self.config
            limit = original or getattr(
                config, "original_max_position_embeddings", config.max_position_embeddings
            )
            config.original_max_position_embeddings = limit
            found = {**plain, "rope_type": kind, **{k: [*v] for k, v in factors.items()}}
            found["original_max_position_embeddings"] = limit
            return {**found, "attention_factor": weight} if weight != 1 else found
        if kind == "yarn":
            original = original or self.left.get("context_length")
            found = {"factor": factor, "original_max_position_embeddings": original}
            found |= {name: value for name, value in betas.items() if value is not None}
            if weight != 1:
                found["attention_factor"] = weight * (0.1 * log(factor) + 1)
            return {**(rope if same else plain), "rope_type": kind, **found}
        if kind == "linear" and factor != 1:
            return {**plain, "rope_type": kind, "factor": factor}
        scaled = rope["rope_type"] in ("linear", "yarn", "longrope")  # of the class, not the file
        return {**plain, "rope_type": "default"} if scaled else rope

    def _windows(self) -> None:
        """Set the window of the sliding layers, and which layers these are."""
        config, key = self.config, "attention.sliding_window"
        pattern, kinds = f"{key}_pattern", getattr(config, "layer_types", None)
        layers = config.num_hidden_layers
        period = self.left.get(pattern)
        if isinstance(period, int) and not isinstance(period, bool) and period > 1:
            self.left[pattern] = [(layer + 1) % period != 0 for layer in range(layers)]
        flags = self.left.get(pattern)
        if isinstance(flags, list) and len(flags) == layers and kinds is not None:
            kinds = ["sliding_attention" if flag else "full_attention" for flag in flags]
            config.layer_types = kinds
        elif flags is not None:
            self.refuse(pattern)
        self.left.pop(pattern, None)
        window, slides = self.left.get(key), kinds is None or "sliding_attention" in kinds
        if window is None or not self.has("sliding_window") or not slides:
            if window and window < (self.left.get("context_length") or 0):
                self.refuse(key)
        else:
            config.sliding_window = window or None
        self.left.pop(key, None)
