"""Work in threads: parts of bounded size, tasks side by side, and a queue in the background.

A CPU gives the same bits with any number of threads (RELIABILITY 1.4). A library may share out one
sum among its threads, and then the order of the additions depends on their number. Here such an
operation has one thread. Several threads work on several parts, and the bounds of the parts are
fixed. Operations on single numbers, and sums in a row, may have several.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

import torch

K = TypeVar("K")
T = TypeVar("T")
R = TypeVar("R")
CPU = torch.device("cpu")
#: The lock of each process: a fork has its own.
_BUILDS: dict[int, threading.RLock] = {}
#: The most bytes of data in waiting tasks, unless a single task has more.
MOST_BYTES = 2 * 2**30
#: Items for each thread that are made in advance.
AHEAD = 2
#: The most units that wait, the running one included.
MOST_UNITS = 8


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


def grouped(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """List the values of each key, both in order of first occurrence."""
    found: dict[K, list[T]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


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


def ahead(
    items: Iterable[T],
    work: Callable[[list[T]], Iterable[R]],
    size: Callable[[T], int],
    *,
    workers: int,
    most: int,
    batch: int,
    check: Callable[[], object],
    device: torch.device = CPU,
) -> Generator[R, None, None]:
    """Yield the results of `work` on items, in order, that `workers` threads make in advance. On a
    GPU `device` each has a stream of its own, and its results must be on the CPU.

    Items that are made or wait have at most `most` bytes by `size`, unless one has more. A thread
    takes small items together, up to `batch` bytes, and `work` gives the results of all. `check` is
    called between items, and may raise. An exception is raised when the results are due. They share
    the caller's threads of torch.
    """
    threads = max(1, torch.get_num_threads() // workers)
    waiting: deque[tuple[int, Future[deque[R]]]] = deque()

    def begin() -> None:
        torch.set_num_threads(threads)
        if device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(device))

    with ThreadPoolExecutor(workers, "quantkit-work", begin) as pool:

        def oldest() -> Iterator[R]:
            results = waiting[0][1].result()
            while results:
                check()
                yield results.popleft()
            waiting.popleft()

        try:
            for part in divide(items, size, batch):
                held = sum(map(size, part))
                while waiting and sum(each for each, _ in waiting) + held > most:
                    yield from oldest()
                waiting.append((held, pool.submit(lambda part: deque(work(part)), part)))
                if len(waiting) > AHEAD * workers:
                    yield from oldest()
            while waiting:
                yield from oldest()
        finally:
            pool.shutdown(cancel_futures=True)
            # A new thread takes the setting over from the process: give it the caller's again.
            torch.set_num_threads(torch.get_num_threads())


class WorkQueue:
    """Run tasks in order, `beside` the caller's work in one thread, else at once in `put`.

    Tasks that wait have at most `most` bytes of data, unless a single one has more. A task may use
    the tensors that the caller had made on `device` when it put the task. The first
    exception of a task drops all later tasks. It is raised by the next call, and at the end of the
    `with` block. If the block fails itself, the tasks that wait are finished first. If it was
    interrupted, they are dropped.
    """

    def __init__(self, device: torch.device, beside: bool, most: int = MOST_BYTES) -> None:
        self.beside, self._most = beside, most
        self._pool = ThreadPoolExecutor(1, "quantkit-write") if beside else None
        self._stream = torch.cuda.Stream(device) if beside and device.type == "cuda" else None
        self._error: BaseException | None = None
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._held = 0
        self._units: deque[Future[None]] = deque()

    def put(self, task: Callable[[], object], nbytes: int = 0) -> None:
        """Add a task, which holds `nbytes` of data; wait while too many bytes are in the queue."""
        self._check()
        if self._pool is None:
            task()
            return
        while self._waiting and (self._waiting[0][0].done() or self._held + nbytes > self._most):
            self._wait()
        self._check()
        made = (
            None
            if self._stream is None
            else torch.cuda.current_stream(self._stream.device).record_event()
        )
        self._waiting.append((self._pool.submit(self._run, task, made), nbytes))
        self._held += nbytes

    def end_unit(self) -> None:
        """End a unit of tasks; wait while too many units are in the queue."""
        if self._waiting:
            self._units.append(self._waiting[-1][0])
        while len(self._units) > MOST_UNITS:
            self._units.popleft().result()
        self._check()

    def drain(self) -> None:
        """Wait until all tasks are done."""
        while self._waiting:
            self._wait()
        self._check()

    def _wait(self) -> None:
        """Wait for the oldest task."""
        task, nbytes = self._waiting.popleft()
        task.result()
        self._held -= nbytes

    def __enter__(self) -> WorkQueue:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(
                cancel_futures=error is not None and not isinstance(error, Exception)
            )
        if (
            self._error is not None
            and error is not self._error
            and (error is None or isinstance(error, Exception))
        ):
            raise self._error  # it is about earlier work than the error of the block

    def _run(self, task: Callable[[], object], made: torch.cuda.Event | None) -> None:
        if self._error is not None:
            return
        try:
            if self._stream is None or made is None:
                task()
                return
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(made)
                task()
                self._stream.synchronize()  # the task's tensors may then be freed
        except BaseException as error:
            self._error = error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
