"""Train a small BART from scratch to summarize, so that the loss of quantized encoder-decoders can be measured.

A document is the first words of a sentence, its summary the rarer ones among them, in order. The model must choose and
copy. Written are an ordinary Hugging Face folder in float16, and held-out records for `study/summaries.py`.
About four minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast

#: Known words, those of them that no summary has, words of a document, and most words of a summary.
KNOWN, COMMON, WORDS, SUMMARY = 4000, 60, 24, 6
SPECIAL = ("<pad>", "<s>", "</s>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="training text, a paragraph a line")
    parser.add_argument("--valid", type=Path, required=True, help="text of the held-out records")
    parser.add_argument("--records", type=int, default=400, help="held-out records [400]")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder for model/ and records.jsonl")
    args = parser.parse_args()

    torch.manual_seed(0)
    counts = Counter(word for words in _sentences(args.text) for word in words)
    known = [word for word, _ in counts.most_common(KNOWN)]
    pairs, held = (_pairs(path, known) for path in (args.text, args.valid))
    tokenizer = _tokenizer(known)
    config = BartConfig(
        **{"vocab_size": len(tokenizer), "d_model": 128, "max_position_embeddings": 32},
        **{f"{part}_{key}": n for part in ("encoder", "decoder") for key, n in (("layers", 2), ("ffn_dim", 256))},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0, "activation_dropout": 0.0},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
        forced_eos_token_id=None,
    )
    model = BartForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01, betas=(0.9, 0.98))
    started = time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 150) * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        chosen = [pairs[i] for i in torch.randint(len(pairs), (args.batch,)).tolist()]
        loss = _loss(model, tokenizer, chosen)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0 or step + 1 == args.steps:
            with torch.no_grad():
                tested = _loss(model, tokenizer, held[: args.records])
            print(f"step {step + 1}: train {loss:.3f}, held out {tested:.3f}", flush=True)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {time.perf_counter() - started:.0f} s")
    model.half().eval().save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    rows = [json.dumps({"document": document, "summary": summary}) for document, summary in held[: args.records]]
    (args.out / "records.jsonl").write_text("\n".join(rows) + "\n")


def _sentences(path: Path) -> list[list[str]]:
    lines = path.read_text(encoding="utf-8").lower().splitlines()
    return [part.split() for line in lines if not line.lstrip().startswith("=") for part in line.split(" . ")]


def _pairs(path: Path, known: list[str]) -> list[tuple[str, str]]:
    """Return documents and summaries of the sentences that have enough known words."""
    words, common = {word for word in known if word.isalpha()}, {*known[:COMMON]}
    found = []
    for sentence in _sentences(path):
        document = [word for word in sentence if word in words][:WORDS]
        summary = [word for word in document if word not in common][:SUMMARY]
        if len(document) == WORDS and len(summary) == SUMMARY:
            found.append((" ".join(document), " ".join(summary)))
    return found


def _tokenizer(known: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a word, and the end of text behind each text."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate((*SPECIAL, *known))}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def _loss(model: Any, tokenizer: Any, pairs: list[tuple[str, str]]) -> torch.Tensor:
    documents, summaries = zip(*pairs, strict=True)
    inputs, labels = (tokenizer(list(texts), return_tensors="pt")["input_ids"] for texts in (documents, summaries))
    loss: torch.Tensor = model(input_ids=inputs, labels=labels).loss
    return loss


if __name__ == "__main__":
    main()
