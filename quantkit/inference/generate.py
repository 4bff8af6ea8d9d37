"""Text that a checkpoint writes after a prompt."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint, resolve
from quantkit.errors import RecipeError
from quantkit.inference.load import load_for_evaluation
from quantkit.inference.swap_linears import describe_weights
from quantkit.models.tokenizer import check_tokens, load_tokenizer, token_ids
from quantkit.progress import Progress


@dataclass(frozen=True)
class Generated:
    """The `text` that follows `prompt`: `tokens` new ones in `seconds`, the compilation of kernels included.

    `weights` says how the model's weights were multiplied.
    """

    prompt: str
    text: str
    tokens: int
    seconds: float
    weights: str


def generate(
    checkpoint: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Generated:
    """Continue a prompt greedily with at most `max_new_tokens` tokens.

    RecipeError if the prompt has no tokens and the tokenizer no BOS token, or if the model has too few positions.
    """
    src = Checkpoint(resolve(str(checkpoint), revision), trust_remote_code)
    tokenizer = load_tokenizer(src.path)
    ids = _prompt_tokens(tokenizer, prompt)
    model = load_for_evaluation(src, device=device, trust_remote_code=trust_remote_code, progress=progress)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and len(ids) + max_new_tokens > positions:
        raise RecipeError(
            f"{len(ids)} tokens of the prompt and {max_new_tokens} new ones are more than the model's {positions} "
            f"positions: use --max-new-tokens {max(1, positions - len(ids))} or a shorter prompt"
        )
    check_tokens(int(ids.max()), model.get_input_embeddings().get_parameter("weight").shape[0])
    batch: Any = ids[None].to(model.device)
    greedy: Any = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "use_cache": True}
    start = time.perf_counter()
    with torch.inference_mode():
        output: Any = model.generate(  # type: ignore[operator]
            batch, attention_mask=torch.ones_like(batch), max_new_tokens=max_new_tokens, **greedy
        )
    new = output[0, len(ids) :].tolist()
    text = str(tokenizer.decode(new, skip_special_tokens=True))
    return Generated(prompt, text, len(new), time.perf_counter() - start, describe_weights(model))


def _prompt_tokens(tokenizer: Any, prompt: str) -> Tensor:
    """Tokenize a prompt to int64 `[t]`, which is the BOS token if there is no other."""
    ids = token_ids(tokenizer, prompt, special=True) if prompt else torch.tensor([], dtype=torch.int64)
    if len(ids):
        return ids
    if tokenizer.bos_token_id is None:
        raise RecipeError("the prompt has no tokens, and the tokenizer no BOS token to begin with: give a prompt")
    return torch.tensor([tokenizer.bos_token_id])
