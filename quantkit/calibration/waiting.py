"""Passes of documents through a block. Each waits where the block calls a linear, until that linear
is solved.

Otherwise each group of linears needs a pass from the start of the block. A pass that goes on gives
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from greenlet import getcurrent, greenlet

T = TypeVar("T")


class Waiting:
    """Hold the passes that wait, by their documents.

    Each runs in a greenlet, so that all share one thread: its CUDA handles, and torch's mode of
    gradients, which is set anew at each switch. Only `close` frees their memory: Python collects no
    cycle through a greenlet.
    """

    def __init__(self) -> None:
        self._passes: dict[tuple[int, ...], greenlet] = {}
        self._running: greenlet | None = None

    def __contains__(self, documents: tuple[int, ...]) -> bool:
        return documents in self._passes

    def run(self, documents: tuple[int, ...], work: Callable[[], T]) -> T | None:
        """Do the work of a pass, or go on with the one that waits; None if it waits again."""
        one, gradients = (
            self._passes.pop(documents, None) or greenlet(work),
            torch.is_grad_enabled(),
        )
        self._running = one
        try:
            found: T | None = one.switch()
        finally:
            torch.set_grad_enabled(gradients)
        if not one.dead:
            self._passes[documents] = one
        return found

    def wait(self) -> bool:
        """Let the pass that calls this wait, and return True when it goes on; False at once if it
        cannot wait.
        """
        gradients, autocast = (
            torch.is_grad_enabled(),
            map(torch.is_autocast_enabled, ("cuda", "cpu")),
        )
        if getcurrent() is not self._running or any(autocast):
            return False
        self._running.parent.switch()
        torch.set_grad_enabled(gradients)
        return True

    def close(self) -> bool:
        """End all passes that wait; False if there are none."""
        waited, gradients = bool(self._passes), torch.is_grad_enabled()
        while self._passes:
            self._passes.popitem()[1].throw()
        torch.set_grad_enabled(gradients)
        return waited
