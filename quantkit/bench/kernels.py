"""Times kernels of packed weights beside cuBLAS, the speed of a copy and the floor, all in one run.

A time is worth nothing unless the weight came from memory, as in a model: every call takes the next of several copies,
which together exceed the L2 cache many times. Calls stand back to back in a CUDA graph, so that no launch is timed;
kernel and cuBLAS take turns, and medians of the rounds are kept. Random signed numbers are multiplied, since zeros draw
less power and let clocks rise; cuBLAS has weights that were never quantized. A kernel whose product is wrong has no
time: that is an error. Kernels that can begin while the call before them ends do so here as they do in a model.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from quantkit.bench.roofline import Cell, Device, Layer, floor, means
from quantkit.core import sparsity
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.core.tensors import dtype_name
from quantkit.errors import KernelError, about
from quantkit.kernels import MATMULS, missing, toolchain
from quantkit.kernels.proof import activations, mismatch, reference, relative_error
from quantkit.layouts import LAYOUTS, family, marlin24
from quantkit.progress import Progress

#: layout -> the schemes that it is timed with unless others are asked for.
SCHEMES = {
    "marlin": ("int4:g128", "int4:channel"),
    "marlin24": ("int4:g128:24", "int4:channel:24"),
    "marlin24-ct": ("int4:g128:24",),
    "tcfpx": ("fp6:channel", "fp5:channel"),
    "quick": ("int4:g128:asym",),
}
#: Copies of a weight exceed the L2 so many times, and come to these bytes, as in the published figures.
ROTATED, LEAST = 5, 330e6
#: Of a small weight no more copies are made, even if they stay in the cache.
MOST_COPIES = 1024
#: What a graph takes at the floor; what all rounds of one may take, so that a slow kernel is timed fewer times.
GRAPH_US, BUDGET_US = 2_000.0, 500_000.0
ROUNDS = 9
#: After a timing the GPU rests so many times as long: busy without a pause it comes to its power limit, and what is
#: timed then is how the limit lowers clocks.
REST = 4.0
#: No launch is over sooner.
SHORTEST_US = 2.0
#: Size of the square product, and bytes of the copy, whose speeds make the floor.
SQUARE, COPIED = 8192, 1 << 30


@dataclass(frozen=True)
class Bench:
    """What was measured: the device and its cells."""

    device: Device
    cells: tuple[Cell, ...]

    def rows(self) -> list[dict[str, Any]]:
        """Return the cells as rows of a CSV."""
        return [cell.row(self.device) for cell in self.cells]

    def to_dict(self) -> dict[str, Any]:
        """Return the device and the rows as one JSON object."""
        rows = self.rows()
        return {"device": asdict(self.device), "rows": rows, "means": means(rows)}


@dataclass(frozen=True)
class Timed:
    """A graph of `calls` back to back, to be replayed in `rounds`."""

    graph: torch.cuda.CUDAGraph
    calls: int
    rounds: int


def default_layouts() -> list[str]:
    """Return the layouts with a kernel, each under one name."""
    return [layout for layout in MATMULS if family(layout) == layout]


def kernels(
    layers: Sequence[Layer],
    tokens: Sequence[int],
    layouts: Sequence[str],
    schemes: Sequence[Scheme],
    dtype: torch.dtype,
    progress: Progress,
) -> Bench:
    """Time the kernels of `layouts` on every layer with every number of tokens; `schemes`: none for the usual ones.

    `dtype` is that of the activations, float16 or bfloat16. Before anything is timed, LayoutError for a shape or a
    scheme that a layout cannot hold and KernelError without a GPU or CuPy. KernelError for a product that is further
    from float32 than `proof.mismatch` allows, and if the GPU's memory does not suffice.
    """
    jobs = []
    for layer in layers:
        for layout in layouts:
            for scheme in schemes or map(Scheme.parse, SCHEMES[layout]):
                with about(f"{layer.n}x{layer.k} in {scheme.label} cannot be timed as {layout}, choose others"):
                    LAYOUTS[layout].check(scheme, layer.n, layer.k)
                    scheme.groups(layer.k)
                jobs.append((layer, layout, scheme))
    where = gpu(layouts)
    device = measured_on(where, dtype)
    cells: list[Cell] = []
    bar = progress.bar(len(jobs) * len(tokens), "timing")
    for layer, layout, scheme in jobs:
        try:
            for cell in _weight(layer, tokens, layout, scheme, dtype, device, where, progress):
                cells.append(cell)
                bar.update(1)
        except torch.OutOfMemoryError as error:
            raise KernelError(
                f"{layer.n}x{layer.k} with up to {max(tokens)} tokens does not fit into the GPU's memory: "
                "leave it out, or fewer tokens with --m"
            ) from error
    bar.close()
    return Bench(device, tuple(cells))


def gpu(layouts: Sequence[str]) -> torch.device:
    """Return the current GPU; KernelError if there is none, or it cannot run the kernels of `layouts`."""
    where = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    for layout in layouts:
        problem = missing(layout, where)
        if problem is not None:
            raise KernelError(f"the {layout} kernel cannot be timed here: {problem}; quantkit doctor says what runs")
    return where


def record(scheme: Scheme, n: int, k: int, device: torch.device, seed: int = 0) -> QuantizedTensor:
    """Return a random weight of `scheme` `[n, k]`: every code, scales around 0.01, the same in every run."""
    random = torch.Generator(device).manual_seed(seed)
    top, g = 2**scheme.format.bits, scheme.groups(k)
    codes = torch.randint(0, top, (n, k), dtype=torch.uint8, device=device, generator=random)
    if scheme.sparsity is not None:
        kept = sparsity.mask(torch.rand(n, k, device=device, generator=random))
        codes.masked_fill_(~kept, scheme.format.zero_code)
    scales = torch.rand(n, g, device=device, generator=random).add_(0.5).mul_(0.01).half()
    zeros = None
    if not scheme.symmetric:
        zeros = torch.randint(0, top, (n, g), dtype=torch.uint8, device=device, generator=random)
    return QuantizedTensor(scheme, codes, scales, zeros)


def copies(size: int, l2: int) -> int:
    """Return how many copies of a weight of `size` bytes are taken in turn, on a device with `l2` bytes of L2."""
    return min(MOST_COPIES, math.ceil(max(ROTATED * l2, LEAST) / size))


def repetitions(least: float, seen: float, count: int) -> tuple[int, int]:
    """Return the calls in a graph and the rounds: whole turns through `count` copies where that takes no minutes.

    `least` are microseconds that a call cannot go below, `seen` those that one took, launched alone.
    """
    turns = max(1, math.ceil(GRAPH_US / (count * max(least, SHORTEST_US))))
    calls = max(1, min(turns * count, int(BUDGET_US / seen)))
    rounds = max(1, min(ROUNDS, int(BUDGET_US / (calls * seen))))
    return calls, rounds - (rounds + 1) % 2  # odd, so that the median is one of them


def flops(layout: str, n: int, k: int, m: int) -> int:
    """Return the operations of a product that a layout leaves to do: half where only kept weights are stored."""
    return 2 * m * n * k // (2 if family(layout) == marlin24.NAME else 1)


def measured_on(where: torch.device, dtype: torch.dtype) -> Device:
    """Return what a GPU is, and the speeds of a copy and of a dense product on it."""
    versions = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda), "nvrtc": str(toolchain()["nvrtc"])}
    name = torch.cuda.get_device_name(where)
    return Device(name, **versions, dtype=dtype_name(dtype), copy=_copy_rate(where), rate=_product_rate(where, dtype))


def _copy_rate(where: torch.device) -> float:
    """Return the bytes a second, read and written, of a copy on the device."""
    source = torch.randint(-(2**31), 2**31 - 1, (COPIED // 4,), dtype=torch.int32, device=where)
    target = torch.empty_like(source)
    # A kernel that negates: captured copies are done by the copy engine, which is slower.
    (us,) = medians([Timed(captured(lambda _: torch.bitwise_not(source, out=target), 4), 4, ROUNDS)])
    return 2 * COPIED / us * 1e6


def _product_rate(where: torch.device, dtype: torch.dtype) -> float:
    """Return the operations a second of the faster order of a square product."""
    random = torch.Generator(where).manual_seed(0)
    x, w = (torch.randn(SQUARE, SQUARE, device=where, generator=random).to(dtype) for _ in range(2))
    y = torch.empty_like(x)
    orders: tuple[Callable[[int], Tensor], ...]
    orders = (lambda _: torch.mm(x, w.t(), out=y), lambda _: torch.mm(x, w, out=y))
    graphs = []
    for order in orders:
        order(0)
        graphs.append(Timed(captured(order, 4), 4, ROUNDS))
    return 2 * SQUARE**3 / min(medians(graphs)) * 1e6


def _weight(
    layer: Layer,
    tokens: Sequence[int],
    layout: str,
    scheme: Scheme,
    dtype: torch.dtype,
    device: Device,
    where: torch.device,
    progress: Progress,
) -> Iterator[Cell]:
    """Yield a cell for each number of tokens by one random weight."""
    gc.collect()  # the memory of the weight before
    n, k = layer.n, layer.k
    l2 = torch.cuda.get_device_properties(where).L2_cache_size
    q = record(scheme, n, k, where)
    dense = q.dequantize()
    one = LAYOUTS[layout].pack(q)
    del q
    size = sum(tensor.nbytes for tensor in one.values())
    packed = [one] + [{name: part.clone() for name, part in one.items()} for _ in range(copies(size, l2) - 1)]
    if len(packed) * size < ROTATED * l2:
        progress.warn(f"{layer.name}: {len(packed)} copies are {len(packed) * size} bytes, less than {ROTATED} L2")
    count = copies(n * k * dtype.itemsize, l2)
    plain = _unquantized(n, k, dtype, where)
    w = [plain.clone() for _ in range(count)]
    wt = [plain.t().contiguous() for _ in range(count)]
    del plain
    kernel = MATMULS[layout]
    for m in tokens:
        x = activations(dense, m, dtype)
        wanted = reference(x, dense).to(dtype)
        out, y = torch.full_like(wanted, float("nan")), torch.empty_like(wanted)

        def ours(i: int, x: Tensor = x, out: Tensor = out) -> object:
            return kernel(x, packed[i % len(packed)], scheme, n, k, out=out)

        def cublas_w(i: int, x: Tensor = x, y: Tensor = y) -> object:
            return torch.mm(x, w[i % count].t(), out=y)

        def cublas_wt(i: int, x: Tensor = x, y: Tensor = y) -> object:
            return torch.mm(x, wt[i % count], out=y)

        moved, work = x.nbytes + out.nbytes, flops(layout, n, k, m)
        least = floor(size + moved, work, device.copy, device.rate)
        least_dense = floor(w[0].nbytes + moved, 2 * m * n * k, device.copy, device.rate)
        mine = prepared(ours, least, len(packed))
        peers = [prepared(order, least_dense, count) for order in (cublas_w, cublas_wt)]
        error = _checked(mine, out, wanted, f"{layout}, {scheme.label}, {n}x{k}, {m} {device.dtype} tokens")
        us, us_w, us_wt = medians([mine, *peers])
        rotation = (len(packed), mine.calls, mine.rounds)
        yield Cell(layer, m, layout, scheme.label, kernel.__name__, us, us_w, us_wt, size, least, error, *rotation)


def _unquantized(n: int, k: int, dtype: torch.dtype, where: torch.device) -> Tensor:
    """Return a weight `[n, k]` as a model has it that is not quantized: normal numbers, whatever layout is timed.

    Those of a grid, or half of them zeros, draw less power: multiplied by them, cuBLAS would be up to 2 % faster.
    """
    random = torch.Generator(where).manual_seed(1)
    return torch.randn(n, k, device=where, generator=random).mul_(0.02).to(dtype)


def prepared(call: Callable[[int], object], least: float, count: int) -> Timed:
    """Return calls of `call(i)` as a graph, as many as fit into the budget; there are `count` copies of a weight."""
    for i in range(count):
        call(i)  # the first may compile, load or allocate; a weight that has been read may be fetched early
    seen = seconds(lambda: call(0)) * 1e6
    calls, rounds = repetitions(least, seen, count)
    return Timed(captured(call, calls), calls, rounds)


def _checked(timed: Timed, out: Tensor, wanted: Tensor, what: str) -> float:
    """Return the relative error of what the graph leaves in `out`; KernelError if it is too large."""
    out.fill_(float("nan"))
    timed.graph.replay()
    wrong = mismatch(out, wanted)
    if wrong is not None:
        raise KernelError(f"{what}: the product {wrong}: it is wrong, not timed")
    return relative_error(out, wanted)


def captured(call: Callable[[int], object], calls: int) -> torch.cuda.CUDAGraph:
    """Return a graph of `call(0)`, `call(1)` and so on; each has been called before, outside of any graph."""
    graph = torch.cuda.CUDAGraph()
    gc.disable()  # an older graph that is collected during a capture spoils it
    try:
        with torch.cuda.graph(graph):
            for i in range(calls):
                call(i)
    finally:
        gc.enable()
    return graph


def medians(timed: Sequence[Timed]) -> list[float]:
    """Return the median microseconds of a call of each, in rounds of alternating order, with rests between."""
    times: list[list[float]] = [[] for _ in timed]
    for turn in range(max(one.rounds for one in timed)):
        order = range(len(timed)) if turn % 2 == 0 else reversed(range(len(timed)))
        for i in order:
            one = timed[i]
            if turn < one.rounds:
                if one.rounds > 1:
                    one.graph.replay()  # the GPU is busy with it until the timed one is queued
                took = seconds(one.graph.replay)
                times[i].append(took * 1e6 / one.calls)
                time.sleep(REST * took)
    return [median(found) for found in times]


def seconds(work: Callable[[], object]) -> float:
    """Return how long the current GPU is at what `work` queues."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
