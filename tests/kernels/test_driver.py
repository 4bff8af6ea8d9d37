"""Launches: their arguments, attributes and contexts, workspaces that no two share, and weights that are read early."""

from __future__ import annotations

import ctypes
import struct
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantkit.errors import KernelError
from quantkit.kernels import driver, loader
from quantkit.kernels.driver import CAPTURES, StreamState, workspace
from quantkit.kernels.hopper import Reads
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


DEVICE = torch.device("cuda", 0)


def at(stream: int, graph: int = 0, source: str = "one") -> int:
    """Return the identity of the workspace of a stream, or of a stream that is captured into a graph."""
    return id(workspace(source, 8, 8, DEVICE, StreamState(stream, graph, True)))


def test_each_stream_and_source_has_its_own_workspace(fake_gpu: FakeDriver) -> None:
    found = [at(stream, 0, source) for stream in (0, 5, 6) for source in ("one", "two")]
    assert len(set(found)) == 6
    assert found == [at(stream, 0, source) for stream in (0, 5, 6) for source in ("one", "two")]


def test_branches_of_a_graph_do_not_share_a_workspace(fake_gpu: FakeDriver) -> None:
    """vLLM runs shared experts on a second stream, which is a fork within the captured graph."""
    eager = {at(0), at(5)}
    both = [at(8, graph=3), at(9, graph=3)]
    assert both[0] != both[1] and not eager & set(both)
    assert both == [at(8, graph=3), at(9, graph=3)]


def test_graphs_share_workspaces_also_if_they_are_captured_on_other_streams(fake_gpu: FakeDriver) -> None:
    at(0)
    assert len({at(stream, graph) for stream, graph in ((7, 1), (7, 2), (8, 3))}) == 1


def test_a_capture_on_more_streams_than_ran_before_is_refused(fake_gpu: FakeDriver) -> None:
    """Zeros that are captured would be written at each replay of that graph, and in no other graph."""
    with pytest.raises(KernelError, match=r"one is captured on 1 streams of cuda:0 .* once on each stream"):
        at(7, graph=1)
    at(7)
    at(7, graph=1)
    with pytest.raises(KernelError, match="one is captured on 2 streams of cuda:0 at once, and was launched on 1"):
        at(8, graph=1)
    assert at(7, graph=1) == at(7, graph=2)  # and what works goes on


def test_a_capture_is_not_forgotten_while_it_lasts_and_then_it_is(fake_gpu: FakeDriver) -> None:
    at(0), at(1)
    first = at(7, graph=1)
    for graph in range(2, CAPTURES):
        at(7, graph)
    assert at(8, graph=1) != first
    for graph in range(CAPTURES, 5 * CAPTURES):
        at(7, graph)
    assert at(8, graph=1) == first


def test_nothing_is_compiled_or_loaded_in_a_capture(fake_driver: FakeDriver) -> None:
    fake_driver.stream, fake_driver.graph = 7, 1
    with pytest.raises(KernelError, match=r"marlin_hopper\.cu is first used on cuda:0 in a capture: call it once"):
        loader.load("marlin_hopper", ("an instance that nobody loads",), DEVICE)


def test_only_a_tensor_that_was_read_and_not_written_since_may_be_read_early() -> None:
    reads, a, b = Reads(), torch.zeros(4), torch.zeros(4)
    assert not reads.valid([a, b])
    reads.remember([a, b])
    assert reads.valid([a, b]) and reads.valid([b])
    b.add_(1)
    assert not reads.valid([a, b]) and not reads.valid([b])
    reads.remember([a, b])
    assert reads.valid([a, b])
    assert not reads.valid([a, a.clone()])
    b.data = torch.ones(4)  # as a module does that is moved to a GPU; its version stays
    assert not reads.valid([a, b])
    with torch.inference_mode():
        c = torch.zeros(4)  # has no version that would tell of a write
    reads.remember([c])
    assert not reads.valid([c])
    assert len(reads.seen) == 2
    del a
    assert len(reads.seen) == 1
