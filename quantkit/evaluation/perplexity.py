"""How good a model is, by numbers that can be held against published ones: perplexity, and divergence from another.

A text is tokenised as one string without special tokens and cut into windows; the short rest at the end is dropped. The
protocol (window, stride, BOS, tokens, text) decides a perplexity as much as the model does (ALGORITHMS 15), so it
travels with the number. Small differences between quantizations of one model are judged by the Kullback-Leibler
divergence of their next-token distributions, which separates them by factors where perplexity moves by noise
(ALGORITHMS 14).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, NumericError, RecipeError
from quantkit.models.tokenizer import check_tokens, token_ids
from quantkit.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Positions whose distributions are worked on at a time: bounds the memory that a large vocabulary takes.
ROWS = 256
#: `exp` of more is no double; guessing among all tokens of any vocabulary costs a fortieth of it.
LARGEST_NLL = 709.0


@dataclass(frozen=True)
class Perplexity:
    """`exp(nll)` and how it came about: `nll` is in nats per predicted token, `tokens` counts those.

    `text_tokens` is the whole text, of which `windows` windows of `window` tokens were used, `stride` apart; with `bos`
    each had the BOS token put in front. `data` says which text, `weights` how the model's are multiplied.
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


@dataclass(frozen=True)
class Divergence:
    """Mean Kullback-Leibler divergence KL(reference || model) in nats over `tokens` positions, and how it came about.

    `top1` is the share of positions at which both models prefer the same token.
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
) -> Perplexity:
    """Return the perplexity of `model` on `text`: exp of the mean negative log-likelihood, losses in float32.

    Windows of `window` tokens start every `stride` (default `window`) tokens. All tokens of a window but its first are
    predicted, with `bos` the first too; windows that overlap count only their last `stride` predictions, after the
    first window. CheckpointError when the text is shorter than a window or the tokenizer is not the model's,
    RecipeError for a window that the model cannot take, NumericError for logits that are not finite.
    """
    stride = stride or window
    tokens, start = _prepare(model, tokenizer, text, window, stride, bos)
    total, count, windows = 0.0, 0, 0
    for number, part in _windows(tokens, window, stride, progress, "perplexity"):
        logits = _logits(model, part, start, number)
        targets = part if bos else part[1:]
        logits = logits[: len(targets)]
        new = len(targets) if number == 0 else min(stride, len(targets))
        total += _nll(logits[-new:], targets[-new:].to(logits.device))
        count += new
        windows += 1
    nll = total / count
    if not nll < LARGEST_NLL:
        raise NumericError(
            f"the mean loss is {nll:.4g} nats, which is no language model's: its weights are damaged, or its dtype "
            "overflows"
        )
    return Perplexity(math.exp(nll), nll, count, windows, window, stride, bos, data, len(tokens))


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
) -> Divergence:
    """Return KL(reference || model) over the next-token distributions at every position of every window, in float64.

    Both models are in memory, the logits of one window at a time. Windows and errors as for `perplexity`; with
    overlapping windows positions count as often as they occur. CheckpointError also if the vocabularies differ.
    """
    stride = stride or window
    tokens, start = _prepare(model, tokenizer, text, window, stride, bos)
    _prepare(reference, tokenizer, text, window, stride, bos)
    total, agree, count, windows = 0.0, 0, 0, 0
    for number, part in _windows(tokens, window, stride, progress, "divergence"):
        ours = _logits(model, part, start, number)
        theirs = _logits(reference, part, start, number).to(ours.device)
        if ours.shape != theirs.shape:
            raise CheckpointError(
                f"the models have vocabularies of {ours.shape[-1]} and {theirs.shape[-1]} tokens: compare a model with "
                "the one that it was made from"
            )
        for p, q in zip(theirs.split(ROWS), ours.split(ROWS), strict=True):
            p, q = (x.double().log_softmax(-1) for x in (p, q))
            total += float((p.exp() * (p - q)).sum())
            agree += int((p.argmax(-1) == q.argmax(-1)).sum())
        count += len(ours)
        windows += 1
    return Divergence(total / count, agree / count, count, windows, window, stride, bos, data, len(tokens))


def _prepare(
    model: PreTrainedModel, tokenizer: Callable[..., Any], text: str, window: int, stride: int, bos: bool
) -> tuple[Tensor, Tensor]:
    """Return the tokens of a text, int64 `[t]`, and what each window begins with: the BOS token or nothing."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    if window < 2 or not 1 <= stride <= window:
        raise RecipeError(
            f"window {window}, stride {stride}: use a window of 2 or more and a stride of 1 to the window"
        )
    if window + bos > positions:
        what = f"window {window}{' and BOS' if bos else ''}"
        raise RecipeError(f"{what}: the model has {positions} positions, use --window {positions - bos} or less")
    first: int | None = getattr(tokenizer, "bos_token_id", None)
    if bos and first is None:
        raise RecipeError("the tokenizer has no BOS token: leave the BOS option out")
    tokens = token_ids(tokenizer, text, special=False)
    if len(tokens) < window:
        raise CheckpointError(
            f"the text has {len(tokens)} tokens, less than one window of {window}: use --window {max(2, len(tokens))} "
            "or a longer text"
        )
    rows = model.get_input_embeddings().get_parameter("weight").shape[0]
    check_tokens(max(int(tokens.max()), (first or 0) if bos else 0), rows)
    return tokens, torch.tensor([first] if bos else [], dtype=torch.int64)


def _windows(
    tokens: Tensor, window: int, stride: int, progress: Progress | None, label: str
) -> Iterator[tuple[int, Tensor]]:
    starts = range(0, len(tokens) - window + 1, stride)
    for number, start in enumerate((progress or Progress(quiet=True)).bar(starts, label, len(starts))):
        yield number, tokens[start : start + window]


def _logits(model: PreTrainedModel, part: Tensor, start: Tensor, number: int) -> Tensor:
    """Return the logits `[window, v]` that follow each token of a window (with BOS, the first follow BOS alone)."""
    with torch.inference_mode():
        ids = torch.cat([start, part])[None].to(model.device)
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, : len(part) if len(start) else None]
    if not bool(torch.isfinite(logits).all()):
        raise NumericError(f"window {number} gives logits that are NaN or infinite: the weights are damaged")
    return logits


def _nll(logits: Tensor, targets: Tensor) -> float:
    """Return the summed negative log-likelihood: float32 losses, added up in float64."""
    losses = [
        torch.nn.functional.cross_entropy(a.float(), b, reduction="none").double().sum()
        for a, b in zip(logits.split(ROWS), targets.split(ROWS), strict=True)
    ]
    return float(torch.stack(losses).sum())
