"""Time GPTQ on mixtures of experts of published shapes: seconds a block by phase, memory, tokens that experts see.

Writes a folder with some blocks of random weights in bfloat16, each expert under its names on the hub, and a small
vocabulary. It is quantized to INT4 g128 on random words; in a kernel layout it then generates 16 tokens. Token
embeddings share a part, so that routers prefer some experts: random weights alone would use all alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from moe_accuracy import routed_tokens
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import quantkit
from quantkit.inference.generate import generate
from quantkit.io import files
from quantkit.io.json_files import dump_json, load_json
from quantkit.io.model_folder import INDEX
from quantkit.layouts import LAYOUTS
from quantkit.names import KERNELS

WORDS, LENGTH = 4096, 2048
#: Share of an embedding's variance that all tokens have in common, and spread of a router's logits.
COMMON, SPREAD = 0.25, 2.0
ROUTERS = ("mlp.gate.weight", "block_sparse_moe.gate.weight")

_QWEN = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
_DEEPSEEK = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "norm_topk_prob": True}
_DEEPSEEK |= {"first_k_dense_replace": 0, "n_shared_experts": 1, "rope_theta": 1e4, "rms_norm_eps": 1e-6}
#: Model -> its published config.json, apart from the vocabulary and the number of blocks.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _QWEN
    | {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128}
    | {"num_experts_per_tok": 8, "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6},
    "mixtral-8x7b": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"head_dim": 128, "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768}
    | {"rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "qwen3-235b-a22b": _QWEN
    | {"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536}
    | {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128}
    | {"num_experts_per_tok": 8, "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6},
    # Its first three blocks are dense: here each is a mixture.
    "deepseek-v3": _DEEPSEEK
    | {"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256}
    | {"num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512}
    | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts_per_tok": 8}
    | {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "max_position_embeddings": 163840},
    # The same steps on a small machine.
    "tiny": _QWEN
    | {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_attention_heads": 2}
    | {"num_key_value_heads": 2, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 2}
    | {"max_position_embeddings": 4096, "rope_theta": 1e6, "rms_norm_eps": 1e-6},
    "tiny-deepseek": _DEEPSEEK
    | {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "n_routed_experts": 16}
    | {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 128, "kv_lora_rank": 128}
    | {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "num_experts_per_tok": 2}
    | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "max_position_embeddings": 4096},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, choices=list(CONFIGS))
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=128, help=f"sequences of {LENGTH} random words")
    parser.add_argument("--layout", default="marlin", choices=list(LAYOUTS))
    parser.add_argument("--moe-calibration", default="routed", choices=["routed", "all"])
    parser.add_argument("--work", type=Path, help="folder for the models, 8 GB for two blocks of Mixtral")
    parser.add_argument("-o", "--out", type=Path, required=True, help="JSON to write; other models in it are kept")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        source, packed, text = Path(work) / "source", Path(work) / "packed", Path(work) / "words.txt"
        started = time.perf_counter()
        write_model(source, CONFIGS[args.model], args.blocks, device)
        random = torch.randint(WORDS, (args.samples, LENGTH), generator=torch.Generator().manual_seed(0))
        text.write_text("\n\n".join(" ".join(f"w{i}" for i in row) for row in random.tolist()))
        written = time.perf_counter() - started
        print(f"{args.model}: {args.blocks} blocks written in {written:.0f} s", flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        report = quantkit.quantize(
            source,
            packed,
            recipe={"scheme": {"format": "int4", "group_size": 128}, "method": "gptq", "layout": args.layout},
            calib=str(text),
            samples=args.samples,
            max_length=LENGTH,
            moe_calibration=args.moe_calibration,
            device=device,
        )
        result = {
            "gpu": report["device"],
            "torch": torch.__version__,
            "transformers": report["environment"]["transformers"],
            "blocks": args.blocks,
            "moe_calibration": args.moe_calibration,
            "sequences": report["calibration"]["sequences"],
            "tokens": report["calibration"]["tokens"],
            "seconds_to_write_the_source": round(written, 1),
            "seconds": round(report["totals"]["seconds"], 1),
            "seconds_a_block": {k: round(v / args.blocks, 2) for k, v in report["phases"].items()},
            "source_bytes": report["totals"]["source_bytes"],
            "bytes": report["totals"]["bytes"],
            "peak_memory": report["totals"]["peak_memory"],
            "experts": expert_tokens(report["layers"]),
        }
        print(json.dumps(result, indent=1), flush=True)
        if args.layout in KERNELS:
            result["generated"] = generated(packed, device)
    found = load_json(args.out) if args.out.exists() else {}
    files.write_atomic(args.out, dump_json({**found, args.model: result}))
    print(json.dumps(result.get("generated"), indent=1))


def write_model(folder: Path, shapes: dict[str, Any], blocks: int, device: str) -> None:
    """Write a folder with random weights, one shard a block, and a tokenizer of the words w0, w1, ..."""
    folder.mkdir()
    ids = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False, "dtype": "bfloat16"}
    config = {**shapes, **ids, "num_hidden_layers": blocks, "vocab_size": WORDS}
    (folder / "config.json").write_bytes(dump_json(config))
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return std * torch.randn(*shape, generator=generator, device=device)

    h = shapes["hidden_size"]
    embeddings = normal(WORDS, h, std=math.sqrt(1 - COMMON)) + normal(h, std=math.sqrt(COMMON))
    outside = {"model.embed_tokens.weight": embeddings, "lm_head.weight": normal(WORDS, h, std=h**-0.5)}
    weight_map = _save_shard(folder, blocks, {**outside, "model.norm.weight": torch.ones(h)})
    for block in range(blocks):
        tensors = {
            name: torch.ones(shape)
            if len(shape) == 1
            else normal(*shape, std=(SPREAD if name.endswith(ROUTERS) else 1) * shape[1] ** -0.5)
            for name, shape in block_shapes(shapes, block)
        }
        weight_map |= _save_shard(folder, block, tensors)
    (folder / INDEX).write_bytes(dump_json({"metadata": {}, "weight_map": weight_map}))
    vocabulary = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=vocabulary, bos_token="w0", eos_token="w0").save_pretrained(folder)


def _save_shard(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    file = f"block-{number}.safetensors"
    save_file({name: tensor.to("cpu", torch.bfloat16) for name, tensor in tensors.items()}, folder / file)
    return dict.fromkeys(tensors, file)


def block_shapes(shapes: dict[str, Any], block: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each tensor of a block, as published."""
    h, kind = shapes["hidden_size"], shapes["model_type"]
    at = f"model.layers.{block}."
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{at}{name}.weight", (h,)
    for name, shape in (_latent_attention if kind == "deepseek_v3" else _attention)(shapes):
        yield f"{at}self_attn.{name}.weight", shape
    mixtral = kind == "mixtral"
    moe, *leaves = ("block_sparse_moe", "w1", "w3", "w2") if mixtral else ("mlp", "gate_proj", "up_proj", "down_proj")
    counts = ("num_local_experts", "n_routed_experts", "num_experts")
    experts = next(shapes[key] for key in counts if key in shapes)
    inner = shapes["intermediate_size" if mixtral else "moe_intermediate_size"]
    yield f"{at}{moe}.gate.weight", (experts, h)
    places = [f"experts.{expert}" for expert in range(experts)]
    if kind == "deepseek_v3":
        yield f"{at}{moe}.gate.e_score_correction_bias", (experts,)
        places.append("shared_experts")
    for place in places:
        for leaf, shape in zip(leaves, ((inner, h), (inner, h), (h, inner)), strict=True):
            yield f"{at}{moe}.{place}.{leaf}.weight", shape


