"""Run a block with gradients: several documents at a time where that is possible, and with the same bits each time."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from quantkit.models.passing import State
from quantkit.pipeline.activations import Activations
from quantkit.pipeline.memory_estimate import TUNED_AT_ONCE

if TYPE_CHECKING:
    from quantkit.pipeline.calibrate import Run


def parts(run: Run, block: int, inputs: Activations, numbers: Iterable[int]) -> Iterator[list[int]]:
    """Yield the documents that one pass through a block takes: neighbours of equal length, where that is possible."""
    part = list[int]()
    joined = run.model.takes_batches(block) and inputs.hidden_only
    for number in numbers:
        length = len(run.sequences[number])
        most = TUNED_AT_ONCE[run.model.device.type] // length if joined else 0
        if part and (len(part) >= most or len(run.sequences[part[0]]) != length):
            yield part
            part = []
        part.append(number)
    if part:
        yield part


def stacked(store: Activations, part: Sequence[int]) -> Tensor:
    """Return the hidden states of a document `[t, h]`, or of several `[b, t, h]`."""
    hidden = [store.get(number).hidden for number in part]
    return hidden[0] if len(part) == 1 else torch.stack(hidden)


def run_part(
    run: Run,
    block: int,
    part: Sequence[int],
    inputs: Activations,
    weights: Mapping[str, Tensor],
    hidden: Tensor | None = None,
) -> Tensor:
    """Return the hidden states that a block passes on of some documents, with gradients for its `weights`.

    `hidden` takes the place of the hidden states that enter, if these need a gradient too.
    """
    run.progress.check()
    tokens = [run.sequences[number] for number in part]
    hidden = stacked(inputs, part) if hidden is None else hidden
    if len(part) == 1:
        return run.model.run_with(block, tokens[0], State(hidden, inputs.get(part[0]).passed), weights)
    return run.model.run_with(block, torch.stack(tokens), State(hidden), weights)


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Let torch choose algorithms on a GPU whose gradients are the same in each run; its settings are restored."""
    if device.type != "cuda":
        yield
        return
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # masks come from operations that have none
    try:
        # Gradients of the other backends are sums in any order, unless torch may refuse operations.
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
