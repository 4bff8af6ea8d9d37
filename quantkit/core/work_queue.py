"""Work that one thread does in the background, in the order of the calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

#: The most bytes of data in waiting tasks, unless a single task has more.
MOST_BYTES = 2 * 2**30
#: The most units that wait, the running one included.
MOST_UNITS = 4


class WorkQueue:
    """Run tasks in order, `beside` the caller's work in one thread, else at once in `put`.

    A task may use the tensors that the caller had made on `device` when it put the task. The first
    exception of a task drops all later tasks. It is raised by the next call, and at the end of the
    `with` block. If the block fails itself, the tasks that wait are finished first. If it was
    interrupted, they are dropped.
    """

    def __init__(self, device: torch.device, beside: bool) -> None:
        self.beside = beside
        self._pool = ThreadPoolExecutor(1, "quantkit-write") if beside else None
        self._stream = torch.cuda.Stream(device) if beside and device.type == "cuda" else None
        self._error: BaseException | None = None
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._units: deque[Future[None]] = deque()

    def put(self, task: Callable[[], object], nbytes: int = 0) -> None:
        """Add a task, which holds `nbytes` of data; wait while too many bytes are in the queue."""
        self._check()
        if self._pool is None:
            task()
            return
        while self._waiting and sum(size for _, size in self._waiting) + nbytes > MOST_BYTES:
            self._waiting.popleft()[0].result()
        self._check()
        made = (
            None
            if self._stream is None
            else torch.cuda.current_stream(self._stream.device).record_event()
        )
        self._waiting.append((self._pool.submit(self._run, task, made), nbytes))

    def end_unit(self) -> None:
        """End a unit of tasks; wait while too many units are in the queue."""
        if self._waiting:
            self._units.append(self._waiting[-1][0])
        while len(self._units) > MOST_UNITS:
            self._units.popleft().result()
        while self._waiting and self._waiting[0][0].done():
            self._waiting.popleft()
        self._check()

    def drain(self) -> None:
        """Wait until all tasks are done."""
        while self._waiting:
            self._waiting.popleft()[0].result()
        self._check()

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
