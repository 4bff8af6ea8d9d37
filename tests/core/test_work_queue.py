"""Tasks beside other work: their order, the error that ends them, and how much may wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from quantkit.core import work_queue
from quantkit.core.work_queue import WorkQueue

CPU = torch.device("cpu")


def broken() -> None:
    raise ValueError("the disk is full")


@pytest.mark.parametrize("beside", [False, True])
def test_tasks_run_in_order_and_all_before_the_end(beside: bool) -> None:
    seen: list[int] = []
    with WorkQueue(CPU, beside) as queue:
        for number in range(100):
            queue.put(partial(seen.append, number), nbytes=number)
            if number % 7 == 0:
                queue.end_unit()
    assert seen == list(range(100))


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("call", ["end_unit", "drain", "exit"])
def test_an_error_ends_the_queue_and_no_later_task_runs(beside: bool, call: str) -> None:
    seen: list[int] = []
    with pytest.raises(ValueError, match="full"), WorkQueue(CPU, beside) as queue:
        queue.put(broken)
        queue.put(partial(seen.append, 1))
        calls: dict[str, Callable[[], None]] = {"end_unit": queue.end_unit, "drain": queue.drain}
        calls.get(call, lambda: None)()
    assert not seen


def test_the_error_of_earlier_work_comes_before_that_of_the_block() -> None:
    started = threading.Event()
    with pytest.raises(ValueError, match="full"), WorkQueue(CPU, beside=True) as queue:
        queue.put(started.wait)
        queue.put(broken)
        started.set()
        raise KeyError("which came of it")


def test_a_block_that_fails_has_its_tasks_finished_and_an_interrupted_one_has_not() -> None:
    for error, expected in ((KeyError, [1, 2]), (KeyboardInterrupt, [1])):
        seen: list[int] = []
        started, go = threading.Event(), threading.Event()

        def first(started: threading.Event = started, go: threading.Event = go, seen: list[int] = seen) -> None:
            started.set()
            go.wait()
            seen.append(1)

        with pytest.raises(error), WorkQueue(CPU, beside=True) as queue:
            queue.put(first)
            queue.put(partial(seen.append, 2))
            started.wait()
            threading.Timer(0.05, go.set).start()
            raise error
        assert seen == expected


def test_only_so_many_bytes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_queue, "MOST_BYTES", 10)
    go = threading.Event()
    with WorkQueue(CPU, beside=True) as queue:
        queue.put(go.wait, nbytes=6)
        queue.put(lambda: None, nbytes=4)
        threading.Timer(0.05, go.set).start()
        queue.put(lambda: None, nbytes=1)  # waits for the first one
        assert go.is_set()


class Stream:
    """Record what is asked of a stream of a GPU."""

    device = torch.device("cuda", 0)

    def __init__(self, seen: list[str], name: str) -> None:
        self.seen, self.name = seen, name

    def record_event(self) -> str:
        self.seen.append(f"{self.name} records")
        return "made"

    def wait_event(self, event: str) -> None:
        self.seen.append(f"{self.name} waits for {event}")

    def synchronize(self) -> None:
        self.seen.append(f"{self.name} is waited for")


def test_on_a_gpu_a_task_waits_for_what_was_made_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(seen, "side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(seen, "main"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    with WorkQueue(torch.device("cuda"), beside=True) as queue:
        queue.put(partial(seen.append, "task"))
    assert seen == ["main records", "side waits for made", "task", "side is waited for"]
