"""Calibration sequences, drawn from the documents of a source by a seeded generator.

Documents stay apart, each at its own length and unpadded (ALGORITHMS 2). The model then sees its calibration
text as it will see real prompts, and no padding leaks into a Hessian. A source that holds too little is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, RecipeError
from quantkit.models.text_sources import Documents, load_documents
from quantkit.models.tokenizer import token_ids


@dataclass(frozen=True)
class Calibration:
    """Hold calibration sequences, int64 `[t]` each, and the facts about them for report and journal."""

    sequences: list[Tensor]
    facts: dict[str, Any]


def draw_calibration(
    source: str,
    tokenizer: Callable[..., Any],
    *,
    samples: int,
    max_length: int,
    seed: int,
    lengths: Literal["own", "fixed"] = "own",
) -> Calibration:
    """Draw `samples` token sequences of a source by `seed` (ALGORITHMS 2).

    `own`: documents in shuffled order, each at its own length. A longer one is cut to a window of `max_length` tokens
    at a random offset; documents of fewer than 2 tokens are skipped. `fixed`: all documents are concatenated and cut
    into windows of `max_length` tokens, of which `samples` are drawn. CheckpointError if the source holds too little.
    """
    if samples < 1 or max_length < 2:
        raise RecipeError(f"{samples} samples of at most {max_length} tokens: use at least 1 sample and 2 tokens")
    found = load_documents(source)
    generator = torch.Generator().manual_seed(seed)
    draw = _own if lengths == "own" else _fixed
    sequences, facts = draw(found, tokenizer, samples, max_length, generator)
    seen = hashlib.sha256()
    for sequence in sequences:
        seen.update(len(sequence).to_bytes(8, "little") + sequence.numpy().tobytes())
    return Calibration(
        sequences,
        {
            "source": source,
            "rule": found.rule,
            "lengths": lengths,
            "seed": seed,
            "max_length": max_length,
            "sequences": len(sequences),
            "tokens": sum(len(s) for s in sequences),
            **facts,
            "sha256": seen.hexdigest(),
        },
    )


def _own(
    found: Documents, tokenizer: Callable[..., Any], samples: int, max_length: int, generator: torch.Generator
) -> tuple[list[Tensor], dict[str, Any]]:
    sequences: list[Tensor] = []
    cut = skipped = 0
    for index in torch.randperm(len(found.texts), generator=generator).tolist():
        tokens = token_ids(tokenizer, found.texts[index], special=True)
        if len(tokens) < 2:
            skipped += 1
            continue
        if len(tokens) > max_length:
            offset = int(torch.randint(len(tokens) - max_length + 1, (), generator=generator))
            tokens = tokens[offset : offset + max_length].clone()
            cut += 1
        sequences.append(tokens)
        if len(sequences) == samples:
            return sequences, {"documents": len(found.texts), "cut": cut, "skipped": skipped}
    raise CheckpointError(
        f"{found.source}: holds {len(sequences)} usable documents, {samples} were asked for ({found.rule}): "
        f"use --samples {len(sequences) or 1}, a longer --calib file, or --lengths fixed"
    )


def _fixed(
    found: Documents, tokenizer: Callable[..., Any], samples: int, max_length: int, generator: torch.Generator
) -> tuple[list[Tensor], dict[str, Any]]:
    stream = torch.cat([token_ids(tokenizer, text, special=True) for text in found.texts])
    windows = len(stream) // max_length
    if windows < samples:
        raise CheckpointError(
            f"{found.source}: holds {len(stream)} tokens, {samples} windows of {max_length} need "
            f"{samples * max_length}: use --samples {windows or 1}, a smaller --max-length, or a longer --calib file"
        )
    chosen = torch.randperm(windows, generator=generator)[:samples].tolist()
    sequences = [stream[i * max_length : (i + 1) * max_length].clone() for i in chosen]
    return sequences, {"documents": len(found.texts), "cut": 0, "skipped": 0}
