"""Run a block with gradients: several documents at a time where that is possible, and with the same
bits each time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from quantkit.calibration.activations import Activations
from quantkit.calibration.budget import TUNED_AT_ONCE
from quantkit.calibration.run import Stream
from quantkit.errors import CheckpointError, QuantkitError, is_out_of_memory, reason
from quantkit.models.block_runner import BlockRunner
from quantkit.models.passing import State
from quantkit.progress import Progress

T = TypeVar("T")


def backward_bytes(
    outputs: int, heads: int, longest: int, itemsize: int, device: str
) -> tuple[int, int]:
    """Compute the bytes that one pass holds for its gradient, and the bytes of attention scores.

    The gradient needs four float32 numbers for each token and output of a block's linears. Scores
    count where a GPU has no flash attention, so that attention is computed by plain products.
    """
    tokens = max(longest, TUNED_AT_ONCE[device])
    return 16 * tokens * outputs, 2 * itemsize * heads * tokens * longest if device == "cuda" else 0


def parts(
    stream: Stream, block: int, numbers: Sequence[int] | None = None, padded: bool = True
) -> Iterator[Sequence[int]]:
    """Divide documents, all without `numbers`, into batches for one pass with gradients, shortest
    first.

    With `padded`, a batch may have documents of several lengths, which `stacked` pads at their
    ends: no token of a decoder depends on later tokens. One short document takes a GPU as long as
    many.
    """
    chosen = range(len(stream.sequences)) if numbers is None else numbers
    by_length = sorted(chosen, key=lambda number: len(stream.sequences[number]))
    return stream.batches(block, by_length, TUNED_AT_ONCE[stream.model.device.type], padded)


def stacked(store: Activations, part: Sequence[int]) -> Tensor:
    """Take the hidden states of a document `[t, h]`, or of several `[b, t, h]`, padded
    with zeros.
    """
    hidden = [store.get(number).hidden for number in part]
    return hidden[0] if len(part) == 1 else pad_sequence(hidden, batch_first=True)


def run_part(
    stream: Stream,
    block: int,
    part: Sequence[int],
    weights: Mapping[str, Tensor],
    hidden: Tensor | None = None,
) -> Tensor:
    """Compute a block's output hidden states of some documents, with gradients for its `weights`.

    `hidden` replaces the input hidden states, if these need a gradient too.
    """
    stream.progress.check()
    model, tokens = stream.model, [stream.sequences[number] for number in part]
    hidden = stacked(stream.activations, part) if hidden is None else hidden
    if len(part) == 1:
        return model.run_with(
            block, tokens[0], State(hidden, stream.activations.get(part[0]).passed), weights
        )
    padded = pad_sequence(tokens, batch_first=True, padding_value=stream.padding)
    return model.run_with(block, padded, State(hidden), weights)


def in_fixed_order(model: BlockRunner, progress: Progress, task: Callable[[], T]) -> T:
    """Run a task that calls `backward` or `gradient`: on a GPU its result has the same bits each
    time.

    The task is called again from its start if torch has no fixed order of sums for a gradient of
    the model. Then attention falls back to plain products, other gradients may vary, and a warning
    says so.
    """
    if model.fuses_attention:
        try:
            with _settings(model):
                return task()
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            model.fuses_attention = False
            kind = type(model.text).__name__
            progress.warn(
                f"{kind} has a gradient without a fixed order of sums: codes of equal runs may "
                "differ"
            )
    with _settings(model):
        return task()


def backward(model: BlockRunner, loss: Tensor) -> None:
    """Add to all leaves the gradients of a loss, in a task of `in_fixed_order`."""
    with _strictly(model):
        loss.backward()


def gradient(model: BlockRunner, output: Tensor, by: Tensor, of: Tensor) -> Tensor:
    """Compute the gradient by one tensor from the output's gradient `of`, in a task of
    `in_fixed_order`.
    """
    with _strictly(model):
        (found,) = torch.autograd.grad(output, by, of)
    return found


@contextmanager
def explaining(model: BlockRunner, instead: str) -> Iterator[None]:
    """Turn exceptions of the model's own code, which may overwrite saved tensors, into a
    CheckpointError.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) or (
            isinstance(error, QuantkitError) and not isinstance(error, CheckpointError)
        ):
            raise
        kind = type(model.text).__name__
        raise CheckpointError(
            f"{kind} has no gradient ({reason(error)})", instead, subject=model.src.path
        ) from error


@contextmanager
def _settings(model: BlockRunner) -> Iterator[None]:
    """Let torch use only algorithms with reproducible gradients on a GPU, and restore its settings.

    Flash attention is the only fused attention kernel with such a gradient, in torch's
    deterministic mode.
    """
    if model.device.type != "cuda":
        yield
        return
    backends = [SDPBackend.FLASH_ATTENTION] if model.fuses_attention else []
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        # The forward pass only warns: masks come from operations that have no other form.
        with (
            _algorithms(warn_only=True),
            sdpa_kernel([*backends, SDPBackend.MATH]),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings(
                "ignore", message=".*does not have a deterministic implementation"
            )
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


@contextmanager
def _strictly(model: BlockRunner) -> Iterator[None]:
    """Make torch refuse gradients without a fixed order of sums, as flash attention requires."""
    if model.device.type == "cuda" and model.fuses_attention:
        with _algorithms(warn_only=False):
            yield
    else:
        yield


@contextmanager
def _algorithms(*, warn_only: bool) -> Iterator[None]:
    before, warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
