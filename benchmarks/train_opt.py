"""Train a small OPT with biases, learned positions and tied embeddings, to measure quantization loss on.

The reference Llama has no biases; this model is the second opinion. It is trained from scratch on the given text with
the given tokenizer, and written as an ordinary Hugging Face folder in float16. About two minutes on one H200; a smaller
one can be trained on a CPU.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

LENGTH = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder whose tokenizer is used and copied")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="training text files")
    parser.add_argument("--valid", type=Path, required=True, help="text that shows the held-out loss")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--batch", type=int, default=32, help="windows of a step")
    parser.add_argument("--hidden", type=int, default=384, help="a multiple of 64")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    tokens = torch.cat([_tokens(tokenizer, path) for path in args.text]).to(args.device)
    valid = _tokens(tokenizer, args.valid).to(args.device)
    config = OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        word_embed_proj_dim=args.hidden,
        ffn_dim=4 * args.hidden,
        num_hidden_layers=args.blocks,
        num_attention_heads=args.hidden // 64,
        max_position_embeddings=LENGTH,
        dropout=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = OPTForCausalLM(config).to(args.device).train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    started = time.perf_counter()
    for step in range(args.steps):
        rate = 1.5e-3 * min(1, (step + 1) / 200) * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(tokens) - LENGTH, (args.batch,)).tolist()
        batch = torch.stack([tokens[s : s + LENGTH] for s in starts])
        with torch.autocast(tokens.device.type, torch.bfloat16, tokens.is_cuda):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 200 == 0:
            print(f"step {step + 1}: train {loss.item():.3f}, held out {_loss(model, valid):.3f}", flush=True)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {time.perf_counter() - started:.0f} s")
    model.half().eval().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


def _tokens(tokenizer: object, path: Path) -> torch.Tensor:
    return torch.tensor(tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"])


@torch.no_grad()
def _loss(model: OPTForCausalLM, tokens: torch.Tensor) -> float:
    model.eval()
    windows = tokens[: 32 * LENGTH].view(32, LENGTH)
    with torch.autocast(tokens.device.type, torch.bfloat16, tokens.is_cuda):
        loss = model(input_ids=windows, labels=windows, use_cache=False).loss.item()
    model.train()
    return loss


if __name__ == "__main__":
    main()