def _attention(shapes: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    h, head = shapes["hidden_size"], shapes["head_dim"]
    for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
        yield f"{name}_proj", (shapes[heads] * head, h)
        if shapes["model_type"] == "qwen3_moe" and name != "v":
            yield f"{name}_norm", (head,)
    yield "o_proj", (h, shapes["num_attention_heads"] * head)


def _latent_attention(shapes: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    h, heads, rope = (shapes[key] for key in ("hidden_size", "num_attention_heads", "qk_rope_head_dim"))
    q, kv, key, value = (shapes[k] for k in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"))
    yield "q_a_proj", (q, h)
    yield "q_a_layernorm", (q,)
    yield "q_b_proj", (heads * (key + rope), q)
    yield "kv_a_proj_with_mqa", (kv + rope, h)
    yield "kv_a_layernorm", (kv,)
    yield "kv_b_proj", (heads * (key + value), kv)
    yield "o_proj", (h, heads * value)


def expert_tokens(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return by projection the number of experts, of those calibrated on all tokens, and the tokens routed to each."""
    found: dict[str, Any] = {}
    for leaf in dict.fromkeys(layer["name"].rpartition(".")[2] for layer in layers if "moe" in layer):
        experts = [layer for layer in layers if "moe" in layer and layer["name"].endswith(f".{leaf}")]
        tokens = [count for layer in experts if (count := routed_tokens(layer)) is not None]
        found[leaf] = {"experts": len(experts), "on_all_tokens": sum(layer["moe"] == "all" for layer in experts)}
        if tokens:
            found[leaf] |= {"min": min(tokens), "median": statistics.median_low(tokens), "max": max(tokens)}
    return found


def generated(packed: Path, device: str) -> dict[str, Any]:
    """Generate text with the packed folder, and return it with its facts; an error is returned, not raised."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        found = generate(packed, "w1 w2 w3 w4", max_new_tokens=16, device=device)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {**dataclasses.asdict(found), "peak_vram": peak}


if __name__ == "__main__":
    main()
