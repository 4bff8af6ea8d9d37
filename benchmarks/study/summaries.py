"""Let a model summarize documents, and compare the summaries with references by ROUGE (`pip install rouge-score`).

    python -m benchmarks.study.summaries ./model-int4 --data summaries.jsonl --max-new-tokens 10 --against ./model

Records have `document` and `summary`, as train_summary.py writes them. F-measures of stemmed words stand with 95 %
intervals by bootstrap over records. Of an encoder-decoder also the loss on the summaries is printed: it reads the
document and predicts each token of the summary given those before it; with --against, its KL divergence from that
model too.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.study.writing import records, write

KINDS, END = ("rouge1", "rouge2", "rougeL"), "\n\n"
#: GPT-2's prompt for summaries (Radford et al. 2019); an encoder-decoder reads the document alone.
PROMPT = "{document}\n\nTL;DR:"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, dense or quantized")
    parser.add_argument("--data", type=Path, required=True, help="records with document and summary, one a line")
    parser.add_argument("--against", help="unquantized encoder-decoder, for the KL divergence")
    parser.add_argument("--prompt", help="in which {document} is the document [it, and TL;DR: for a decoder]")
    parser.add_argument("--limit", type=int, help="first N records [all]")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    import quantkit

    rows, words = records(args.data, args.limit), AutoTokenizer.from_pretrained(args.model)
    model: Any = quantkit.load(args.model, device=args.device)
    reads = bool(model.config.is_encoder_decoder)
    if args.against and not reads:
        parser.error("--against is for an encoder-decoder: compare a decoder by quantkit eval kld")
    form = args.prompt or ("{document}" if reads else PROMPT)
    prompts = [form.replace("{document}", row["document"]) for row in rows]
    texts = write(model, words, prompts, new=args.max_new_tokens, batch=args.batch_size, stops=() if reads else (END,))
    for line in rouge([row["summary"] for row in rows], [text.split(END)[0] for text in texts]):
        print(line)
    if reads:
        reference = quantkit.load(args.against, device=args.device) if args.against else None
        for line in losses(model, reference, words, rows):
            print(line)


def rouge(references: list[str], texts: list[str]) -> list[str]:
    """Give the mean F-measures in percent, with their intervals."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(KINDS, use_stemmer=True)
    scores = [scorer.score(reference, text) for reference, text in zip(references, texts, strict=True)]
    return [f"{kind} {interval([100 * each[kind].fmeasure for each in scores], '.1f')}" for kind in KINDS]


def losses(model: Any, reference: Any, words: Any, rows: list[dict[str, Any]]) -> list[str]:
    """Give the mean loss of a summary's tokens in nats, and their KL divergence from a reference in thousandths."""
    found, apart = [], []
    for row in rows:
        document = words(row["document"], return_tensors="pt", truncation=True)["input_ids"].to(model.device)
        target = words(text_target=row["summary"], return_tensors="pt", truncation=True)["input_ids"].to(model.device)
        with torch.inference_mode():
            ours, theirs = (
                None if each is None else each(input_ids=document, labels=target).logits[0].double().log_softmax(-1)
                for each in (model, reference)
            )
        assert ours is not None
        found.append(-ours.gather(1, target[0][:, None])[:, 0].cpu())
        if theirs is not None:
            apart.append(float((theirs.exp() * (theirs - ours)).sum(-1).mean()))
    mean = float(torch.cat(found).mean())
    lines = [f"loss {mean:.4f} nats, perplexity {np.exp(mean):.3f}"]
    return lines + ([f"KL divergence {interval([1000 * each for each in apart], '.2f')} thousandths"] if apart else [])


def interval(values: list[float], form: str) -> str:
    """Write a mean with its 95 % interval by the percentile bootstrap."""
    draws, array = np.random.default_rng(0), np.array(values)
    means = [array[draws.integers(len(array), size=len(array))].mean() for _ in range(1000)]
    low, high = np.quantile(means, (0.025, 0.975))
    return f"{array.mean():{form}} ({low:{form}} to {high:{form}})"


if __name__ == "__main__":
    main()
