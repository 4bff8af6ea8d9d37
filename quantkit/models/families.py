"""Facts about model families that are not in config.json or transformers' classes: one entry a
family.

Most families need no entry: rules find their blocks, linears and experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ExpertClass:
    """A class of fused experts that differs from the classes of transformers'
    `use_experts_implementation`.

    `call`: how it is called, a key of `experts.CALLS`. `parameters`: name -> the roles that
    its rows hold. `transposed`: the parameters with matrices `[k, n]`. `count`: the attribute with
    the number of experts, if a parameter is a matrix that stacks the experts' rows.
    """

    call: Literal["routed", "sorted", "shared", "parallel"] = "routed"
    parameters: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
    )
    transposed: tuple[str, ...] = ()
    count: str | None = None


@dataclass(frozen=True)
class Family:
    """State the exceptions of a model type.

    `diffuses`: it writes blocks of text by diffusion. `classifies`: transformers lists it among
    models that write text, and its published class classifies. `is_random`: two passes over the
    same tokens differ. `asks_for_images`: its forward needs an image, though its signature does not
    say so. `experts`: class -> its form.
    """

    diffuses: bool = False
    classifies: bool = False
    is_random: bool = False
    asks_for_images: bool = False
    experts: Mapping[str, ExpertClass] = field(default_factory=dict)


_GATED = {"gate_proj": ("gate",), "up_proj": ("up",), "down_proj": ("down",)}
_DBRX = {"mlp.w1": ("gate",), "mlp.v1": ("up",), "mlp.w2": ("down",)}

#: Model type -> its exceptions.
FAMILIES = {
    "dbrx": Family(
        experts={
            "DbrxExperts": ExpertClass(
                parameters=_DBRX, transposed=("mlp.w2",), count="mlp.moe_num_experts"
            )
        }
    ),
    "diffusion_gemma": Family(diffuses=True),
    "inkling_text": Family(experts={"InklingSharedExperts": ExpertClass("shared", _GATED)}),
    "jetmoe": Family(
        experts={"JetMoeParallelExperts": ExpertClass("parallel", {"weight": ("linear",)})}
    ),
    "kosmos-2": Family(asks_for_images=True),
    "llama4": Family(
        experts={
            "Llama4TextExperts": ExpertClass("sorted", transposed=("gate_up_proj", "down_proj"))
        }
    ),
    "reformer": Family(is_random=True),
    "shieldgemma2": Family(classifies=True),
    "step3p7": Family(experts={"Step3p7Experts": ExpertClass()}),
}
#: Families whose packed weights vLLM 0.26.0 does not open, though it opens the dense model
#: (docs/models.md, "Refused by vLLM").
REFUSED_BY_VLLM = (
    "blip-2",
    "bloom",
    "falcon_mamba",
    "flex_olmo",
    "gpt_neox",
    "gpt_oss",
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "jamba",
    "lfm2_moe",
    "mamba",
)
#: Families whose packed embeddings vLLM 0.26.0 gathers, unless these are the head too, and whose
#: packed head it multiplies by (docs/models.md).
EMBEDDINGS_IN_VLLM = {
    "apertus",
    "arcee",
    "cwm",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "emu3",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone4_5",
    "gemma3",
    "gemma3_text",
    "gemma4_text",
    "gemma4_unified",
    "glm",
    "glm4",
    "glm4_moe_lite",
    "glm4v",
    "glm_moe_dsa",
    "glm_ocr",
    "gpt-sw3",
    "gpt2",
    "gpt_bigcode",
    "granite",
    "hrm_text",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hyperclovax",
    "idefics3",
    "internvl",
    "jais2",
    "llama",
    "llama4",
    "llama4_text",
    "minimax_m2",
    "ministral3",
    "mistral",
    "olmo",
    "olmo2",
    "olmoe",
    "paddleocr_vl",
    "phi3",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_moe",
    "qwen2_vl",
    "qwen3",
    "qwen3_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "seed_oss",
    "smollm3",
    "smolvlm",
    "stablelm",
    "starcoder2",
}
HEADS_IN_VLLM = (EMBEDDINGS_IN_VLLM - {"llama4"}) | {
    "falcon",
    "glm4_moe",
    "glm4v_moe",
    "gptj",
    "hy_v3",
    "lfm2",
    "minicpm3",
    "mixtral",
    "nemotron",
    "nemotron_h",
    "olmo3",
    "phi",
    "qwen3_5",
    "qwen3_5_moe",
}
#: Families whose head SGLang 0.5.23 always keeps dense: its classes do not tell it the config, or
#: their name. Read in its Python files.
DENSE_HEADS_IN_SGLANG = {
    "dbrx",
    "exaone",
    "falcon_mamba",
    "gpt_oss",
    "gptj",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "mamba2",
    "minicpm3",
    "mixtral",
    "opt",
    "persimmon",
    "phi",
    "stablelm",
    "whisper",
}
EXPERT_CLASSES = {
    name: form for family in FAMILIES.values() for name, form in family.experts.items()
}


def family_of(model_type: str) -> Family:
    """Look up the exceptions of a model type."""
    return FAMILIES.get(model_type, Family())


_IMAGES = ("AutoModelForImageTextToText", "AutoModelForMultimodalLM")
#: Whether a model is an encoder-decoder -> the auto classes of transformers that may build it, in
#: order.
AUTO_CLASSES = {
    False: ("AutoModelForCausalLM", *_IMAGES),
    True: ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", *_IMAGES),
}
#: Those of models whose prompt is no text: sound or images.
OTHER_INPUTS = ("AutoModelForSpeechSeq2Seq", *_IMAGES)


# Names that many families share.

#: The leaf of an expert's linear on the hub -> its role.
ROLES = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
    "linear": "linear",
}
#: Role -> the leaf of an expert's linear that is part of a stored tensor of all experts.
LEAVES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj", "linear": "linear"}
#: Routers, below the module that holds the experts.
ROUTERS = re.compile(r"\.(\w*router\w*|gate|wg)(\.|$)")
#: Projections of a sparse attention's indexer that vLLM joins, and keeps dense.
INDEXER = re.compile(r"\.indexer\.(wk|weights_proj)$")
#: The output head, which recipes skip by its name.
HEAD = "lm_head"
#: Linears of state spaces that are never called: the model multiplies by their weight itself.
NEVER_CALLED = ("dt_proj",)
#: Attention to another sequence: of a decoder to its encoder, or to an image.
CROSS_ATTENTION = re.compile(r"\.(encoder_attn|EncDecAttention|crossattention|cross_attn)\.")
#: Parts of a text model that a text-only pass never calls -> the words for them.
UNCALLED = {CROSS_ATTENTION: "cross attention", re.compile(r"\.vision_moe\."): "vision experts"}
#: Words in the names of towers for other inputs than text.
TOWER = re.compile(r"vision|visual|image|audio|speech|tower|encoder|projector|resampler|qformer")
#: The path of a block in a module path: everything up to the first number.
BLOCK = re.compile(r"(.*?\.\d+)\.")
#: The layer and the number of the expert that a linear belongs to.
EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.")
#: The number of a layer in a stored name, and a name up to there.
LAYER = re.compile(r"(?:^|\.)(?:layers|layer|blocks|block|h)\.(\d+)\.")
LAYER_START = re.compile(rf".*?{LAYER.pattern}")
#: Stored tables that are computed today.
COMPUTED = re.compile(
    r"inv_freq$|(^|\.)(position_ids|version)$|(cos|sin)_cached$|\.(masked_bias|causal_mask)$"
)
#: A module's method that computes its weight. Checkpoints of Marian and Pegasus lack this weight.
COMPUTES = "create_weight"
#: Draft layers, which guess tokens ahead: their keys in config.json, the keys that count layers,
#: and parts of names.
DRAFT_WORDS = re.compile(r"nextn|mtp|n_predict|medusa|eagle|draft")
DRAFT_COUNTS = re.compile(
    rf"(?=.*({DRAFT_WORDS.pattern})).*(layers|modules|blocks|depth|n_predict)$"
)
DRAFT_PARTS = re.compile(r"(^|\.)(mtp|nextn|medusa|eagle|draft)")
#: Heads that give a value or a class: classes and keys in config.json that speak of them, and their
#: names.
HEAD_CLASSES = re.compile(r"ValueHead|Reward|Classification")
HEAD_KEYS = re.compile(r"^(num_labels|id2label|problem_type)$|(^|_)(v_head|value_head|reward)(_|$)")
HEAD_PARTS = re.compile(
    r"^((model|transformer)\.)?(v_head|value_head|reward_head|score|classifier)\."
)
