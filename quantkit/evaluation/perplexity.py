"""Perplexity over the windows of a text, with the protocol that it depends on.

The text is tokenized as one string without special tokens, and cut into equal windows. A remainder
shorter than a window is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, NumericError, Option, RecipeError, Words
from quantkit.evaluation.opened import open_checkpoint
from quantkit.evaluation.options import TextOptions
from quantkit.inference.swap_linears import describe_weights
from quantkit.progress import QUIET, Progress
from quantkit.recipes.options import LoadOptions
from quantkit.text.tokenizer import affixes, check_tokens, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Published perplexities have windows of 2048 tokens, or the model's longest context if that is
#: shorter.
LONGEST_WINDOW = 2048
#: Logits that are processed at a time; bounds the memory for a large vocabulary.
CHUNK = 2**24
#: The largest loss whose exponential is a double. Guessing among all tokens of a vocabulary costs
#: 1/40 of it.
LARGEST_NLL = 709.0


@dataclass(frozen=True)
class Windows:
    """The windows of a text: int64 `parts` `[n, window]`, one every `stride` of the `text_tokens`
    that are read.

    `prefix`: the BOS token in front of each window, or what else the tokenizer puts there.
    `bos_rule` says why.
    """

    parts: Tensor
    prefix: Tensor
    stride: int
    bos_rule: str
    text_tokens: int

    @property
    def bos(self) -> bool:
        return len(self.prefix) > 0

    @property
    def protocol(self) -> dict[str, Any]:
        """Facts that accompany every figure."""
        count, window = self.parts.shape
        return {
            "windows": count,
            "window": window,
            "stride": self.stride,
            "bos": self.bos,
            "bos_rule": self.bos_rule,
            "text_tokens": self.text_tokens,
        }

    def logits(self, model: PreTrainedModel, number: int) -> Tensor:
        """Compute the logits `[window, v]` after each token of a window. With BOS, the first logits
        follow only BOS.

        NumericError, naming the window, for logits that are not finite.
        """
        tokens = self.parts[number]
        with torch.inference_mode():
            ids = torch.cat([self.prefix, tokens])[None].to(model.device)
            first = max(0, len(self.prefix) - 1)
            logits: Tensor = model(input_ids=ids, use_cache=False).logits[
                0, first : first + len(tokens)
            ]
        if not all(bool(torch.isfinite(logits[rows]).all()) for rows in chunks(logits)):
            raise NumericError(
                f"window {number} gives logits that are NaN or infinite: the weights are damaged"
            )
        return logits

    def targets(self, number: int) -> Tensor:
        """Return the predicted tokens of a window: all except the first, or with BOS all."""
        return self.parts[number] if self.bos else self.parts[number, 1:]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Facts that accompany every figure on a text; `Perplexity` describes them."""

    tokens: int
    windows: int
    window: int
    stride: int
    bos: bool
    data: str
    text_tokens: int
    weights: str
    bos_rule: str


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The mean loss `nll` in nats per predicted token, and its exponential."""

    perplexity: float
    nll: float


@dataclass(frozen=True, kw_only=True)
class Perplexity(Protocol, Loss):
    """`perplexity` is `exp(nll)`; `nll` is in nats per predicted token, and `tokens` counts the
    predictions.

    `text_tokens` tokens of the text were read in `windows` windows of `window` tokens, a window
    every `stride` tokens. With `bos`, each window began with the BOS token; `bos_rule` is the
    reason. `data` names the text; `weights` says how weights were multiplied.
    """


def evaluate(
    checkpoint: str | Path, asked: TextOptions, load: LoadOptions, progress: Progress
) -> Perplexity:
    """Measure the perplexity of a checkpoint on a text."""
    opened = open_checkpoint(checkpoint, load)
    text, what = opened.text(asked.data)
    model = opened.load(progress)
    return perplexity(model, opened.tokenizer, text, data=what, progress=progress, **asked.protocol)


def perplexity(
    model: PreTrainedModel,
    tokenizer: Callable[..., Any],
    text: str,
    *,
    data: str = "",
    progress: Progress = QUIET,
    **protocol: Any,
) -> Perplexity:
    """Compute the perplexity of `model` on `text`: exp of the mean negative log-likelihood, losses
    in float32.

    `protocol` has the options of `cut`. In each window, all tokens but the first are
    predicted; with BOS, the first too. If windows overlap, each after the first counts only its
    last `stride` predictions. Raises as `cut`, and NumericError for logits that are not
    finite.
    """
    pieces = cut([model], tokenizer, text, **protocol)
    first, *others = window_losses(model, pieces, progress)
    losses = [first, *(each[-pieces.stride :] for each in others)]
    nll, facts = mean_loss(losses), {**pieces.protocol, "tokens": sum(map(len, losses))}
    return Perplexity(
        perplexity=exponential(nll),
        nll=nll,
        data=data,
        weights=describe_weights(model),
        **facts,
    )


def window_losses(
    model: PreTrainedModel, pieces: Windows, progress: Progress = QUIET
) -> list[Tensor]:
    """Compute the loss of each prediction of each window, float32 `[t]` in nats, on the CPU."""
    return [
        token_losses(pieces.logits(model, number), pieces.targets(number)).cpu()
        for number in progress.bar(range(len(pieces.parts)), "perplexity")
    ]


def mean_loss(losses: Sequence[Tensor]) -> float:
    """Average the losses of all windows."""
    return float(torch.cat([*losses]).double().mean())


def cut(
    models: Sequence[PreTrainedModel],
    tokenizer: Callable[..., Any],
    text: str,
    *,
    window: int | None = None,
    stride: int | None = None,
    bos: bool | None = None,
    tokens: int | None = None,
) -> Windows:
    """Tokenize a text and cut it into windows that all models can take.

    By default a window is the longest context, at most 2048 tokens and no longer than the text, the
    stride is the window, and BOS is in front if the tokenizer adds it to a text by itself. Only the
    first `tokens` tokens are read. CheckpointError if the text is shorter than a window, or the
    tokenizer does not belong to the models. RecipeError if a window is too long for a model, and
    for `bos` without a BOS token.
    """
    first: int | None = getattr(tokenizer, "bos_token_id", None)
    if bos and first is None:
        raise RecipeError("the tokenizer has no BOS token", "leave the BOS option out")
    rule = "as asked" if bos is not None else "the tokenizer's rule"
    front = affixes(tokenizer)[0] if bos is None else [first or 0] * bos
    positions = min(
        getattr(m.config.get_text_config(), "max_position_embeddings", None) or math.inf
        for m in models
    )
    most = None if tokens is None else tokens + 1  # one more than is read: is the text longer?
    ids = token_ids(tokenizer, text, special=False, at_most=most)
    read = ids[:tokens]
    if window is None:
        window = int(max(2, min(LONGEST_WINDOW, positions - len(front), len(read))))
    stride = window if stride is None else stride
    if window < 2 or not 1 <= stride <= window:
        raise RecipeError(
            f"window {window}, stride {stride}",
            "use a window of 2 or more and a stride of 1 to the window",
        )
    if window + len(front) > positions:
        raise RecipeError(
            f"the model has {positions} positions",
            Words("use", Option("window", int(positions) - len(front)), "or less"),
            subject=f"window {window}{' and BOS' if front else ''}",
        )
    if len(read) < window and len(read) < len(ids):
        raise RecipeError(
            Words(Option("tokens", tokens), f"is less than one window of {window}"),
            Words("use", Option("window", len(read)), "or more tokens"),
        )
    if len(read) < window:
        smaller = Words("use", Option("window", len(read)), "or") if len(read) > 1 else "use"
        raise CheckpointError(
            f"the text has {len(read)} tokens, less than one window of {window}",
            Words(smaller, "a longer text"),
        )
    tables: list[Any] = [model.get_input_embeddings() for model in models]
    rows = [table.weight.shape[0] for table in tables]
    require_one_vocabulary(rows[-1], rows[0])
    check_tokens(max(int(read.max()), *front, 0), rows[0])
    return Windows(
        read.unfold(0, window, stride),
        torch.tensor(front, dtype=torch.int64),
        stride,
        rule,
        len(read),
    )


def require_one_vocabulary(ours: int, theirs: int) -> None:
    """Raise CheckpointError if a model and its reference know different numbers of tokens."""
    if ours != theirs:
        raise CheckpointError(
            f"the models have vocabularies of {ours} and {theirs} tokens",
            "compare a model with the one that it was made from",
        )


def chunks(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the rows of `[t, v]` whose working copies fit into little memory."""
    rows = max(1, CHUNK // logits.shape[-1])
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


def exponential(nll: float) -> float:
    """Return the perplexity for a mean loss in nats; NumericError for a loss that no language model
    has.
    """
    if not nll < LARGEST_NLL:
        raise NumericError(
            f"the mean loss is {nll:.4g} nats, which is no language model's: its weights are "
            "damaged, or its dtype overflows"
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
