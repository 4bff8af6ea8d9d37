"""Run a block with gradients, several documents at a time if possible, and with the same bits each
time.

A pass may be repeated as a CUDA graph, because Python launches the kernels of a small block too
slowly.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.calibration.activations import Activations
from quantkit.calibration.budget import TUNED_AT_ONCE, Sizes
from quantkit.calibration.run import Stream
from quantkit.errors import CheckpointError, QuantkitError, is_out_of_memory, reason
from quantkit.models.block_runner import BlockRunner
from quantkit.models.interception import State, tensors_in
from quantkit.progress import Progress

T = TypeVar("T")
#: The call with inputs of one shape that is captured. A model's arguments for a block are cached
#: by then.
CAPTURED = 7
#: Tags of operations whose results the CPU reads.
READING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
#: Operations that copy between devices.
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


#: Bytes that a pass holds for its gradient, for each token and output of a block's linears: four
#: float32 numbers.
PASS_BYTES = 16


def backward_bytes(sizes: Sizes) -> tuple[int, int]:
    """Compute the bytes that one pass holds for its gradient, and the bytes of attention scores.

    Scores count where a GPU has no flash attention, so that attention is computed by plain
    products.
    """
    tokens = max(sizes.longest, TUNED_AT_ONCE[sizes.device])
    scores = 2 * sizes.width * sizes.heads * tokens * sizes.longest if sizes.on_gpu else 0
    return PASS_BYTES * tokens * sizes.outputs, scores


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
    while True:
        try:
            with _settings(model):
                return task()
        except RuntimeError as error:
            if not model.fuses_attention or "deterministic" not in str(error):
                raise
            model.fuses_attention = False
            progress.warn(
                f"{type(model.text).__name__} has a gradient without a fixed order of sums: codes "
                "of equal runs may differ"
            )


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
        raise CheckpointError(
            f"{type(model.text).__name__} has no gradient ({reason(error)})",
            instead,
            subject=model.src.path,
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
    # The forward pass only warns: masks come from operations that have no other form.
    with (
        _algorithms(warn_only=True),
        sdpa_kernel([*backends, SDPBackend.MATH]),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
        yield


def strictly(model: BlockRunner) -> AbstractContextManager[None]:
    """Make torch refuse gradients without a fixed order of sums, as flash attention requires; for
    the backward passes in a task of `in_fixed_order`.
    """
    if model.device.type == "cuda" and model.fuses_attention:
        return _algorithms(warn_only=False)
    return nullcontext()


@contextmanager
def _algorithms(*, warn_only: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warned, memory = (
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic,
    )
    filled = memory.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    memory.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        memory.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


class Captured:
    """Calls of a function of GPU tensors, which returns tensors, or None in their place.

    The calls may differ only in these inputs. One shape of them is captured. The function itself
    runs for other shapes, and if it waits for the GPU. The next call overwrites the tensors that a
    graph returned.
    """

    def __init__(self) -> None:
        self._calls: Counter[torch.Size] = Counter()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor | None] = []

    def __call__(
        self,
        function: Callable[..., list[Tensor | None]],
        may: Callable[[Tensor], bool],
        *inputs: Tensor,
    ) -> list[Tensor | None]:
        """Call `function(*inputs)`; the shape of the last input counts.

        `may(input)` tells whether to capture the call that has just run. Its memory stays reserved
        then.
        """
        shape = inputs[-1].shape
        self._calls[shape] += 1
        due = self._graph is None and self._calls[shape] == CAPTURED
        if due and not _waits(function, inputs) and may(inputs[-1]):
            self._capture(function, inputs)
        if self._graph is None or shape != self._inputs[-1].shape:
            return function(*inputs)
        for place, given in zip(self._inputs, inputs, strict=True):
            place.copy_(given)
        self._graph.replay()
        return self._outputs

    def close(self) -> None:
        """Free the graph and its memory, which torch would keep for graphs; its last call has
        ended.
        """
        if self._graph is not None:
            self._graph, self._inputs, self._outputs = None, [], []
            torch.cuda.empty_cache()

    def _capture(
        self, function: Callable[..., list[Tensor | None]], inputs: Sequence[Tensor]
    ) -> None:
        # torch.cuda.graph would also free all memory that torch keeps, at each block.
        device, graph = inputs[0].device, torch.cuda.CUDAGraph()
        self._inputs = [each.clone() for each in inputs]
        torch.cuda.synchronize(device)
        try:
            with torch.cuda.stream(_stream(device)):
                graph.capture_begin(
                    capture_error_mode="thread_local"
                )  # other threads read files meanwhile
                try:
                    self._outputs = function(*self._inputs)
                finally:
                    graph.capture_end()
        except RuntimeError:  # something waits after all: the function itself runs on
            return
        self._graph = graph


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Make the stream of all captures: cuBLAS keeps memory for each stream."""
    return torch.cuda.Stream(device)


def _waits(function: Callable[..., object], inputs: Sequence[Tensor]) -> bool:
    """Tell whether a function may wait for the results of its kernels, or fails."""
    watch = _Watch(inputs[0].device)
    try:
        with watch:
            function(*inputs)
    except Exception:  # the call that follows tells its own error
        return True
    return watch.found


class _Watch(TorchDispatchMode):
    """Look for operations whose results the CPU reads. torch's own search for these would end other
    threads' work.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self.found = device, False

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation; its results are read if a size or a value depends on them, or if it
        copies to a device.
        """
        out = function(*args, **(kwargs or {}))
        elsewhere = function in COPIES and any(
            each.device != self._device for each in tensors_in((args, out))
        )
        self.found |= elsewhere or not READING.isdisjoint(function.tags)
        return out
