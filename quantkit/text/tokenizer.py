"""Load a model's tokenizer, tokenize text, and check that both belong together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, RecipeError, reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder; CheckpointError if none can be read without running
    its code.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (
        Exception
    ) as error:  # each tokenizer class fails in its own way on files that are missing or damaged
        raise CheckpointError(
            f"has no tokenizer that transformers can read ({reason(error)})",
            "put the model's own files there",
            subject=folder,
        ) from error


def token_ids(tokenizer: Callable[..., Any], text: str, *, special: bool) -> Tensor:
    """Return the tokens of a text, int64 `[t]`, with or without the special tokens that the
    tokenizer adds.

    RecipeError for bytes of a command line or a pipe that are not UTF-8: Python reads them as lone
    surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RecipeError(
            f"the text is not UTF-8 (character {error.start})", "convert it first"
        ) from error
    tokens = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return torch.tensor(tokens, dtype=torch.int64)


def adds_bos(tokenizer: Callable[..., Any]) -> bool:
    """Return True if the tokenizer puts its BOS token in front of a text by itself, as Gemma's and
    Llama's do.
    """
    bos: int | None = getattr(tokenizer, "bos_token_id", None)
    plain, ids = (token_ids(tokenizer, "a", special=special).tolist() for special in (False, True))
    return bos is not None and len(ids) > len(plain) and ids[0] == bos


def check_tokens(largest: int, known: int) -> None:
    """Raise CheckpointError if token `largest` is beyond the `known` rows of the model's
    embeddings.
    """
    if largest >= known:
        raise CheckpointError(
            f"the tokenizer gives token {largest}, the model knows {known}: they do not belong "
            "together, "
            "use the tokenizer files of this model"
        )
