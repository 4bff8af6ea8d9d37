"""A tiny random model of each family of causal LMs and image-text models that transformers knows.

`tiny_config` shrinks the family's own default configuration key by key: two blocks, or as many as it takes to have
one of each kind, of width 128. `CHANGES` holds what a few families need beyond that, `UNBUILDABLE` those that have no
tiny model, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.byte_tokenizer import byte_tokenizer
from benchmarks.census import drafts

HIDDEN, INTERMEDIATE, EXPERT, VOCABULARY, POSITIONS = 128, 256, 128, 384, 512
#: columns that share a scale
GROUP = 64
END, FIRST_SPECIAL = 256, 257  # the byte tokenizer's own ids end at 256

#: key of a configuration -> its value in a tiny one, where the default is a number
TINY: dict[str, Any] = {
    **dict.fromkeys(
        ["hidden_size", "d_model", "n_embd", "embed_dim", "emb_dim", "dim", "embedding_size", "embedding_dim"], HIDDEN
    ),
    **dict.fromkeys(
        [
            *["word_embed_proj_dim", "input_embedding_size", "output_embedding_size", "attention_hidden_size"],
            *["lru_width", "text_hidden_size", "encoder_hidden_size", "patch_embed_hidden_size"],
            *["image_text_hidden_size", "projection_dim", "projector_hidden_size", "projection_hidden_size"],
            *["backbone_hidden_size", "hidden_size_global", "out_hidden_size", "router_hidden_size"],
            *["vision_hidden_size", "n_inner", "dim_model_base"],
        ],
        HIDDEN,
    ),
    **dict.fromkeys(
        [
            *[
                "intermediate_size",
                "ffn_dim",
                "ffn_hidden_size",
                "encoder_ffn_dim",
                "decoder_ffn_dim",
                "d_ff",
                "dim_ff",
            ],
            *["dff", "d_inner", "mlp_dim", "feed_forward_size", "intermediate_size_mlp", "dense_intermediate_size"],
            *["expert_ffn_hidden_size", "moe_hidden_size", "projector_intermediate_size", "inner_dim"],
            *["projection_intermediate_size", "merged_hidden_size"],
        ],
        INTERMEDIATE,
    ),
    **dict.fromkeys(
        [
            *["moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"],
            *["shared_experts_intermediate_size", "moe_shared_expert_intermediate_size", "share_expert_dim"],
            *["moe_shared_intermediate_size", "moe_latent_size"],
        ],
        EXPERT,
    ),
    **dict.fromkeys(
        [
            *["num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads", "attention_heads"],
            *["decoder_attention_heads", "num_key_value_heads", "num_kv_heads", "swa_num_attention_heads"],
            *["swa_num_key_value_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"],
            *["num_sliding_attention_heads", "n_head_kv", "resampler_n_heads", "resampler_heads"],
            *["conf_num_attention_heads", "num_global_key_value_heads"],
        ],
        2,
    ),
    **dict.fromkeys(
        [
            *["head_dim", "swa_head_dim", "swa_v_head_dim", "global_head_dim", "attention_head_dim", "kv_channels"],
            *["attention_head_size", "d_kv", "d_head", "dim_head", "v_head_dim", "qk_nope_head_dim"],
            *["qk_rope_head_dim", "index_head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"],
            *["resampler_head_dim", "resampler_dim_head", "rotary_dim"],
        ],
        64,
    ),
    "qk_head_dim": 128,
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank", "o_lora_rank"], HIDDEN),
    **dict.fromkeys(
        ["linear_num_key_heads", "linear_num_value_heads", "linear_num_heads", "index_n_heads", "o_groups"], 2
    ),
    **dict.fromkeys(
        [
            *["num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "decoder_layers"],
            *["encoder_layers", "num_encoder_layers", "depth", "layers", "num_blocks", "num_global_layers"],
            *["conf_num_hidden_layers", "resampler_depth", "aligner_num_add_layers", "num_layers_per_stack"],
            *["max_window_layers"],
        ],
        2,
    ),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts"], 4),
    **dict.fromkeys(
        ["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts"], 2
    ),
    **dict.fromkeys(["n_group", "topk_group", "num_expert_group"], 1),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts", "moe_num_shared_experts"], 1),
    **dict.fromkeys(["first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"], 1),
    **dict.fromkeys(["num_nextn_predict_layers", "num_mtp_layers"], 0),
    # Mamba: as many heads as the released models have, so that the rows of in_proj are a multiple of 128.
    **dict.fromkeys(["mamba_n_heads", "mamba_num_heads"], 128),
    **dict.fromkeys(["mamba_d_head", "mamba_head_dim", "mamba_headdim"], 2),
    **dict.fromkeys(["mamba_n_groups", "n_groups", "mamba_ngroups", "n_mamba_heads"], 1),
    **dict.fromkeys(["mamba_d_state", "ssm_state_size", "state_size"], 64),
    **dict.fromkeys(["mamba_dt_rank", "time_step_rank"], HIDDEN // 16),
    **dict.fromkeys(["mamba_d_ssm"], INTERMEDIATE),
    **dict.fromkeys(["chunk_size", "mamba_chunk_size"], 16),
    **dict.fromkeys(
        ["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length", "model_max_length"],
        POSITIONS,
    ),
    **dict.fromkeys(["max_target_positions", "max_source_positions", "original_max_position_embeddings"], POSITIONS),
    **dict.fromkeys(
        ["sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size", "local_attention"],
        32,
    ),
    **dict.fromkeys(
        ["vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"], VOCABULARY
    ),
    "hidden_size_per_layer_input": 64,
    "laurel_rank": 64,
    "index_topk": 16,
    # towers
    **dict.fromkeys(["image_size", "crop_size"], 56),
    "patch_size": 14,
    "layerdrop": 0.0,
}
#: keys of which a smaller default stays
CAPPED = ("mamba_d_state", "ssm_state_size", "state_size", "num_key_value_heads", "laurel_rank")
DROPPED = ("transformers_version", "architectures", "_name_or_path", "id2label", "label2id", "torch_dtype", "dtype")
#: keys whose value lists one entry a block
KINDS = re.compile(
    r"^(layer_types|mlp_layer_types|indexer_types|layers_block_type|block_types|attention_layers|attn_layers|"
    r"layer_rope_theta|no_rope_layers|num_attention_heads_per_layer|activation_sparsity_pattern|moe_layer_freq|"
    r"kv_source_layers|intermediate_size)$"
)
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
#: keys of token ids other than those of the byte tokenizer
SPECIAL = re.compile(r"(_token_id|_token_index|_id|_id_list|_index)$")
OWN = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_eos_token_id", "eod_token_id")
OWN += ("sep_token_id", "cls_token_id", "mask_token_id", "forced_bos_token_id", "_pad_token_id")

Change = Callable[[dict[str, Any]], None]


def _set(**values: Any) -> Change:
    """Return a change that sets keys; `text_config__key` means the key in the text configuration."""

    def change(config: dict[str, Any]) -> None:
        for name, value in values.items():
            *path, key = name.split("__")
            target = config
            for part in path:
                target = target[part]
            target[key] = value

    return change


#: sections of the rotary table of a multimodal model with heads of 64
SECTIONS = [8, 12, 12]
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": SECTIONS}
HALF_MROPE = {**MROPE, "mrope_section": [4, 6, 6], "partial_rotary_factor": 0.5}
KV_SHARED = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": [INTERMEDIATE] * 4,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
}
ROPE_BY_KIND = {"full_attention": MROPE, "sliding_attention": MROPE}
IMAGE_TOKENS = {"<image>": 300, "<|extra_200|>": 301, **{f"IMGIMG{c}Z": 302 + i for i, c in enumerate("ABCD")}}
SMALL_VQ = {"embed_dim": 32, "num_embeddings": 64, "latent_channels": 32, "base_channels": 32}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 64, "indexer_budget": 16}
INDEXER |= {"indexer_compress_ratio": 4, "hc_lowrank": 64, "ple_embed_dim": 128}

#: sizes of latent attention for which engines have kernels
MLA = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "qk_head_dim": 192, "v_head_dim": 128, "kv_lora_rank": 512}

#: family -> what its tiny configuration needs besides TINY; some keys are those of released models, which engines read
CHANGES: dict[str, Change] = {
    "bamba": _set(attn_layer_indices=[1]),
    "apertus1p5": _set(
        audio_config__codebook_dim=HIDDEN,
        vision_config__codebook_size=32,
        audio_config__codebook_size=32,
        image_token_offset=300,
        audio_token_offset=332,
    ),
    "codegen": _set(n_head=4, rotary_dim=16),
    "dory": _set(
        num_hidden_layers=6,
        layer_types=["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"],
        **dict.fromkeys(("n_input_layers", "n_recurrent_layers", "n_output_layers"), 2),
    ),
    "deepseek_v2": _set(num_experts_per_tok=2, first_k_dense_replace=1, n_group=1, topk_group=1, **MLA),
    "deepseek_v3": _set(topk_method="noaux_tc", **MLA),
    "axk1": _set(topk_method="noaux_tc", **MLA),
    "deepseek_v32": _set(topk_method="noaux_tc"),
    "glm_moe_dsa": _set(topk_method="noaux_tc"),
    "falcon": _set(ffn_hidden_size=4 * HIDDEN),
    "glm4_moe": _set(head_dim=64),
    "glm4_moe_lite": _set(
        **{**MLA, "qk_nope_head_dim": 192, "qk_head_dim": 256, "v_head_dim": 256}, first_k_dense_replace=1
    ),
    "hy_v3": _set(expert_hidden_dim=EXPERT),
    "kimi_linear": _set(**MLA),
    "lfm2": _set(block_dim=HIDDEN, block_ff_dim=INTERMEDIATE),
    "lfm2_vl": _set(text_config__block_dim=HIDDEN, text_config__block_ff_dim=INTERMEDIATE),
    "minimax_m2": _set(
        rotary_dim=32, scoring_func="sigmoid", use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True
    ),
    "phi": _set(intermediate_size=4 * HIDDEN),
    "qwen3_vl_moe": _set(text_config__norm_topk_prob=True),
    "dots1": _set(num_experts_per_tok=2, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1),
    "gemma3n": _set(**{f"text_config__{key}": value for key, value in KV_SHARED.items()}),
    "gemma3n_text": _set(**KV_SHARED),
    "granitemoehybrid": _set(layer_types=["linear_attention", "full_attention"]),
    "hunyuan_v1_dense": _set(head_dim=64, use_qk_norm=True),
    "hunyuan_v1_moe": _set(
        head_dim=64, use_qk_norm=True, moe_intermediate_size=INTERMEDIATE, use_mixed_mlp_moe=True, num_shared_expert=1
    ),
    "jamba": _set(num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=0, expert_layer_period=2),
    "lfm2_moe": _set(layer_types=["conv", "full_attention"]),
    "mamba2": _set(num_heads=128, head_dim=2),
    "ministral": _set(head_dim=64),
    "minimax": _set(block_size=32),  # the decay of a block is a table [heads, block, block]
    "mistral4": _set(head_dim=128),
    "nemotron": _set(num_key_value_heads=2),
    "qwen2_5_omni_thinker": _set(text_config__rope_parameters=MROPE),
    "qwen2_5_vl": _set(text_config__rope_parameters=MROPE),
    "qwen2_vl": _set(text_config__rope_parameters=MROPE),
    "paddleocr_vl": _set(text_config__rope_parameters=MROPE),
    "glm4v_moe": _set(
        text_config__rope_parameters=HALF_MROPE, text_config__head_dim=64, text_config__use_qk_norm=False
    ),
    "qwen4_exp": _set(**{f"text_config__{key}": value for key, value in INDEXER.items()}),
    "qwen4_exp_text": _set(**INDEXER),
    "recurrent_gemma": _set(num_hidden_layers=3, num_attention_heads=4, head_dim=32),
    "longcat_flash": _set(zero_expert_num=2, **MLA),
    "zaya": _set(num_experts_per_tok=1),
    "zamba": _set(
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid"] * 2,
        attention_hidden_size=256,
        attention_head_dim=128,
    ),
    "zamba2": _set(
        n_mamba_heads=128,
        mamba_headdim=2,
        attention_hidden_size=256,
        attention_head_dim=128,
        layers_block_type=["linear_attention", "hybrid"],
        hybrid_layer_ids=[1],
    ),
    "mimo_v2_flash": _set(
        head_dim=192, v_head_dim=128, num_key_value_heads=1, layernorm_epsilon=1e-5, hybrid_layer_pattern=[0, 1, 0]
    ),
    "dbrx": _set(attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}),
    "chameleon": _set(vocabulary_map=IMAGE_TOKENS, vq_config=SMALL_VQ),
    "emu3": _set(vocabulary_map=IMAGE_TOKENS, vq_config__base_channels=32),
    "diffusion_gemma": _set(
        text_config__num_experts=4, text_config__top_k_experts=2, text_config__moe_intermediate_size=EXPERT
    ),
    "blt": _set(encoder_hash_byte_group_vocab=64, encoder_hash_byte_group_size=[3]),
    "glm5_next": _set(text_config__qk_rope_head_dim=0, text_config__head_dim=0, text_config__qk_head_dim=64),
    "cosmos3_edge": _set(text_config__rope_parameters=MROPE),
    "cohere_compass_text": _set(rope_parameters=ROPE_BY_KIND),
    "cohere_compass": _set(text_config__rope_parameters=ROPE_BY_KIND),
    "ernie4_5_vl_moe": _set(
        text_config__rope_parameters={**MROPE, "mrope_section": [11, 11, 10]},
        text_config__moe_intermediate_size=[EXPERT, EXPERT],
    ),
    "hunyuan_vl": _set(text_config__head_dim=64, text_config__rope_parameters={**MROPE, "mrope_section": [8, 8, 8, 8]}),
    "step3p7": _set(text_config__sliding_window=32),
    "dots3_note_text": _set(head_dim=128, per_layer_config={}),
    "dots3_note": _set(
        text_config__head_dim=128,
        text_config__per_layer_config={},
        vision_config__adapter_in_dim=HIDDEN,
        vision_config__adapter_out_dim=HIDDEN,
        audio_config__adapter_out_dim=HIDDEN,
        audio_config__adapter_input_size=HIDDEN,
    ),
    "muse_spark": _set(
        audio_config__patch_sizes=[16, 6], audio_config__hidden_sizes=[64, 128], audio_config__depths=[1, 1]
    ),
    "molmo2": _set(adapter_config__vision_feature_layer=[1, 0]),
    "deepseek_ocr2": _set(
        text_config__num_experts_per_tok=2,
        text_config__mlp_layer_types=["dense", "sparse"],
        text_config__n_group=1,
        text_config__topk_group=1,
    ),
    "granite4_vision": _set(deepstack_layer_map=[[0, 0], [1, 1]], downsample_rate="1/2"),
    "mistral_large4": _set(
        text_config__num_hidden_layers=4,
        text_config__mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        text_config__layer_types=["indexed_attention"] * 4,
        text_config__indexer_types=["full", "full", "shared", "full"],
        text_config__no_rope_layers=[1, 0, 1, 0],
        text_config__kv_source_layers=[0, 1, 0, 1],
    ),
    "perception_lm": _set(
        vision_config__architecture="vit_tiny_patch16_224",
        vision_config__model_args={"embed_dim": HIDDEN, "depth": 1, "num_heads": 2, "img_size": 32},
    ),
    "xmod": _set(default_language="en_XX"),
    "pi0": _set(vlm_config__text_config__num_hidden_layers=3),  # the language model is the larger one
    "reformer": _set(is_decoder=True, axial_pos_embds_dim=[64, 64], axial_pos_shape=[16, 32]),
}
#: family -> why it has no tiny model
UNBUILDABLE: dict[str, str] = {
    "gemma4_assistant": "a draft model, which runs on the hidden states of another model",
    "gemma4_unified_assistant": "a draft model, which runs on the hidden states of another model",
    "musicgen": "MusicgenForCausalLM takes the decoder's configuration, which has no model type of its own here",
    "musicgen_melody": "as musicgen",
}
#: families whose released models have one more level in the names of their tower than transformers writes today
NESTED_TOWERS = ("cohere2_vision", "gemma3", "llava", "llava_next", "llava_next_video", "llava_onevision", "paligemma")


#: ends the name of a family that is an encoder-decoder beside its model type's causal LM
SEQ2SEQ = ":seq2seq"
#: model types of encoder-decoders of text, and Whisper
ENCODER_DECODERS = (
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "fsmt", "led", "longt5", "m2m_100", "marian"),
    *("mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet", "switch_transformers", "t5"),
    *("umt5", "whisper"),
)


def families() -> list[str]:
    """Return the families of every causal LM, image-text model and encoder-decoder of text that transformers knows."""
    return sorted(_classes())


def _classes() -> dict[str, str]:
    """Map each family to the name of its class; image-text goes before text alone."""
    from transformers.models.auto import modeling_auto as auto

    names = {**auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    others = {**auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, **auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    added = {f"{family}{SEQ2SEQ if family in names else ''}": others[family] for family in ENCODER_DECODERS}
    return {family: found if isinstance(found, str) else found[0] for family, found in {**names, **added}.items()}


def model_type(family: str) -> str:
    """Return the model type of a family."""
    return family.removesuffix(SEQ2SEQ)


def model_class(family: str) -> str:
    """Return the name of the class that a published model of the family has."""
    return _classes()[family]


def tiny_config(family: str, draft: bool = False, tied: bool | None = None) -> Any:
    """Return the tiny configuration of a family, with a draft layer if released models have some.

    `tied` tells whether the embeddings are the head too; by default, what the family's configuration says.
    """
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type(family)]
    values = _defaults(kind)
    _shrink(values, iter(range(FIRST_SPECIAL, VOCABULARY)))
    CHANGES.get(family, lambda _: None)(values)
    if draft and family in drafts.DRAFTS:
        drafts.text_config(values)[drafts.DRAFTS[family].key] = 1
    config = kind.from_dict(values)
    for part in (config, config.get_text_config()) if tied is not None else ():
        part.tie_word_embeddings = tied
    if hasattr(config, "quantization_config"):  # of the released weights; the tiny ones are dense
        del config.quantization_config
    return config


def build(family: str, seed: int = 0, draft: bool = False, tied: bool | None = None) -> nn.Module:
    """Return the tiny random model of a family, in float32; the same weights on every call."""
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        cls = getattr(transformers, model_class(family))
        config = tiny_config(family, draft, tied)
        model: nn.Module = cls(config) if hasattr(cls, "post_init") else cls._from_config(config)
        spread(model)
    return model.eval()


def spread(model: nn.Module) -> None:
    """Give every matrix values that matter to the logits, and move norms and biases away from ones and zeros."""
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and not name.endswith(("A_log", "dt_bias")):
            parameter.data.normal_(0, 0.08)
        elif parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)


def write(
    family: str, folder: Path, dtype: torch.dtype = torch.bfloat16, draft: bool = False, tied: bool | None = None
) -> Path:
    """Write the tiny model of a family, under its published names, with a byte-level tokenizer.

    With `draft`, it has a draft layer if released models have some; `tied` is as in `tiny_config`.
    """
    from transformers import GenerationConfig

    model: Any = build(family, draft=draft, tied=tied)
    if getattr(model, "generation_config", None) is not None:  # its defaults name tokens beyond the tiny vocabulary
        model.generation_config = GenerationConfig(bos_token_id=END, eos_token_id=END, pad_token_id=END)
    model.to(dtype).save_pretrained(folder)
    if family in NESTED_TOWERS:
        _nest_tower(folder / "model.safetensors")
    if draft:
        drafts.add(family, folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def _nest_tower(path: Path) -> None:
    tensors = {re.sub(r"\bvision_tower\.", "vision_tower.vision_model.", k): v for k, v in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def _defaults(kind: Any) -> dict[str, Any]:
    values: dict[str, Any] = kind().to_dict()
    return values


def _shrink(config: dict[str, Any], ids: Iterator[int]) -> None:
    """Shrink a configuration in place, and those inside it; `ids` are tokens that are still free."""
    for key in DROPPED:
        config.pop(key, None)
    _choose_blocks(config)
    for key, value in list(config.items()):
        if isinstance(value, dict):
            if key not in ("rope_parameters", "rope_scaling"):
                _shrink(value, ids)
        elif isinstance(value, bool) or value is None:
            continue
        elif key in OWN and isinstance(value, int | list):
            config[key] = END
        elif key == "intermediate_size" and isinstance(value, list):
            config[key] = [INTERMEDIATE] * len(value)
        elif isinstance(value, int) and value >= 0 and isinstance(key, str) and SPECIAL.search(key):
            config[key] = next(ids)
        elif key in TINY and isinstance(value, int | float) and not (key in DEPTHS and config.get("_chosen")):
            config[key] = min(value, TINY[key]) if key in CAPPED else TINY[key]
    config.pop("_chosen", None)


def _choose_blocks(config: dict[str, Any]) -> None:
    """Keep one block of each kind, at least two, if the configuration lists the kind of every block."""
    depth = next((config[key] for key in DEPTHS if isinstance(config.get(key), int)), None)
    lists = {k: v for k, v in config.items() if isinstance(v, list) and KINDS.match(k) and len(v) == depth}
    if not lists:
        return
    kinds = list(zip(*lists.values(), strict=True))
    chosen = sorted({kinds.index(kind): None for kind in kinds})
    chosen += [i for i in range(len(kinds)) if i not in chosen][: max(0, 2 - len(chosen))]
    chosen.sort()
    for key, value in lists.items():
        config[key] = [value[i] for i in chosen]
    if "per_layer_config" in config:
        own = {int(i): value for i, value in config["per_layer_config"].items()}
        config["per_layer_config"] = {str(at): own[i] for at, i in enumerate(chosen) if i in own}
    for key in DEPTHS:
        if isinstance(config.get(key), int):
            config[key] = len(chosen)
    config["_chosen"] = True
