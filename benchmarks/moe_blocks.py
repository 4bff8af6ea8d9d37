"""Time GPTQ on mixtures of experts of published shapes: seconds a block by phase, memory, tokens that experts see.

Writes a folder with two blocks of random weights in bfloat16, each expert under its names on the hub, and a small
vocabulary. It is quantized to INT4 g128 in the MARLIN layout on random words, then generates 16 tokens. Token
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

WORDS, LENGTH = 4096, 2048
#: Share of an embedding's variance that all tokens have in common, and spread of a router's logits.
COMMON, SPREAD = 0.25, 2.0
ROUTERS = ("mlp.gate.weight", "block_sparse_moe.gate.weight")

_QWEN = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
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
    # The same steps on a small machine.
    "tiny": _QWEN
    | {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_attention_heads": 2}
    | {"num_key_value_heads": 2, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 2}
    | {"max_position_embeddings": 4096, "rope_theta": 1e6, "rms_norm_eps": 1e-6},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, choices=list(CONFIGS))
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=128, help=f"sequences of {LENGTH} random words")
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
            recipe={"scheme": {"format": "int4", "group_size": 128}, "method": "gptq", "layout": "marlin"},
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
        result["generated"] = generated(packed, device)
    found = load_json(args.out) if args.out.exists() else {}
    files.write_atomic(args.out, dump_json({**found, args.model: result}))
    print(json.dumps(result["generated"], indent=1))


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
    h, head = shapes["hidden_size"], shapes["head_dim"]
    qwen = shapes["model_type"] == "qwen3_moe"
    at = f"model.layers.{block}."
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{at}{name}.weight", (h,)
    for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
        yield f"{at}self_attn.{name}_proj.weight", (shapes[heads] * head, h)
        if qwen and name != "v":
            yield f"{at}self_attn.{name}_norm.weight", (head,)
    yield f"{at}self_attn.o_proj.weight", (h, shapes["num_attention_heads"] * head)
    moe, *leaves = ("mlp", "gate_proj", "up_proj", "down_proj") if qwen else ("block_sparse_moe", "w1", "w3", "w2")
    experts = shapes["num_experts" if qwen else "num_local_experts"]
    inner = shapes["moe_intermediate_size" if qwen else "intermediate_size"]
    yield f"{at}{moe}.gate.weight", (experts, h)
    for expert in range(experts):
        for leaf, shape in zip(leaves, ((inner, h), (inner, h), (h, inner)), strict=True):
            yield f"{at}{moe}.experts.{expert}.{leaf}.weight", shape


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
