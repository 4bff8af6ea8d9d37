"""A model before and after it was quantized or pruned, measured on one text before the output is
published.

The protocol is bounded: the first windows of the text, at most `MOST_TOKENS` tokens together, no
overlap, BOS by the tokenizer's rule.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.origin import resolve
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.memory_limits import free_memory
from quantkit.errors import CheckpointError, Command, Option, Words, about
from quantkit.evaluation.divergence import token_values
from quantkit.evaluation.opened import require_running_text
from quantkit.evaluation.perplexity import exponential
from quantkit.evaluation.windows import cut
from quantkit.inference.load import load_for_evaluation
from quantkit.inference.swap_linears import describe_weights
from quantkit.models.devices import device_of
from quantkit.names import MOST_TOKENS
from quantkit.recipes.options import RunOptions
from quantkit.text.sources import load_evaluation_text
from quantkit.text.tokenizer import load_tokenizer, token_ids

LATER = Words(
    "leave",
    Option("eval"),
    "out, and measure the output with",
    Command("eval ppl"),
    "and",
    Command("eval kld"),
)


def measurement(
    data: str, model: str | Path, run: RunOptions
) -> Callable[[Checkpoint], dict[str, Any]]:
    """Prepare the comparison of a model with an output of a run: returns a function of the output.

    The function returns the perplexities `before` and `after`, the fields of `divergence.Figures`,
    and their protocol. CheckpointError, before any work, if the text cannot be read or is too
    short, or the memory does not hold both models.
    """
    source, device, trust_remote_code = (
        resolve(str(model), run.revision),
        run.device,
        run.trust_remote_code,
    )
    src = Checkpoint(source, trust_remote_code, dequantize=True)
    require_running_text(src, trust_remote_code)
    text, what = load_evaluation_text(data, "eval")
    words = load_tokenizer(src.path)
    length = len(token_ids(words, text, special=False))
    if length < 2:
        raise CheckpointError(
            Words(f"has {length} tokens, too few for", Option("eval")),
            "give a longer text",
            subject=data,
        )
    _require_memory(src, device)

    def measure(made: Checkpoint) -> dict[str, Any]:
        try:
            with about(Option("eval")):
                return compare(Checkpoint(source, trust_remote_code, dequantize=True), made)
        except (MemoryError, torch.OutOfMemoryError) as error:
            ways = Words("continue with", Option("resume", True), ",", LATER)
            raise CheckpointError("out of memory", ways, subject=Option("eval")) from error

    def compare(before: Checkpoint, after: Checkpoint) -> dict[str, Any]:
        options: Any = {
            "device": device,
            "trust_remote_code": trust_remote_code,
            "progress": run.progress,
        }
        reference, ours = (
            load_for_evaluation(before, **options),
            load_for_evaluation(after, **options),
        )
        pieces = cut([reference, ours], words, text, tokens=MOST_TOKENS)
        first, then = token_values(reference, [ours], pieces, run.progress)
        return {
            "before": exponential(first.nll()),
            "after": exponential(then.nll()),
            **then.figures(),
            "data": what,
            **pieces.protocol,
            "tokens": sum(map(len, then.losses)),
            "weights": describe_weights(ours),
        }

    return measure


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
