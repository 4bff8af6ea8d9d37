"""Kullback-Leibler divergence of a model from a reference.

It separates quantizations of one model whose perplexities differ by no more than noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.errors import CheckpointError
from quantkit.evaluation.windows import ROWS, tokenize, window_logits, windows
from quantkit.progress import Progress
from quantkit.reporting.notebook import Shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Divergence(Shown):
    """`kld` is the mean of KL(reference || model) in nats over `tokens` positions.

    `top1` is the share of positions at which both models prefer the same token. The other fields are as in
    `Perplexity`.
    """

    kld: float
    top1: float
    tokens: int
    windows: int
    window: int
    stride: int
    bos: bool
    data: str
    text_tokens: int
    weights: str = ""


def kld(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    tokenizer: Callable[..., Any],
    text: str,
    *,
    window: int,
    stride: int | None = None,
    bos: bool = False,
    data: str = "",
    progress: Progress | None = None,
    most: int | None = None,
) -> Divergence:
    """Compute KL(reference || model) of the next-token distributions at every position of every window, in float64.

    Both models are in memory, and the logits of one window at a time. If windows overlap, a position counts as often as
    it occurs. `most` is as for `perplexity`. Raises as `perplexity`, and CheckpointError if the vocabularies differ.
    """
    stride = window if stride is None else stride
    tokens, prefix = tokenize(model, tokenizer, text, window, stride, bos)
    tokenize(reference, tokenizer, text, window, stride, bos)
    total, agree, count, used = 0.0, 0, 0, 0
    for number, part in windows(tokens, window, stride, progress, "divergence", most):
        ours = window_logits(model, part, prefix, number)
        theirs = window_logits(reference, part, prefix, number).to(ours.device)
        if ours.shape != theirs.shape:
            raise CheckpointError(
                f"the models have vocabularies of {ours.shape[-1]} and {theirs.shape[-1]} tokens",
                "compare a model with the one that it was made from",
            )
        for p, q in zip(theirs.split(ROWS), ours.split(ROWS), strict=True):
            p, q = (x.double().log_softmax(-1) for x in (p, q))
            total += float((p.exp() * (p - q)).sum())
            agree += int((p.argmax(-1) == q.argmax(-1)).sum())
        count += len(ours)
        used += 1
    return Divergence(total / count, agree / count, count, used, window, stride, bos, data, len(tokens))
