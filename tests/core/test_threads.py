"""Tasks side by side and in the background: their order, their errors, and the caller's setting comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from quantkit.core.threads import WorkQueue, ahead, one_thread, side_by_side

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == threads_of_a_new_thread() == 3, "the setting was not put back"
    torch.set_num_threads(before)


def threads_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


def test_results_are_in_order_and_each_task_has_one_thread() -> None:
    begun = threading.Barrier(3)

    def task(number: int) -> tuple[int, int, str]:
        if number < 3:
            begun.wait(30)  # passes only if three tasks run at once
        time.sleep(0.001 * (9 - number))
        return number, torch.get_num_threads(), threading.current_thread().name

    found = side_by_side(CPU, [partial(task, number) for number in range(9)])
    assert [number for number, _, _ in found] == list(range(9))
    assert {count for _, count, _ in found} == {1}
    assert len({name for _, _, name in found}) == 3


def test_one_task_runs_in_the_calling_thread() -> None:
    found = side_by_side(CPU, [lambda: (torch.get_num_threads(), threading.current_thread())])
    assert found == [(1, threading.current_thread())]
    assert side_by_side(CPU, []) == []


def test_the_first_error_is_raised_and_the_setting_comes_back() -> None:
    def fail(number: int) -> None:
        time.sleep(0.01 * (3 - number))
        raise ValueError(f"task {number}")

    with pytest.raises(ValueError, match="task 0"):
        side_by_side(CPU, [partial(fail, number) for number in range(3)])
    with pytest.raises(KeyError), one_thread(CPU):
        raise KeyError
    assert threads_of_a_new_thread() == 3


def test_work_for_a_gpu_stays_in_the_calling_thread_with_its_setting() -> None:
    found = side_by_side(torch.device("cuda"), [threading.current_thread, torch.get_num_threads])
    assert found == [threading.current_thread(), 3]


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


def test_only_so_many_bytes_wait() -> None:
    go = threading.Event()
    with WorkQueue(CPU, beside=True, most=10) as queue:
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


def test_work_ahead_keeps_order_and_budget_and_raises_when_an_item_is_due() -> None:
    held, most, lock, found = 0, 0, threading.Lock(), list[int]()

    def work(item: int) -> int:
        nonlocal held, most
        with lock:
            held, most = held + item, max(most, held + item)
        time.sleep(0.001 * (item % 3))
        if item == 30:
            raise ValueError(item)
        return item

    with pytest.raises(ValueError, match="30"):
        for item in ahead(range(1, 40), partial(map, work), int, workers=3, most=50, batch=6, check=lambda: None):
            found.append(item)
            with lock:
                held -= item
    assert found == list(range(1, 30)) and 12 <= most <= 50
