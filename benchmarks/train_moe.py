"""Train a small mixture of experts, to measure quantization loss and the calibration of experts on.

A Qwen3-MoE with 16 experts in each of 6 blocks, two of them for a token. It is trained from scratch on the given text
with the given tokenizer, and written as an ordinary Hugging Face folder in float16, one tensor an expert. Every linear
is 256 x 256, which all layouts hold. About two minutes on one H100.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

LENGTH = 512
EXPERTS, CHOSEN = 16, 2
#: Weight of the loss that balances the load of experts, as published for Switch transformers.
BALANCE = 0.01
DROPOUT = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder whose tokenizer is used and copied")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="training text files")
    parser.add_argument("--valid", type=Path, required=True, help="text that shows the held-out loss")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64, help=f"sequences of {LENGTH} tokens in a step")
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    tokens = torch.cat([_tokens(tokenizer, path) for path in args.text]).to(device)
    valid = _tokens(tokenizer, args.valid).to(device)
    model = _model(tokenizer).to(device).train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )
    started = time.perf_counter()
    for step in range(args.steps):
        rate = 1.5e-3 * min(1, (step + 1) / 200) * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(tokens) - LENGTH, (args.batch,)).tolist()
        batch = torch.stack([tokens[s : s + LENGTH] for s in starts])
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            out = model(input_ids=batch, labels=batch, use_cache=False, output_router_logits=True)
            # transformers' own sum pools the blocks, so that a block could leave experts idle.
            balance = [load_balancing_loss_func((logits,), EXPERTS, CHOSEN) for logits in out.router_logits]
        loss = out.loss + BALANCE * torch.stack(balance).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 200 == 0 or step + 1 == args.steps:
            print(
                f"step {step + 1}: train {out.loss.item():.3f}, held out {_evaluated(model, valid)[0]:.3f}", flush=True
            )
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {time.perf_counter() - started:.0f} s")
    for block, logits in enumerate(_evaluated(model, valid)[1]):
        chosen = logits.topk(CHOSEN).indices.flatten().bincount(minlength=EXPERTS)
        share = (chosen / chosen.sum()).sort().values.tolist()
        print(f"block {block}: experts take {', '.join(f'{100 * s:.1f}' for s in share)} % of the held-out text")
    model.half().eval().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


def _model(tokenizer: Any) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        moe_intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        router_aux_loss_coef=0.0,
        max_position_embeddings=LENGTH,
        attention_dropout=DROPOUT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # The products of a group of experts do not follow autocast; those of single ones do.
    config._experts_implementation = "eager"
    model = Qwen3MoeForCausalLM(config)

    def drop(module: torch.nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        return dropout(out, DROPOUT, module.training)

    for module in (model.model.embed_tokens, *(block.mlp for block in model.model.layers)):
        module.register_forward_hook(drop)
    return model


def _tokens(tokenizer: Any, path: Path) -> Tensor:
    return torch.tensor(tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"])


@torch.no_grad()
def _evaluated(model: Qwen3MoeForCausalLM, tokens: Tensor) -> tuple[float, tuple[Tensor, ...]]:
    """Return the loss on the first 32 windows of a text, and the logits of each block's router."""
    model.eval()
    windows = tokens[: 32 * LENGTH].view(32, LENGTH)
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        out = model(input_ids=windows, labels=windows, use_cache=False, output_router_logits=True)
    model.train()
    return out.loss.item(), out.router_logits


if __name__ == "__main__":
    main()
