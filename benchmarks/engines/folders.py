"""Write small folders of every layout and kind, random weights, for the checks of engines: seconds each, 0.3 to 3 MB.

    python -m benchmarks.engines.folders OUT [NAME...]

The weights are drawn so that activations keep their size and the head decides clearly: a wrong product moves the
log-probabilities by whole nats, rounding by thousandths.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.byte_tokenizer import byte_tokenizer

SIZES = {
    **{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 257, "max_position_embeddings": 512},
    **{"tie_word_embeddings": False, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256},
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
#: Models: the class of the config in transformers and its arguments.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    # vLLM's class ties the tensor, not the layer
    "tied-weight": ("GraniteConfig", {"tie_word_embeddings": True, "attention_multiplier": 0.125}),
    "padded": ("LlamaConfig", {"hidden_size": 320, "intermediate_size": 832}),
    "qwen2": ("Qwen2Config", {}),  # biases of q, k and v
    "phi3": ("Phi3Config", {}),  # q, k, v and gate, up are joined on disk
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 8, "norm_topk_prob": True}),
}
_CT, _FP6 = "compressed-tensors", {"format": "fp6", "group_size": "channel"}
_ASYM, _SPARSE = {"asym": True}, {"prune": "2:4"}
_MIX = {"override": {".*down_proj": "int4:channel"}, "skip": [".*layers.0.*o_proj"]}
#: Folders: their model and the keys of their recipe.
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ct": ("llama", {"layout": _CT}),
    "ct-asym": ("llama", {"layout": _CT, **_ASYM}),
    "gptq": ("llama", {"layout": "gptq"}),
    "gptq-v2": ("llama", {"layout": "gptq-v2", **_ASYM}),
    "awq": ("llama", {"layout": "awq", **_ASYM}),
    "humming": ("llama", {"layout": "humming", **_FP6}),
    "marlin": ("llama", {"layout": "marlin"}),
    "marlin-channel": ("llama", {"layout": "marlin", "group_size": "channel"}),
    "marlin24": ("llama", {"layout": "marlin24", **_SPARSE}),
    "marlin24-ct": ("llama", {"layout": "marlin24-ct", **_SPARSE}),
    "tcfpx": ("llama", {"layout": "tcfpx", **_FP6}),
    "tcfpx-fp5": ("llama", {"layout": "tcfpx", **_FP6, "format": "fp5"}),
    "quick": ("llama", {"layout": "quick", **_ASYM}),
    "ct-int8": ("llama", {"layout": _CT, "format": "int8"}),
    "nvfp4": ("llama", {"layout": _CT, "format": "nvfp4"}),
    "mxfp4": ("llama", {"layout": _CT, "format": "mxfp4"}),
    "mixed": ("llama", {"layout": "marlin", **_MIX}),
    "padded": ("padded", {"layout": "marlin", "pad": True}),
    "padded-tcfpx": ("padded", {"layout": "tcfpx", "pad": True, **_FP6}),
    "biases": ("qwen2", {"layout": "marlin"}),
    "joined": ("phi3", {"layout": "marlin"}),
    "joined-fp6": ("phi3", {"layout": "tcfpx", **_FP6}),
    "tied": ("tied", {"layout": "marlin"}),
    "tied-packed": ("tied", {"layout": _CT, "embeddings": "int4:g128"}),
    "tied-weight": ("tied-weight", {"layout": _CT, "embeddings": "int8:channel"}),
    "ends": ("llama", {"layout": _CT, "embeddings": "int8:channel", "head": "int4:g64"}),
    "ends-biases": ("qwen2", {"layout": _CT, "embeddings": "int8:channel", "head": "int4:g128"}),
    "mixtral": ("mixtral", {"layout": "marlin"}),
    "mixtral-ct": ("mixtral", {"layout": _CT}),
    "qwen3_moe": ("qwen3_moe", {"layout": "marlin"}),
    "qwen3_moe-fp6": ("qwen3_moe", {"layout": "tcfpx", **_FP6}),
    "qwen3_moe-ct": ("qwen3_moe", {"layout": _CT}),
}


def write_model(name: str, out: Path) -> None:
    """Write a random model in float16, and its tokenizer of bytes."""
    import torch
    import transformers

    kind, changes = MODELS[name]
    config = getattr(transformers, kind)(**{**SIZES, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for key, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms and biases
            parameter.data += 0.1 * torch.randn_like(parameter)
            continue
        scale = 1.0 if "embed_tokens" in key else parameter.shape[-1] ** -0.5
        clear = 3 if re.search(r"(gate|router)\.weight$", key) else 1.5 if "lm_head" in key else 1
        if config.tie_word_embeddings and "embed_tokens" in key:
            scale = 2 * parameter.shape[-1] ** -0.5
        parameter.data.normal_(0, scale * clear)
    model.half().save_pretrained(out)
    byte_tokenizer().save_pretrained(out)


def write_adapter(model: Path, out: Path) -> None:
    """Write a LoRA adapter of rank 8 on all linears of a Llama, large enough to change most tokens."""
    import torch
    from safetensors.torch import safe_open, save_file

    torch.manual_seed(1)
    linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    tensors = {}
    for file in model.glob("*.safetensors"):
        with safe_open(file, "pt") as held:
            for key in held.keys():  # noqa: SIM118
                if key.split(".")[-2] in linears:
                    n, k = held.get_slice(key).get_shape()
                    name = f"base_model.model.{key.removesuffix('.weight')}"
                    tensors[f"{name}.lora_A.weight"] = (torch.randn(8, k) * k**-0.5).half()
                    tensors[f"{name}.lora_B.weight"] = (torch.randn(n, 8) * 0.1).half()
    out.mkdir()
    save_file(tensors, out / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 8, "target_modules": linears}
    (out / "adapter_config.json").write_text(json.dumps(config))


def write_folder(out: Path, name: str) -> str:
    """Quantize by rounding; return the error, or nothing."""
    import quantkit

    model, recipe = FOLDERS[name]
    try:
        quantkit.quantize(out / f"model-{model}", out / name, method="rtn", device="cpu", min_share=0, **recipe)
    except quantkit.QuantkitError as error:
        return f"{name}: {error}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", default=list(FOLDERS))
    parser.add_argument("--jobs", type=int, default=8)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(args.jobs) as pool:
        needed = sorted({FOLDERS[name][0] for name in args.names})
        list(pool.map(write_model, needed, [args.out / f"model-{name}" for name in needed]))
        if "llama" in needed:
            write_adapter(args.out / "model-llama", args.out / "adapter")
        errors = [line for line in pool.map(write_folder, [args.out] * len(args.names), args.names) if line]
    print(f"{len(args.names) - len(errors)} of {len(args.names)} folders in {args.out}", *errors, sep="\n")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
