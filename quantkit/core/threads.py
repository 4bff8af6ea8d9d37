"""Work on a CPU that gives the same bits with any number of threads (RELIABILITY 1.4).

A library may share out one sum among its threads, and then the order of the additions depends on
their number. Here one operation has one thread. Several threads work on several parts, and the
bounds of the parts are fixed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
#: The lock of each process: a fork has its own.
_BUILDS: dict[int, threading.RLock] = {}


@contextmanager
def building() -> Iterator[None]:
    """Let transformers build one model at a time: meanwhile it changes torch's default dtype, for
    all threads.
    """
    with _BUILDS.setdefault(os.getpid(), threading.RLock()):
        yield


@contextmanager
def one_thread(device: torch.device) -> Iterator[int]:
    """Let each operation of the calling thread use one thread; yield how many it used before. A GPU
    needs no change.
    """
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def side_by_side(device: torch.device, tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Run tasks and return their results in order; on a CPU, run as many at once as torch has
    threads.

    If several tasks fail, the exception of the first is raised, after all started tasks are done.
    """
    with one_thread(device) as threads:
        if device.type != "cpu" or min(threads, len(tasks)) < 2:
            return [task() for task in tasks]
        # The setting is one of each thread. A new thread takes it over from the process, unless it
        # sets its own.
        with ThreadPoolExecutor(
            min(threads, len(tasks)), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            return list(pool.map(lambda task: task(), tasks))
