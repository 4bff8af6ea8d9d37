"""Repeat a pass with gradients as one CUDA graph, since Python starts the kernels of a small block
too slowly.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.models.passing import tensors_in

#: The call with inputs of one shape that is captured. A model's arguments for a block are stored by
#: then.
CAPTURED = 7
#: Tags of operations whose results the CPU reads.
READING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
#: Operations that copy between devices.
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


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
