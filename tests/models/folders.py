"""Documents, and forwards of whole models as references."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.models.block_runner import BlockRunner
from quantkit.models.interception import State

LENGTHS = (2, 100, 17)  # 100 exceeds the sliding window of 64 in some families


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(256, (n,), generator=generator) for n in LENGTHS]


def plain(folder: Path) -> Any:
    import transformers

    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()


def _of_one(hidden: Tensor) -> Tensor:
    """Return a batch of one document without that dimension, which is the second one in XLNet."""
    return hidden[:, 0] if hidden.ndim == 3 and hidden.shape[1] == 1 else hidden[0]


def outputs(model: Any, blocks: list[str], tokens: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the output of each block in one forward of the whole model, and the logits."""
    found: list[Tensor] = []
    hooks = [
        model.get_submodule(path).register_forward_hook(
            lambda _m, _i, out: found.append(_of_one(out[0] if isinstance(out, tuple) else out))
        )
        for path in blocks
    ]
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return found, logits


def block_by_block(model: BlockRunner, tokens: Tensor) -> Iterator[State]:
    """Run a document through a model, and yield what each block passes on."""
    model.prepare(embeddings=True)
    state: State | None = model.embed(tokens)
    model.drop_embeddings()
    for index in range(len(model.blocks)):
        model.weights.load_block(index)
        assert state is not None
        state = model.run(index, tokens, state)
        assert state is not None
        yield state
        model.weights.unload_block(index)
