"""Perplexity, together with the protocol that it depends on: window, stride, BOS,
tokens and text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantkit.errors import NumericError
from quantkit.evaluation.windows import chunks, cut
from quantkit.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The largest loss whose exponential is a double. Guessing among all tokens of a vocabulary costs
#: 1/40 of it.
LARGEST_NLL = 709.0


@dataclass(frozen=True)
class Perplexity:
    """`perplexity` is `exp(nll)`; `nll` is in nats per predicted token, and `tokens` counts the
    predictions.

    `text_tokens` tokens of the text were read in `windows` windows of `window` tokens, a window
    every `stride` tokens. With `bos`, each window began with the BOS token; `bos_rule` is the
    reason. `data` names the text; `weights` says how weights were multiplied.
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
    bos_rule: str = ""


def perplexity(
    model: PreTrainedModel,
    tokenizer: Callable[..., Any],
    text: str,
    *,
    data: str = "",
    progress: Progress | None = None,
    **protocol: Any,
) -> Perplexity:
    """Compute the perplexity of `model` on `text`: exp of the mean negative log-likelihood, losses
    in float32.

    `protocol` has the options of `windows.cut`. In each window, all tokens but the first are
    predicted; with BOS, the first too. If windows overlap, each after the first counts only its
    last `stride` predictions. Raises as `windows.cut`, and NumericError for logits that are not
    finite.
    """
    pieces = cut([model], tokenizer, text, **protocol)
    total, count = 0.0, 0
    for number, _ in pieces.each(progress, "perplexity"):
        losses = token_losses(pieces.logits(model, number), pieces.targets(number))
        new = losses if number == 0 else losses[-pieces.stride :]
        total += float(new.double().sum())
        count += len(new)
    nll = total / count
    return Perplexity(exponential(nll), nll, count, data=data, **pieces.protocol)


def exponential(nll: float) -> float:
    """Return the perplexity for a mean loss in nats; NumericError for a loss that no language model
    has.
    """
    if not nll < LARGEST_NLL:
        raise NumericError(
            f"the mean loss is {nll:.4g} nats, which is no language model's: its weights are "
            "damaged, or its dtype "
            "overflows"
        )
    return math.exp(nll)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each target `[t]` by the first `t` rows of `logits` `[.., v]`,
    in float32.
    """
    logits, targets = logits[: len(targets)], targets.to(logits.device)
    entropy = torch.nn.functional.cross_entropy
    return torch.cat(
        [entropy(logits[rows].float(), targets[rows], reduction="none") for rows in chunks(logits)]
    )
