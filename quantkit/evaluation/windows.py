"""Evaluation windows: equal pieces of a tokenized text, and the logits of a model on each.

The text is tokenized as one string without special tokens. A remainder shorter than a window is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, NumericError, Option, RecipeError, Words
from quantkit.progress import Progress
from quantkit.text.tokenizer import check_tokens, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Published perplexities have windows of 2048 tokens, or the model's longest context if that is shorter.
LONGEST_WINDOW = 2048
#: Positions whose logits are processed at a time; bounds the memory for a large vocabulary.
ROWS = 256


def tokenize(
    model: PreTrainedModel, tokenizer: Callable[..., Any], text: str, window: int, stride: int, bos: bool
) -> tuple[Tensor, Tensor]:
    """Tokenize a text to int64 `[t]`, and return it with the prefix of each window: the BOS token or nothing.

    CheckpointError if the text is shorter than a window or the tokenizer is not the model's; RecipeError for a window
    that the model cannot take, and for `bos` without a BOS token.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    if window < 2 or not 1 <= stride <= window:
        raise RecipeError(
            f"window {window}, stride {stride}", "use a window of 2 or more and a stride of 1 to the window"
        )
    if window + bos > positions:
        what = f"window {window}{' and BOS' if bos else ''}"
        raise RecipeError(
            f"the model has {positions} positions",
            Words("use", Option("window", positions - bos), "or less"),
            subject=what,
        )
    first: int | None = getattr(tokenizer, "bos_token_id", None)
    if bos and first is None:
        raise RecipeError("the tokenizer has no BOS token", "leave the BOS option out")
    tokens = token_ids(tokenizer, text, special=False)
    if len(tokens) < window:
        raise CheckpointError(
            f"the text has {len(tokens)} tokens, less than one window of {window}",
            Words("use", Option("window", max(2, len(tokens))), "or a longer text"),
        )
    rows = model.get_input_embeddings().get_parameter("weight").shape[0]
    check_tokens(max(int(tokens.max()), (first or 0) if bos else 0), rows)
    return tokens, torch.tensor([first] if bos else [], dtype=torch.int64)


def default_window(model: PreTrainedModel) -> int:
    """Return the model's longest context in tokens, at most 2048."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(positions or LONGEST_WINDOW, LONGEST_WINDOW)


def windows(
    tokens: Tensor, window: int, stride: int, progress: Progress | None, label: str, most: int | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield the number and the tokens `[window]` of each window, or of the first `most`."""
    starts = range(0, len(tokens) - window + 1, stride)[:most]
    for number, start in enumerate((progress or Progress(quiet=True)).bar(starts, label, len(starts))):
        yield number, tokens[start : start + window]


def window_logits(model: PreTrainedModel, tokens: Tensor, prefix: Tensor, number: int) -> Tensor:
    """Compute the logits `[window, v]` after each token; with BOS, the first ones follow BOS alone.

    NumericError, naming the window, for logits that are not finite.
    """
    with torch.inference_mode():
        ids = torch.cat([prefix, tokens])[None].to(model.device)
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, : len(tokens) if len(prefix) else None]
    if not bool(torch.isfinite(logits).all()):
        raise NumericError(f"window {number} gives logits that are NaN or infinite: the weights are damaged")
    return logits
