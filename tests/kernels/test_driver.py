"""The arguments and the configuration of a launch: widths of numbers, threads, reuse of memory, attributes."""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

import pytest
import torch

from quantkit.kernels import driver


def at(pointers: Any, index: int, size: int) -> bytes:
    return ctypes.string_at(pointers[index], size)


def test_arguments_arrive_in_the_width_that_kernels_take() -> None:
    x, structure = torch.zeros(3), bytes(range(128))
    for _ in range(2):  # the second time in the same memory
        pointers = driver.argument_pointers([structure, x, torch.nn.Parameter(x), None, -7, 2**31 - 1, 0.5])
        assert at(pointers, 0, 128) == structure
        for index, wanted in ((1, x.data_ptr()), (2, x.data_ptr()), (3, 0)):
            assert at(pointers, index, 8) == struct.pack("<Q", wanted)
        assert [at(pointers, i, 4) for i in (4, 5)] == [struct.pack("<i", value) for value in (-7, 2**31 - 1)]
        assert at(pointers, 6, 4) == struct.pack("<f", 0.5)
    with pytest.raises(struct.error):
        driver.argument_pointers([2**31])


def test_arguments_of_other_types_do_not_overwrite_these() -> None:
    first = driver.argument_pointers([1, None])
    driver.argument_pointers([None, 1])
    driver.argument_pointers([2.0, None])
    assert at(first, 0, 4) == struct.pack("<i", 1)


def test_threads_do_not_write_each_others_arguments() -> None:
    both, found = threading.Barrier(2, timeout=10), {}

    def call(value: int) -> None:
        pointers = driver.argument_pointers([value])
        both.wait()
        found[value] = at(pointers, 0, 4)
        both.wait()

    threads = [threading.Thread(target=call, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {value: struct.pack("<i", value) for value in (1, 2)}


def test_a_launch_asks_for_its_cluster_and_its_early_start_and_nothing_else() -> None:
    """The driver reads as many attributes as the configuration counts."""
    cluster, early = (driver.CLUSTER_DIMENSION, [5, 1, 1]), (driver.PROGRAMMATIC_STREAM_SERIALIZATION, [1, 0, 0])
    for size, soon, wanted in ((0, False, []), (5, False, [cluster]), (0, True, [early]), (5, True, [cluster, early])):
        _, config = driver.launch_config((240,), (256,), 1024, 7, size, soon)
        found = [(one.id, list(one.value)[:3]) for one in config.attributes[: config.count]]
        assert found == wanted
        assert list(config.sizes) == [240, 1, 1, 256, 1, 1] and (config.shared, config.stream) == (1024, 7)
