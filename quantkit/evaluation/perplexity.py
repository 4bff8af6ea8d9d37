"""Perplexity, together with the protocol that it depends on: window, stride, BOS, tokens and text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantkit.errors import NumericError
from quantkit.evaluation.windows import ROWS, tokenize, window_logits, windows
from quantkit.progress import Progress
from quantkit.reporting.notebook import Shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The largest loss whose exponential is a double. Guessing among all tokens of a vocabulary costs 1/40 of it.
LARGEST_NLL = 709.0


@dataclass(frozen=True)
class Perplexity(Shown):
    """`perplexity` is `exp(nll)`; `nll` is in nats per predicted token, and `tokens` counts the predictions.

    The text has `text_tokens` tokens and was read in `windows` windows of `window` tokens, `stride` apart. With `bos`,
    each window had the BOS token in front. `data` names the text; `weights` says how weights were multiplied.
    """

    perplexity: float
    nll: float
    tokens: int
    windows: int
    window: int
    stride: int
    bos: bool
    data: str
    text_tokens: int
    weights: str = ""


def perplexity(
    model: PreTrainedModel,
    tokenizer: Callable[..., Any],
    text: str,
    *,
    window: int,
    stride: int | None = None,
    bos: bool = False,
    data: str = "",
    progress: Progress | None = None,
    most: int | None = None,
) -> Perplexity:
    """Compute the perplexity of `model` on `text`: exp of the mean negative log-likelihood, losses in float32.

    Windows of `window` tokens start every `stride` (default `window`) tokens. In each window, all tokens but the first
    are predicted; with `bos`, the first too. If windows overlap, each after the first counts only its last `stride`
    predictions. At most `most` windows are read. Raises as `windows.tokenize`, and NumericError for logits that are not
    finite.
    """
    stride = window if stride is None else stride
    tokens, prefix = tokenize(model, tokenizer, text, window, stride, bos)
    total, count, used = 0.0, 0, 0
    for number, part in windows(tokens, window, stride, progress, "perplexity", most):
        logits = window_logits(model, part, prefix, number)
        targets = part if bos else part[1:]
        logits = logits[: len(targets)]
        new = len(targets) if number == 0 else min(stride, len(targets))
        total += _negative_log_likelihood(logits[-new:], targets[-new:].to(logits.device))
        count += new
        used += 1
    nll = total / count
    if not nll < LARGEST_NLL:
        raise NumericError(
            f"the mean loss is {nll:.4g} nats, which is no language model's: its weights are damaged, or its dtype "
            "overflows"
        )
    return Perplexity(math.exp(nll), nll, count, used, window, stride, bos, data, len(tokens))


def _negative_log_likelihood(logits: Tensor, targets: Tensor) -> float:
    """Sum the losses of all targets: each in float32, the sum in float64."""
    losses = [
        torch.nn.functional.cross_entropy(a.float(), b, reduction="none").double().sum()
        for a, b in zip(logits.split(ROWS), targets.split(ROWS), strict=True)
    ]
    return float(torch.stack(losses).sum())
