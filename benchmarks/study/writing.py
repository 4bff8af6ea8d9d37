"""Texts that a model writes after many prompts, several at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from quantkit.text.tokenizer import continuation, continued, ends_of


def records(path: Path, limit: int | None) -> list[dict[str, Any]]:
    """Read the first records of a file, one a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][:limit]


def write(
    model: Any,
    words: Any,
    prompts: Sequence[str],
    *,
    new: int,
    batch: int,
    stops: Sequence[str] = (),
    special: bool = True,
) -> list[str]:
    """Write the likeliest tokens after each prompt, at most `new`, up to the first of the texts in `stops`.

    An encoder-decoder reads the prompt instead. Prompts are cut at their end to the model's positions.
    """
    words.pad_token = words.pad_token or words.eos_token
    reads = bool(model.config.is_encoder_decoder)
    words = words if reads else continued(words)
    words.padding_side = "right" if reads else "left"
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    positions = getattr(model.config, "max_encoder_position_embeddings", positions)
    longest = None if positions is None else positions if reads else positions - new
    options = {"do_sample": False, "num_beams": 1, "max_new_tokens": new, "pad_token_id": words.pad_token_id}
    ends = ends_of(model.generation_config, words)
    options |= {"eos_token_id": ends or None, "temperature": None, "top_p": None, "top_k": None}
    if stops:
        options |= {"stop_strings": list(stops), "tokenizer": words}
    found: list[str] = []
    for start in range(0, len(prompts), batch):
        part = [*prompts[start : start + batch]]
        asked = words(
            part, return_tensors="pt", padding=True, truncation=longest is not None, max_length=longest,
            add_special_tokens=special, return_token_type_ids=False,
        )  # fmt: skip
        with torch.inference_mode():
            tokens = model.generate(**asked.to(model.device), **options)
        begun = 1 if reads else asked["input_ids"].shape[1]
        for row in tokens.tolist():
            text = continuation(words, [] if reads else row[:begun], row[begun:], ends)
            found.append(text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))])
    return found
