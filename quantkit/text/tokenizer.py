"""Load a model's tokenizer, tokenize text, and check that both belong together."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, RecipeError, reason
from quantkit.io.json_files import AGAIN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


#: Files of tokenizers -> the package that reads them without a tokenizer.json.
PACKAGES = {
    "*.model": "sentencepiece",
    "*.spm": "sentencepiece",
    "*.tiktoken": "tiktoken",
    "tekken.json": "mistral-common",
}


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
        require_readable_tokenizer(folder)
        if package := _missing_package(folder):
            raise CheckpointError(
                f"the tokenizer needs the Python package {package}, which is not installed",
                f"pip install {package}",
                subject=folder,
            ) from error
        raise CheckpointError(
            f"has no tokenizer that transformers can read ({reason(error)})",
            "put the model's own files there",
            subject=folder,
        ) from error


def require_readable_tokenizer(folder: Path) -> None:
    """Raise CheckpointError for a tokenizer.json, or another file of a tokenizer, that no program
    can parse.
    """
    from tokenizers import Tokenizer

    for path in sorted(folder.glob("*token*.json")):
        try:
            if path.name == "tokenizer.json":
                Tokenizer.from_file(str(path))
            else:
                json.loads(path.read_text(encoding="utf-8"))
        except Exception as error:  # the package raises Exception itself
            raise CheckpointError(
                f"no file of a tokenizer ({reason(error)})", AGAIN, subject=path
            ) from error


def _missing_package(folder: Path) -> str | None:
    """Return the package that is missing for the only tokenizer of a folder, None if there is
    another or all are installed.
    """
    if (folder / "tokenizer.json").is_file():
        return None
    needed = [package for pattern, package in PACKAGES.items() if any(folder.glob(pattern))]
    return next(
        (package for package in needed if find_spec(package.replace("-", "_")) is None), None
    )


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
