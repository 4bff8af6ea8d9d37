"""Time GPU work without launch overhead: calls back to back in CUDA graphs, medians of rounds,
speeds of the device.
"""

from __future__ import annotations

import csv
import gc
import io
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from quantkit.core.formats import dtype_name
from quantkit.kernels.loader import toolchain

#: The copies of a weight exceed the L2 cache so many times, and at least these bytes, as in the
#: published figures.
ROTATED, LEAST = 5, 330e6
#: Most copies of a small weight, even if they fit into the cache.
MOST_COPIES = 1024
#: Microseconds of a graph at the floor, and of all rounds of a graph, so that slow kernels are
#: timed fewer times.
GRAPH_US, BUDGET_US = 2_000.0, 500_000.0
ROUNDS = 9
#: The GPU rests so many times as long as it was timed. Without rests it reaches its power limit,
#: which lowers clocks.
REST = 4.0
#: No launch takes less.
SHORTEST_US = 2.0
#: The floor is measured with a square product of this size and a copy of this many bytes.
SQUARE, COPIED = 8192, 1 << 30


@dataclass(frozen=True)
class Device:
    """The GPU and programs of a run, bytes/s of a copy (read and written) and FLOP/s of a dense
    product.
    """

    gpu: str
    torch: str
    cuda: str
    nvrtc: str
    dtype: str
    copy: float
    rate: float


@dataclass(frozen=True)
class Timed:
    """A graph of `calls` back to back, to be replayed in `rounds`."""

    graph: torch.cuda.CUDAGraph
    calls: int
    rounds: int


def copies(size: int, l2: int) -> int:
    """Compute the number of copies of a weight of `size` bytes to take in turn, on a device with
    `l2` bytes of L2.
    """
    return min(MOST_COPIES, math.ceil(max(ROTATED * l2, LEAST) / size))


def repetitions(least: float, seen: float, count: int) -> tuple[int, int]:
    """Compute the calls of a graph and the rounds: all of `count` copies equally often, within the
    budget.

    `least` is the floor of a call in microseconds, `seen` the time of a call launched by itself.
    """
    cycles = max(1, math.ceil(GRAPH_US / (count * max(least, SHORTEST_US))))
    calls = max(1, min(cycles * count, int(BUDGET_US / seen)))
    rounds = max(1, min(ROUNDS, int(BUDGET_US / (calls * seen))))
    return calls, rounds - (rounds + 1) % 2  # odd, so that the median is one of them


def prepared(call: Callable[[int], object], least: float, count: int) -> Timed:
    """Capture `call(i)` for `count` copies of a weight, as often as the budget allows; `least` as
    in `repetitions`.
    """
    for i in range(count):
        call(
            i
            # the first may compile, load or allocate; later launches may fetch weights that were
            # read here early
        )
    seen = seconds(lambda: call(0)) * 1e6
    calls, rounds = repetitions(least, seen, count)
    return Timed(captured(call, calls), calls, rounds)


def captured(call: Callable[[int], object], calls: int) -> torch.cuda.CUDAGraph:
    """Capture `call(0)`, `call(1)` and so on in one graph; each must have been called before,
    outside of any graph.
    """
    graph = torch.cuda.CUDAGraph()
    gc.disable()  # collecting an older graph during a capture breaks it
    try:
        with torch.cuda.graph(graph):
            for i in range(calls):
                call(i)
    finally:
        gc.enable()
    return graph


def medians(timed: Sequence[Timed]) -> list[float]:
    """Measure the median microseconds of a call of each, in rounds of alternating order, with rests
    in between.
    """
    times: list[list[float]] = [[] for _ in timed]
    for turn in range(max(one.rounds for one in timed)):
        order = range(len(timed)) if turn % 2 == 0 else reversed(range(len(timed)))
        for i in order:
            one = timed[i]
            if turn < one.rounds:
                if one.rounds > 1:
                    one.graph.replay()  # keeps the GPU busy until the timed replay is queued
                took = seconds(one.graph.replay)
                times[i].append(took * 1e6 / one.calls)
                time.sleep(REST * took)
    return [median(found) for found in times]


def seconds(work: Callable[[], object]) -> float:
    """Measure the seconds that the current GPU takes for the work that a function queues."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def measured_on(where: torch.device, dtype: torch.dtype) -> Device:
    """Describe a GPU: its name, the versions of the programs, and its measured speeds of a copy and
    a dense product.
    """
    versions = {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "nvrtc": str(toolchain()["nvrtc"]),
    }
    name = torch.cuda.get_device_name(where)
    return Device(
        name,
        **versions,
        dtype=dtype_name(dtype),
        copy=_copy_rate(where),
        rate=_product_rate(where, dtype),
    )


def _copy_rate(where: torch.device) -> float:
    """Measure the bytes a second, read and written, of a copy on the device."""
    source = torch.randint(-(2**31), 2**31 - 1, (COPIED // 4,), dtype=torch.int32, device=where)
    target = torch.empty_like(source)
    # A kernel that negates, because captured copies use the copy engine, which is slower.
    (us,) = medians([Timed(captured(lambda _: torch.bitwise_not(source, out=target), 4), 4, ROUNDS)])
    return 2 * COPIED / us * 1e6


def _product_rate(where: torch.device, dtype: torch.dtype) -> float:
    """Measure the operations a second of a square product, with its weight in the faster of both
    orders.
    """
    random = torch.Generator(where).manual_seed(0)
    x, w = (torch.randn(SQUARE, SQUARE, device=where, generator=random).to(dtype) for _ in range(2))
    y = torch.empty_like(x)
    orders: tuple[Callable[[int], torch.Tensor], ...]
    orders = (lambda _: torch.mm(x, w.t(), out=y), lambda _: torch.mm(x, w, out=y))
    graphs = []
    for order in orders:
        order(0)
        graphs.append(Timed(captured(order, 4), 4, ROUNDS))
    return 2 * SQUARE**3 / min(medians(graphs)) * 1e6


def floor(size: int, flops: float, copy: float, rate: float) -> float:
    """Compute the least microseconds of a kernel that moves `size` bytes and does `flops`."""
    return 1e6 * max(size / copy, flops / rate)


def table(rows: Sequence[dict[str, Any]]) -> bytes:
    """Write rows as a CSV, floats to six digits."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in row.items()} for row in rows)
    return text.getvalue().encode()
