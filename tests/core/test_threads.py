"""Tasks side by side: results in order, one thread an operation, and the caller's setting comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from quantkit.core.threads import one_thread, side_by_side

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3, "the setting was not put back"
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
    assert threads_of_a_new_thread() == 3


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
