"""Slices of one weight are worked on by several threads side by side.

torch would share each small operation among its threads, which have to wait for each other at its end. Whole slices
need no waiting: each thread goes on to the next one that nobody has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

#: Above this, threads wait for Python's lock more than they work.
MOST = 4
_pool: ThreadPoolExecutor | None = None
_helpers = 0


@contextmanager
def abreast() -> Iterator[None]:
    """Inside, `each` has as many threads as torch, `MOST` at most, and torch's own operations have one."""
    global _pool, _helpers
    threads = torch.get_num_threads()
    helpers = min(threads, MOST) - 1
    if not helpers or _pool is not None:
        yield
        return
    torch.set_num_threads(1)  # also for threads that begin later
    try:
        with ThreadPoolExecutor(helpers, "quantkit-abreast") as pool:
            _pool, _helpers = pool, helpers
            yield
    finally:
        _pool, _helpers = None, 0
        torch.set_num_threads(threads)


def each(work: Callable[..., None], slices: Iterable[tuple[Any, ...]]) -> None:
    """Call `work(*one)` for each of `slices`, which must not depend on each other; the first error ends it."""
    todo, lock = iter(slices), Lock()

    def run() -> None:
        try:
            while True:
                with lock:
                    one = next(todo, None)
                if one is None:
                    return
                work(*one)
        except BaseException:
            with lock:
                for _ in todo:  # nobody begins another one
                    pass
            raise

    helping = [_pool.submit(run) for _ in range(_helpers)] if _pool is not None else []
    try:
        run()
    finally:
        for helper in helping:
            helper.result()
