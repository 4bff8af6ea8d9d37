"""Kullback-Leibler divergence of a model from a reference: mean with an interval, and tails.

KL divergence separates quantizations of one model whose perplexities differ by no more than noise.
A mean can hide single bad tokens, so the tails are reported too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.memory_limits import free_memory
from quantkit.errors import CheckpointError, Command, Option, Words, about
from quantkit.evaluation.opened import open_checkpoint
from quantkit.evaluation.options import TextOptions
from quantkit.evaluation.perplexity import (
    Protocol,
    Windows,
    chunks,
    cut,
    exponential,
    mean_loss,
    require_one_vocabulary,
    token_losses,
)
from quantkit.inference.load import load_for_evaluation
from quantkit.inference.swap_linears import describe_weights
from quantkit.models.weights import device_of
from quantkit.names import MOST_TOKENS, Json
from quantkit.pipeline.publish import Measure
from quantkit.progress import QUIET, Progress
from quantkit.recipes.options import LoadOptions, RunOptions
from quantkit.text.tokenizer import token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Nats of divergence above which a token counts in `kld_above`.
FAR = 0.1
#: Resamples of the windows for an interval, and the share of resamples inside it.
RESAMPLES, CONFIDENCE = 1000, 0.95

#: A way out where a comparison before publishing cannot be made.
LATER = Words(
    "leave",
    Option("eval"),
    "out, and measure the output with",
    Command("eval ppl"),
    "and",
    Command("eval kld"),
)


@dataclass(frozen=True)
class TokenValues:
    """A model's values at each position of each window, on the CPU: a tensor for each window.

    `kl` `[window]` is the divergence from the reference in nats, float32; `same` `[window]` is True
    where the reference prefers the same token. `losses` and `reference_losses` `[t]` are those of
    each prediction, float32 in nats.
    """

    kl: Sequence[Tensor]
    same: Sequence[Tensor]
    losses: Sequence[Tensor]
    reference_losses: Sequence[Tensor]

    def figures(self) -> Json:
        """Summarize the divergence by the fields of `Figures`."""
        values = torch.cat([*self.kl]).double().numpy()
        means = np.array([float(window.double().mean()) for window in self.kl])
        low, high = interval(means) or (None, None)
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
class Divergence(Protocol, Figures):
    """A model's figures over `tokens` positions. The other fields are as in `Perplexity`."""


def evaluate(
    checkpoint: str | Path,
    against: str | Path,
    asked: TextOptions,
    load: LoadOptions,
    progress: Progress,
) -> Divergence:
    """Measure the divergence of a checkpoint from the model `against`, of which the revision is."""
    ours = open_checkpoint(checkpoint, replace(load, revision=None))
    theirs = open_checkpoint(against, load)
    text, what = theirs.text(asked.data)
    reference = theirs.load(progress)  # first, so that weights decoded once leave memory for it
    model = ours.load(progress)
    return kld(
        model, reference, theirs.tokenizer, text, data=what, progress=progress, **asked.protocol
    )


def measurement(data: str, model: str | Path, run: RunOptions) -> Measure:
    """Prepare the comparison of a model with an output of a run.

    It takes the first windows of the text, at most `MOST_TOKENS` tokens together. Its function `of`
    the output returns the perplexities `before` and `after`, the fields of `Figures`, and their
    protocol. CheckpointError, before any work, if the text cannot be read or is too short, or the
    memory does not hold both models.
    """
    load = LoadOptions(
        device=run.device, revision=run.revision, trust_remote_code=run.trust_remote_code
    )
    opened = open_checkpoint(model, load, dequantize=True)
    text, what = opened.text(data, "eval")
    length = len(token_ids(opened.tokenizer, text, special=False, at_most=MOST_TOKENS))
    if length < 2:
        raise CheckpointError(
            Words(f"has {length} tokens, too few for", Option("eval")),
            "give a longer text",
            subject=data,
        )
    _require_memory(opened.src, run.device)

    def measure(made: Checkpoint) -> Json:
        progress = run.progress
        try:
            with about(Option("eval")):
                reference = open_checkpoint(model, load, dequantize=True).load(progress)
                ours = load_for_evaluation(made, progress=progress, **vars(load))
                pieces = cut([reference, ours], opened.tokenizer, text, tokens=MOST_TOKENS)
                found = token_values(reference, ours, pieces, progress)
                return {
                    "before": exponential(mean_loss(found.reference_losses)),
                    "after": exponential(mean_loss(found.losses)),
                    **found.figures(),
                    "data": what,
                    **pieces.protocol,
                    "tokens": sum(map(len, found.losses)),
                    "weights": describe_weights(ours),
                }
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise CheckpointError(
                "out of memory",
                Words("continue with", Option("resume", True), ",", LATER),
                subject=Option("eval"),
            ) from error

    return Measure(measure, length)


def _require_memory(src: Checkpoint, device: str) -> None:
    """Refuse a comparison that the memory does not hold: the source in float32, and the packed
    output.
    """
    needed = sum(4 * prod(src.shape(name)) for name in src.names()) + src.source_bytes // 2
    place = device_of(device)
    free = torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else free_memory()
    if free is not None and needed > free:
        raise CheckpointError(
            Words(
                Option("eval"),
                f"needs about {needed / 1e9:.1f} GB on {place.type}, {free / 1e9:.1f} are free",
            ),
            LATER,
            subject=src.path,
        )


def kld(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    tokenizer: Callable[..., Any],
    text: str,
    *,
    data: str = "",
    progress: Progress = QUIET,
    **protocol: Any,
) -> Divergence:
    """Compare the next-token distributions of a model with a reference's at every position of every
    window.

    `protocol` has the options of `cut`. Both models are in memory, and the logits of one
    window at a time. If windows overlap, a position counts as often as it occurs, and intervals are
    too narrow. Raises as `perplexity`, and CheckpointError if the vocabularies differ.
    """
    pieces = cut([reference, model], tokenizer, text, **protocol)
    found = token_values(reference, model, pieces, progress)
    return Divergence(
        **found.figures(),
        **pieces.protocol,
        tokens=sum(map(len, found.kl)),
        data=data,
        weights=describe_weights(model),
    )


def token_values(
    reference: PreTrainedModel,
    model: PreTrainedModel,
    pieces: Windows,
    progress: Progress = QUIET,
) -> TokenValues:
    """Run the reference and the model on every window.

    Exponentials and products are in float32, sums over the vocabulary in float64.
    """
    found = []
    for number in progress.bar(range(len(pieces.parts)), "divergence"):
        both, targets = (
            [pieces.logits(m, number) for m in (reference, model)],
            pieces.targets(number),
        )
        losses = (token_losses(logits, targets).cpu() for logits in both[::-1])
        found.append((*_divergences(*both), *losses))
    return TokenValues(*zip(*found, strict=True))


def _divergences(theirs: Tensor, ours: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(theirs || ours) and whether both prefer the same token, for each row of two logits
    `[t, v]`.
    """
    require_one_vocabulary(ours.shape[-1], theirs.shape[-1])
    kl, same = [], []
    for rows in chunks(theirs):
        p, q = theirs[rows].to(ours.device).float(), ours[rows].float()
        same.append(p.argmax(-1) == q.argmax(-1))
        weights, total, norm = _exponentials(p)
        shift = norm - _exponentials(q)[2]
        kl.append(((p - q).mul_(weights).sum(-1, dtype=torch.float64) / total - shift).float())
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
