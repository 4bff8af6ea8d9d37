"""Requests to end a command between two items of a loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Stop:
    """Hold a request to end, which a signal handler makes and a loop meets between two of its
    items.

    Inside a loop an exception at any instruction could leave a lock taken that other threads wait
    for.
    """

    def __init__(self) -> None:
        self._reason: BaseException | None = None
        self._loops = 0

    def request(self, reason: BaseException) -> None:
        """Raise `reason` at the next item of the loop that runs, or at once if there is none."""
        self._reason = reason
        if not self._loops:
            raise reason

    def check(self) -> None:
        """Raise the requested exception, if there is one."""
        if self._reason is not None:
            raise self._reason

    def clear(self) -> None:
        """Forget a request."""
        self._reason = None

    def is_in_loop(self) -> bool:
        """Say whether a request waits for the next item of a loop."""
        return self._loops > 0

    def between(self, items: Iterable[T]) -> Iterator[T]:
        """Yield `items`, and ask for a request between them."""
        with self.loop():
            for item in items:
                self.check()
                yield item
        self.check()

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Defer requests inside the context. The caller polls them with `check`, and once more
        afterwards.
        """
        self._loops += 1
        try:
            yield
        finally:
            self._loops -= 1
