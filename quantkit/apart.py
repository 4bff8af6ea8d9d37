"""Whole weights are worked on by other processes, one weight each, in memory that all of them see.

Threads of one process wait for each other: every torch operation takes Python's lock anew, and on pieces that stay in a
processor's cache it takes but microseconds. Processes have a lock each. They begin as copies of this one, so nothing is
imported again, and what they are given and give back is copied once, or never. Each has one thread for torch, like
the workers of torch's own data loader, which begin the same way.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from quantkit import room
from quantkit.direct import BLOCK
from quantkit.errors import QuantkitError

#: Beyond this, one process reads, hashes and writes no faster than they pack.
MOST = 3

#: Where a tensor lies in shared memory, its dtype and its shape.
Place = tuple[int, torch.dtype, tuple[int, ...]]

#: The most bytes that the other processes of a run had of their own.
_beside = 0


def room_for(size: int) -> int:
    """Return the bytes of shared memory that a tensor of `size` bytes is given, wherever in a file it began."""
    return _whole(size) + 2 * BLOCK


def _whole(size: int) -> int:
    """Return the bytes of the blocks that `size` bytes lie in."""
    return -(-size // BLOCK) * BLOCK


class Shared:
    """Memory that this process and those that begin later all see, filled from its beginning on, in whole blocks."""

    def __init__(self, size: int) -> None:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        with suppress(OSError, AttributeError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(memoryview(memory), dtype=torch.uint8)
        self._filled = 0

    def clear(self) -> None:
        """Give up what was put here."""
        self._filled = 0

    def rest(self) -> Tensor:
        """Return the memory that nothing was put into, uint8; what is put next may lie at its beginning already."""
        return self._memory[self._filled :]

    def take(self, size: int) -> Tensor | None:
        """Return memory that nothing else is put into, uint8 `[size]`, None if there is not as much."""
        start = self._filled
        if start + size > len(self._memory):
            return None
        self._fill(start + size)
        return self._memory[start : start + size]

    def put(self, tensor: Tensor) -> Place:
        """Return the place of a tensor; one that does not lie in this memory is copied."""
        here = self._holds(tensor)
        start = tensor.data_ptr() - self._memory.data_ptr() if here else self._filled
        place = start, tensor.dtype, tuple(tensor.shape)
        if not here:
            self.get(place).copy_(tensor)
        self._fill(start + tensor.nbytes)
        return place

    def put_all(self, tensors: Mapping[str, Tensor]) -> dict[str, Place]:
        """Return the places of all tensors that are to lie here, even if others took their room."""
        left = len(self._memory) - self._filled
        if sum(_whole(tensor.nbytes) for tensor in tensors.values() if not self._holds(tensor)) > left:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            self.clear()
        return {name: self.put(tensor) for name, tensor in tensors.items()}

    def _holds(self, tensor: Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self._memory.data_ptr() < len(self._memory)

    def _fill(self, end: int) -> None:
        self._filled = max(self._filled, _whole(end))

    def get(self, place: Place) -> Tensor:
        """Return the tensor at a place, without a copy."""
        start, dtype, shape = place
        count = torch.Size(shape).numel()
        return self._memory[start : start + count * dtype.itemsize].view(dtype).view(shape)


class Apart:
    """Processes that do one kind of work, and the memory that it is brought to them in, and brought back."""

    def __init__(self, pool: ProcessPoolExecutor, given: list[Shared], made: list[Shared]) -> None:
        self._pool, self._memory = pool, [*given, *made]
        self._grown: dict[int, int] = {}
        #: Memory of both kinds in which nothing lies that is still needed.
        self.given, self.made = given, made

    def begin(self, given: Shared, made: Shared, *what: Any) -> Future[Any]:
        """Let the next process that is free work on what lies in `given`; `what` is sent to it."""
        with _deaths_told():
            return self._pool.submit(_work_on, self._memory.index(given), self._memory.index(made), what)

    def result(self, begun: Future[Any]) -> Any:
        """Return what the work returned, or raise what it raised; QuantkitError if a process was killed."""
        global _beside
        with _deaths_told():
            found, process, grown = begun.result()
        self._grown[process] = max(grown, self._grown.get(process, 0))
        _beside = max(_beside, sum(self._grown.values()))
        return found


@contextmanager
def _deaths_told() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise QuantkitError(
            "a process that worked for this one was killed, most likely for want of memory: run again with "
            "OMP_NUM_THREADS=1, which needs less"
        ) from error


def possible() -> bool:
    """Return whether processes can begin as copies of this one here, and say what memory they take."""
    daemonic = multiprocessing.current_process().daemon  # which may begin none
    return sys.platform == "linux" and not daemonic and _own_memory() is not None


def peak() -> int:
    """Return the most bytes that other processes had of their own so far, beside what they share with this one."""
    return _beside


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch shares no operation among threads: for pieces of a weight they would wait longer than they work."""
    threads = torch.get_num_threads()
    if threads == 1:  # perhaps by another thread's conversion, which sets it back
        yield
        return
    torch.set_num_threads(1)  # also for threads that begin later
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def processes(work: Callable[..., Any], count: int, given: int, made: int) -> Iterator[Apart | None]:
    """Yield `count` processes that do `work(given, made, *what)`, in memory of `given` and `made` bytes.

    There is one of each kind more than processes, to be filled and emptied meanwhile. What is open now is open in them:
    no lock should be. None where the system refuses them.
    """
    before, others = multiprocessing.active_children(), None
    try:
        memory = [[Shared(size) for _ in range(count + 1)] for size in (given, made)]
        pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), _started, (work, memory[0] + memory[1]))
        pool.submit(os.getpid).result()  # all of them begin here, before this process has threads
        others = Apart(pool, *memory)
    except (OSError, BrokenProcessPool):
        for child in multiprocessing.active_children():
            if child not in before:
                child.kill()
                child.join()
    try:
        yield others
    finally:
        if others is not None:
            pool.shutdown(cancel_futures=True)


#: In such a process: its work, the shared memory, what it had of its own at first; and what lasts as long as it does.
_mine: tuple[Callable[..., Any], list[Shared], int] | None = None
_forever = ExitStack()


def _started(work: Callable[..., Any], memory: list[Shared]) -> None:
    global _mine
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the first process decides, and ends this one
    signal.signal(signal.SIGTERM, _end_soon)
    Thread(target=_end_with_the_first, daemon=True).start()
    torch.set_num_threads(1)
    _forever.enter_context(room.kept())
    _mine = work, memory, _own_memory() or 0


def _end_soon(*_: object) -> None:
    """End when the first process has had the time to, if it was sent this signal, too; it sends it if another died."""
    time.sleep(1)
    os._exit(1)


def _end_with_the_first() -> None:
    first = multiprocessing.parent_process()
    assert first is not None
    first.join()
    os._exit(1)


def _work_on(given: int, made: int, what: tuple[Any, ...]) -> tuple[Any, int, int]:
    assert _mine is not None
    work, memory, before = _mine
    found = work(memory[given], memory[made], *what)
    return found, os.getpid(), (_own_memory() or 0) - before


def _own_memory() -> int | None:
    """Return the resident bytes of this process that are no file's and shared with no other, None if not known."""
    try:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
