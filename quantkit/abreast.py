"""Slices of one weight are worked on by several threads side by side.

torch would share each small operation among its threads, which have to wait for each other at its end. Whole slices
need no waiting: each thread goes on to the next one that nobody has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any

import torch

#: Above this, threads wait for Python's lock more than they work.
MOST = 4
#: Who helps the thread that is inside `abreast`, and how many; another thread's conversion has its own.
_HELPING: ContextVar[tuple[ThreadPoolExecutor, int] | None] = ContextVar("_HELPING", default=None)


@contextmanager
def abreast() -> Iterator[None]:
    """Inside, `each` has as many threads as torch, `MOST` at most, and torch's own operations have one."""
    threads = torch.get_num_threads()
    helpers = min(threads, MOST) - 1
    if not helpers:
        yield
        return
    torch.set_num_threads(1)  # also for threads that begin later
    try:
        with ThreadPoolExecutor(helpers, "quantkit-abreast") as pool:
            before = _HELPING.set((pool, helpers))
            try:
                yield
            finally:
                _HELPING.reset(before)
    finally:
        torch.set_num_threads(threads)


def each(work: Callable[..., None], slices: Iterable[tuple[Any, ...]]) -> None:
    """Call `work(*one)` for each of `slices`, which must not depend on each other; the first error ends it."""
    todo, lock = iter(slices), Lock()

    def run() -> None:
        nonlocal todo
        try:
            while True:
                with lock:
                    one = next(todo, None)
                if one is None:
                    return
                work(*one)
        except BaseException:
            with lock:
                todo = iter(())  # nobody begins another one
            raise

    found = _HELPING.get()
    helping = [found[0].submit(run) for _ in range(found[1])] if found is not None else []
    try:
        run()
    finally:
        for helper in helping:
            helper.result()
