"""The arguments and the configuration of a launch: widths of numbers, threads, reuse of memory, attributes."""

from __future__ import annotations

import ctypes
import struct
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantkit.errors import KernelError
from quantkit.kernels import driver
from tests.kernels.fake_driver import FakeDriver

FUNCTION = driver.Function(SimpleNamespace(ptr=7))
X = torch.zeros(3)


def launch(*args: Any) -> None:
    driver.launch(FUNCTION, (1,), (32,), args)


def test_arguments_arrive_in_the_width_that_kernels_take(fake_driver: FakeDriver) -> None:
    structure = bytes(range(128))
    for _ in range(2):  # the second time in the same memory
        launch(structure, X, torch.nn.Parameter(X), None, -7, 2**31 - 1)
        assert ctypes.string_at(fake_driver.pointers[0], 128) == structure
        assert [fake_driver.argument(i) for i in (1, 2, 3)] == [X.data_ptr(), X.data_ptr(), 0]
        found = [ctypes.string_at(fake_driver.pointers[i], 4) for i in (4, 5)]
        assert found == [struct.pack("<i", value) for value in (-7, 2**31 - 1)]
        launch(X, 1)
    with pytest.raises(struct.error):
        launch(X, 2**31)


def test_threads_do_not_write_each_others_arguments(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    both, found = threading.Barrier(2, timeout=10), {}

    def at_once(config: Any, function: Any, pointers: Any, none: None) -> int:
        both.wait()
        found[threading.current_thread().name] = ctypes.string_at(pointers[1], 4)
        both.wait()
        return 0

    monkeypatch.setattr(fake_driver, "cuLaunchKernelEx", at_once)
    threads = [threading.Thread(target=launch, args=(X, value), name=str(value)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {str(value): struct.pack("<i", value) for value in (1, 2)}


def test_a_launch_asks_for_its_cluster_and_its_early_start_and_nothing_else() -> None:
    """The driver reads as many attributes as the configuration counts."""
    cluster, early = (driver.CLUSTER_DIMENSION, [5, 1, 1]), (driver.PROGRAMMATIC_STREAM_SERIALIZATION, [1, 0, 0])
    for size, soon, wanted in ((0, False, []), (5, False, [cluster]), (0, True, [early]), (5, True, [cluster, early])):
        _, config = driver.launch_config((240,), (256,), 1024, 7, size, soon)
        found = [(one.id, list(one.value)[:3]) for one in config.attributes[: config.count]]
        assert found == wanted
        assert list(config.sizes) == [240, 1, 1, 256, 1, 1] and (config.shared, config.stream) == (1024, 7)


def test_the_context_is_left_as_it_was_by_a_launch_that_fails(
    fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise torch would go on with another GPU."""
    calls: list[str] = []

    def answers(name: str, code: int) -> None:
        monkeypatch.setattr(fake_driver, name, lambda *args: [calls.append(name), code][1], raising=False)

    def another(current: Any) -> int:
        current._obj.value = 99
        return 0

    monkeypatch.setattr(fake_driver, "cuCtxGetCurrent", another)
    for name, code in (("cuCtxPushCurrent_v2", 0), ("cuLaunchKernelEx", 701), ("cuCtxPopCurrent_v2", 0)):
        answers(name, code)
    answers("cuGetErrorString", 0)
    with pytest.raises(KernelError, match=r"could not be launched on cpu: unknown \(error 701"):
        launch(X)
    assert calls == ["cuCtxPushCurrent_v2", "cuLaunchKernelEx", "cuCtxPopCurrent_v2", "cuGetErrorString"]
