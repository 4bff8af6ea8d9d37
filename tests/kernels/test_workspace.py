"""Launches that may run at the same time never exchange sums in the same memory."""

from __future__ import annotations

import pytest
import torch

from quantkit.errors import KernelError
from quantkit.kernels import loader
from quantkit.kernels.driver import CAPTURES, StreamState, workspace
from tests.kernels.fake_driver import FakeDriver

PLACE = torch.device("cuda", 0)


def at(stream: int, graph: int = 0, source: str = "one") -> int:
    """Return the identity of the workspace of a stream, or of a stream that is captured into a graph."""
    return id(workspace(source, 8, 8, PLACE, StreamState(stream, graph, True)))


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
        loader.load("marlin_hopper", ("an instance that nobody loads",), PLACE)
