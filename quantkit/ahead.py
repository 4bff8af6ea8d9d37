"""The next thing is made in a thread while the present one is used: one look-ahead, no queue, no schedule.

Reading and unpacking a weight takes about as long as packing, hashing and writing one, so two cores halve the time. At
most two things are there at once, the one in use and the next, and the memory of those before is theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

import torch

from quantkit import room

T = TypeVar("T")


@contextmanager
def ahead(items: Iterator[T]) -> Iterator[Iterator[T]]:
    """Yield an iterator over `items` whose next one is made in a thread while the present one is used.

    The order stays, and an error is raised where its item is due. When the block ends, however it does, the thread is
    waited for (it finishes at most the one that it is at). Meanwhile each of the two sides computes with half of
    torch's threads: two full sets of them on the same cores would wait for each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    try:
        with room.kept(), ThreadPoolExecutor(1, "quantkit-ahead") as pool:
            yield _each(pool, items)
    finally:
        torch.set_num_threads(threads)


def _each(pool: ThreadPoolExecutor, items: Iterator[T]) -> Iterator[T]:
    def made() -> tuple[T, ...]:
        return tuple(islice(items, 1))  # none at the end

    due = pool.submit(made)
    while found := due.result():
        due = pool.submit(made)
        yield found[0]
