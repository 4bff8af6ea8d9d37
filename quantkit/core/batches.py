"""Division of work into parts of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def divide(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Divide items, in order, into lists whose sizes add up to at most `most`; a larger item is a
    list of its own.
    """
    part: list[T] = []
    total = 0
    for item in items:
        needed = size(item)
        if part and total + needed > most:
            yield part
            part, total = [], 0
        part.append(item)
        total += needed
    if part:
        yield part
