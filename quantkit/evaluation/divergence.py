"""Kullback-Leibler divergence of a model from a reference: mean with an interval, and tails.

KL divergence separates quantizations of one model whose perplexities differ by no more than noise.
A mean can hide single bad tokens, so the tails are reported too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.evaluation.perplexity import token_losses
from quantkit.evaluation.windows import Windows, chunks, cut
from quantkit.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Nats of divergence above which a token counts in `kld_above`.
FAR = 0.1
#: Resamples of the windows for an interval, and the share of resamples inside it.
RESAMPLES, CONFIDENCE = 1000, 0.95


@dataclass(frozen=True)
class TokenValues:
    """A model's values at each position of each window, on the CPU: a tensor for each window.

    `kl` `[window]` is the divergence from the reference in nats, `losses` `[t]` that of each
    prediction in nats, both float32. `same` `[window]` is True where the reference prefers the same
    token.
    """

    kl: Sequence[Tensor]
    same: Sequence[Tensor]
    losses: Sequence[Tensor]

    def figures(self) -> dict[str, Any]:
        """Summarize the divergence by the fields of `Figures`."""
        values = torch.cat([*self.kl]).double().numpy()
        low, high = interval(self.means()) or (None, None)
        median, p99, p999 = np.quantile(values, (0.5, 0.99, 0.999)).tolist()
        return {
            "kld": float(values.mean()),
            "top1": float(torch.cat([*self.same]).double().mean()),
            "kld_low": low,
            "kld_high": high,
            "kld_median": median,
            "kld_p99": p99,
            "kld_p999": p999,
            "kld_above": float((values > FAR).mean()),
        }

    def means(self) -> np.ndarray[Any, Any]:
        """Return the mean divergence of each window, float64 `[n]`."""
        return np.array([float(window.double().mean()) for window in self.kl])

    def nll(self) -> float:
        """Return the mean loss over all predictions in nats."""
        return float(torch.cat([*self.losses]).double().mean())


@dataclass(frozen=True, kw_only=True)
class Figures:
    """`kld` is the mean of KL(reference || model) over the tokens, in nats.

    `kld_low` to `kld_high` is its 95 % interval by bootstrap over windows, None for fewer than two.
    `kld_median`, `kld_p99` and `kld_p999` are quantiles over tokens, `kld_above` is the share of
    tokens above 0.1 nat. `top1` is the share of positions at which both models prefer the same
    token.
    """

    kld: float
    top1: float
    kld_low: float | None
    kld_high: float | None
    kld_median: float
    kld_p99: float
    kld_p999: float
    kld_above: float


@dataclass(frozen=True, kw_only=True)
class Divergence(Figures):
    """A model's figures over `tokens` positions. The other fields are as in `Perplexity`."""

    tokens: int
    windows: int
    window: int
    stride: int
    bos: bool
    data: str
    text_tokens: int
    weights: str = ""
    bos_rule: str = ""


def kld(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    tokenizer: Callable[..., Any],
    text: str,
    *,
    data: str = "",
    progress: Progress | None = None,
    **protocol: Any,
) -> Divergence:
    """Compare the next-token distributions of a model with a reference's at every position of every
    window.

    `protocol` has the options of `windows.cut`. Both models are in memory, and the logits of one
    window at a time. If windows overlap, a position counts as often as it occurs, and intervals are
    too narrow. Raises as `perplexity`, and CheckpointError if the vocabularies differ.
    """
    pieces = cut([reference, model], tokenizer, text, **protocol)
    _, ours = token_values(reference, [model], pieces, progress)
    facts = {**ours.figures(), **pieces.protocol, "tokens": sum(map(len, ours.kl))}
    return Divergence(**facts, data=data)


def token_values(
    reference: PreTrainedModel,
    models: Sequence[PreTrainedModel],
    pieces: Windows,
    progress: Progress | None = None,
) -> list[TokenValues]:
    """Run the reference and the models on every window; return the values of the reference, then of
    each model.

    Exponentials and products are in float32, sums over the vocabulary in float64.
    """
    found: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in range(1 + len(models))]
    for number, tokens in pieces.each(progress, "divergence"):
        theirs, targets = pieces.logits(reference, number), pieces.targets(number)
        nothing = torch.zeros(len(tokens))
        found[0].append((nothing, nothing == 0, token_losses(theirs, targets).cpu()))
        for values, model in zip(found[1:], models, strict=True):
            ours = pieces.logits(model, number)
            values.append((*_divergences(theirs, ours), token_losses(ours, targets).cpu()))
    return [TokenValues(*zip(*values, strict=True)) for values in found]


def _divergences(theirs: Tensor, ours: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(theirs || ours) and whether both prefer the same token, for each row of two logits
    `[t, v]`.
    """
    if ours.shape != theirs.shape:
        raise CheckpointError(
            f"the models have vocabularies of {ours.shape[-1]} and {theirs.shape[-1]} tokens",
            "compare a model with the one that it was made from",
        )
    kl, same = [], []
    for rows in chunks(theirs):
        p, q = theirs[rows].to(ours.device).float(), ours[rows].float()
        same.append(p.argmax(-1) == q.argmax(-1))
        weights, total, norm = _exponentials(p)
        apart = norm - _exponentials(q)[2]
        kl.append(((p - q).mul_(weights).sum(-1, dtype=torch.float64) / total - apart).float())
    return torch.cat(kl).cpu(), torch.cat(same).cpu()


def _exponentials(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(logits - max) `[t, v]`, its sums over v, and log(sum(exp(logits))); both `[t]` in
    float64.

    The log_softmax of float32 sums 262,144 terms in float32, and is off by 1e-5.
    """
    largest = logits.amax(-1, keepdim=True)
    found = (logits - largest).exp_()
    total = found.sum(-1, dtype=torch.float64)
    return found, total, largest[:, 0].double() + total.log()


def interval(means: np.ndarray[Any, Any]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of `means` `[n]` by the percentile bootstrap, None for
    fewer than two.

    Tokens within a window depend on each other, so windows are drawn, not tokens. The same draws
    serve every call.
    """
    count = len(means)
    if count < 2:
        return None
    draws = np.random.default_rng(0)
    resampled = [means[draws.integers(count, size=count)].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(resampled, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)).tolist()
    return low, high
