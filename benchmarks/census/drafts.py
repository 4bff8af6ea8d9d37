"""Draft layers (MTP) as published folders have them: tensors beside the model, which classes of transformers ignore.

A folder gets one draft layer: a copy of its last block with attention, a matrix that joins hidden state and embedding,
and norms. Names and counting keys are those of released checkpoints, as vLLM's draft classes read them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

#: where a stored tensor belongs to a block of the decoder: what precedes its number, and the number
LAYER = re.compile(r"^((?!.*(?:vision|visual|audio|speech|tower|conformer)).*?\b(?:layers|blocks)\.)(\d+)\.")
EXPERTS = re.compile(r"\.experts\.")
ATTENTION = re.compile(r"\.(self_attn|attention|attn)\.|\.mixer\.q_proj\.")


class Draft(NamedTuple):
    """Name the key that counts draft layers, and the tensors of one; `{next}` starts the block after the last."""

    key: str
    block: str
    matrix: str
    norms: tuple[str, ...]
    #: copies of the embeddings and of the head
    embeddings: str | None = None
    head: str | None = None
    #: start of a second block, a copy of the last one with experts
    experts: str | None = None


COUNT = "num_nextn_predict_layers"


def _beside(key: str = COUNT) -> Draft:
    norms = ("mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
    return Draft(key, "mtp.layers.0.", "mtp.fc.weight", norms)


def _after(last_norm: str = "shared_head.norm", head: str | None = "{next}shared_head.head.weight") -> Draft:
    norms = tuple(f"{{next}}{name}.weight" for name in ("enorm", "hnorm", last_norm))
    return Draft(COUNT, "{next}", "{next}eh_proj.weight", norms, "{next}embed_tokens.weight", head)


def _inside(start: str, key: str = COUNT) -> Draft:
    norms = tuple(f"{start}{name}.weight" for name in ("enorm", "hnorm", "final_layernorm"))
    return Draft(key, start, f"{start}eh_proj.weight", norms)


#: family -> its draft layer, for the families that have the key, or whose released models have such layers
DRAFTS: dict[str, Draft] = {
    **dict.fromkeys(("qwen3_next", "exaone_moe", "exaone4_5", "mellum"), _beside()),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text"),
        _beside("mtp_num_hidden_layers"),
    ),
    **dict.fromkeys(
        ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "glm_ocr", "kimi_k25", "step3p7"),
        _after(),
    ),
    **dict.fromkeys(("bailing_hybrid", "hy_v3", "sarvam_moe", "sarvam_mla"), _after("final_layernorm", None)),
    **dict.fromkeys(("hy_v4", "hy_v4_vl"), _inside("model.mtp_layers.0.")),
    **dict.fromkeys(("inkling_mm_model", "inkling_text"), _inside("model.mtp.layers.0.", "num_mtp_layers")),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h_omni"),
        Draft(
            COUNT,
            "mtp.layers.0.",
            "mtp.layers.0.eh_proj.weight",
            ("mtp.layers.0.enorm.weight", "mtp.layers.0.hnorm.weight", "mtp.layers.1.final_layernorm.weight"),
            experts="mtp.layers.1.",
        ),
    ),
    "deepseek_v4": _inside("mtp.0."),
    "mimo_v2_flash": _inside("model.mtp.layers.0."),
    "minimax_m3_vl": _inside("mtp.layers.0.", "num_mtp_modules"),
    "ernie4_5_moe": Draft(
        COUNT,
        "model.mtp_block.0.",
        "model.mtp_linear_proj.0.weight",
        ("model.mtp_emb_norm.0.weight", "model.mtp_hidden_norm.0.weight"),
    ),
    "longcat_flash": Draft(
        COUNT,
        "model.mtp.layers.0.transformer_layer.",
        "model.mtp.layers.0.eh_proj.weight",
        ("model.mtp.layers.0.enorm.m.weight", "model.mtp.layers.0.hnorm.m.weight", "model.mtp.norm.weight"),
        "model.mtp.embed_tokens.weight",
    ),
}


def add(family: str, folder: Path) -> None:
    """Give the folder of a tiny model one draft layer, if its family has such layers."""
    draft, path = DRAFTS.get(family), folder / "model.safetensors"
    if draft is None:
        return
    tensors = load_file(path)
    config = json.loads((folder / "config.json").read_text())
    text = text_config(config)

    def last_with(part: re.Pattern[str]) -> re.Match[str]:
        return max(filter(None, map(LAYER.match, filter(part.search, tensors))), key=lambda found: int(found[2]))

    last = last_with(ATTENTION)
    depth = 1 + max(int(found[2]) for name in tensors if (found := LAYER.match(name)) and found[1] == last[1])
    generator = torch.Generator().manual_seed(3)
    width = int(text["hidden_size"])
    stored = tensors[last.string].dtype

    def full(name: str) -> str:
        return name.replace("{next}", f"{last[1]}{depth}.")

    blocks = {last[0]: full(draft.block)} | ({last_with(EXPERTS)[0]: draft.experts} if draft.experts else {})
    new = {
        to + name.removeprefix(block): tensors[name]
        for block, to in blocks.items()
        for name in tensors
        if name.startswith(block)
    }
    new[full(draft.matrix)] = (0.08 * torch.randn(width, 2 * width, generator=generator)).to(stored)
    new |= {full(name): torch.ones(width, dtype=stored) for name in draft.norms}
    for name, part in ((draft.embeddings, "embed"), (draft.head, "lm_head")):
        like = next((tensor for key, tensor in tensors.items() if part in key and tensor.ndim == 2), None)
        if name is not None and like is not None:
            new[full(name)] = like
    save_file({**tensors, **{k: v.clone() for k, v in new.items()}}, path, metadata={"format": "pt"})


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that describes the decoder."""
    found: dict[str, Any] = config.get("text_config") or config
    return found


def is_draft(name: str, config: dict[str, Any]) -> bool:
    """Return whether a stored tensor belongs to the draft layer that `add` gives."""
    draft = DRAFTS.get(str(config.get("model_type")))
    if draft is None:
        return False
    found = LAYER.match(name)
    depth = text_config(config).get("num_hidden_layers", 0)
    return "mtp" in name if "{next}" not in draft.block else found is not None and int(found[2]) >= depth
