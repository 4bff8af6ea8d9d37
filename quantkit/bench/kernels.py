"""Time the kernels of packed weights beside cuBLAS, the speed of a copy and the floor, all in one
run.

Every call takes the next of several copies of the weight, which together exceed the L2 cache, so
weights come from memory as in a model. Kernel and cuBLAS take turns. Activations are random,
because zeros draw less power and raise the clocks. cuBLAS gets unquantized weights. A wrong product
is an error, and is not timed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from quantkit.bench.roofline import Device, Layer, floor, means, row_of
from quantkit.bench.timing import ROTATED, Timed, copies, measured_on, medians, prepared
from quantkit.core import sparsity
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import KernelError, about
from quantkit.kernels import LAUNCHERS, MATMULS, missing
from quantkit.kernels.proof import activations, mismatch, reference, relative_error
from quantkit.layouts import LAYOUTS
from quantkit.progress import Progress


def default_layouts() -> list[str]:
    """List the layouts with a kernel, each under one name."""
    return [layout for layout in MATMULS if LAYOUTS[layout].family == layout]


def kernels(
    layers: Sequence[Layer],
    tokens: Sequence[int],
    layouts: Sequence[str],
    schemes: Sequence[Scheme],
    dtype: torch.dtype,
    progress: Progress,
    portable: bool = False,
) -> dict[str, Any]:
    """Time the kernels of `layouts` on every layer with every number of tokens; no `schemes` stands
    for the defaults.

    Returns the `device`, `rows` of a CSV, and their `means`. `dtype` is the dtype of the
    activations, float16 or bfloat16; `portable` leaves Hopper's kernels out. Before anything is
    timed, LayoutError for a shape or a scheme that a layout cannot hold, and KernelError without a
    GPU or CuPy. KernelError for a product outside the bounds of `proof.mismatch`, and if the GPU's
    memory does not suffice.
    """
    jobs = []
    for layer in layers:
        for layout in layouts:
            for scheme in schemes or map(Scheme.parse, LAUNCHERS[layout].schemes):
                with about(
                    f"{layer.n}x{layer.k} in {scheme.label} cannot be timed as {layout}, choose "
                    "others"
                ):
                    LAYOUTS[layout].check(scheme, layer.n, layer.k)
                jobs.append((layer, layout, scheme))
    where = require_gpu(layouts)
    device = measured_on(where, dtype)
    rows: list[dict[str, Any]] = []
    bar = progress.bar(len(jobs) * len(tokens), "timing")
    for layer, layout, scheme in jobs:
        try:
            for timed in _time_weight(
                layer, tokens, layout, scheme, dtype, device, where, progress, portable
            ):
                rows.append(timed)
                bar.update(1)
        except torch.OutOfMemoryError as error:
            raise KernelError(
                f"{layer.n}x{layer.k} with up to {max(tokens)} tokens does not fit into the GPU's "
                "memory",
                "leave it out, or fewer tokens with --m",
            ) from error
    bar.close()
    return {"device": asdict(device), "rows": rows, "means": means(rows)}


def require_gpu(layouts: Sequence[str]) -> torch.device:
    """Return the current GPU; KernelError if there is none, or it cannot run the kernels of
    `layouts`.
    """
    where = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    for layout in layouts:
        problem = missing(layout, where)
        if problem is not None:
            raise KernelError(
                f"the {layout} kernel cannot be timed here: {problem}; quantkit doctor says what "
                "runs"
            )
    return where


def random_record(
    scheme: Scheme, n: int, k: int, device: torch.device, seed: int = 0
) -> QuantizedTensor:
    """Make a random weight of `scheme` `[n, k]`: every code, scales around 0.01, the same in every
    run.
    """
    random = torch.Generator(device).manual_seed(seed)
    top, g = 2**scheme.format.bits, scheme.groups(k)
    codes = torch.randint(0, top, (n, k), dtype=torch.uint8, device=device, generator=random)
    if scheme.sparsity is not None:
        stored = sparsity.mask(torch.rand(n, k, device=device, generator=random))
        codes.masked_fill_(~stored, scheme.format.zero_code)
    scales = torch.rand(n, g, device=device, generator=random).add_(0.5).mul_(0.01).half()
    zeros = None
    if not scheme.symmetric:
        zeros = torch.randint(0, top, (n, g), dtype=torch.uint8, device=device, generator=random)
    return QuantizedTensor(scheme, codes, scales, zeros)


def flops(layout: str, n: int, k: int, m: int) -> int:
    """Count the operations of a product: half of them where only two of each four weights are
    stored.
    """
    return 2 * m * n * k // (2 if LAUNCHERS[layout].sparse else 1)


def _time_weight(
    layer: Layer,
    tokens: Sequence[int],
    layout: str,
    scheme: Scheme,
    dtype: torch.dtype,
    device: Device,
    where: torch.device,
    progress: Progress,
    portable: bool,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of tokens, all with one random weight."""
    gc.collect()  # frees the memory of the previous weight
    n, k = layer.n, layer.k
    l2 = torch.cuda.get_device_properties(where).L2_cache_size
    q = random_record(scheme, n, k, where)
    dense = q.dequantize()
    one = LAYOUTS[layout].pack(q)
    del q
    size = sum(tensor.nbytes for tensor in one.values())
    packed = [one] + [
        {name: part.clone() for name, part in one.items()} for _ in range(copies(size, l2) - 1)
    ]
    if len(packed) * size < ROTATED * l2:
        progress.warn(
            f"{layer.name}: {len(packed)} copies are {len(packed) * size} bytes, less than "
            f"{ROTATED} L2"
        )
    count = copies(n * k * dtype.itemsize, l2)
    plain = _unquantized(n, k, dtype, where)
    w = [plain.clone() for _ in range(count)]
    wt = [plain.t().contiguous() for _ in range(count)]
    del plain
    launcher = LAUNCHERS[layout]
    for m in tokens:
        x = activations(dense, m, dtype)
        expected = reference(x, dense).to(dtype)
        out, y = torch.full_like(expected, float("nan")), torch.empty_like(expected)

        def ours(i: int, x: Tensor = x, out: Tensor = out) -> object:
            return launcher.matmul(
                x, packed[i % len(packed)], scheme, n, k, out=out, portable=portable
            )

        def cublas_w(i: int, x: Tensor = x, y: Tensor = y) -> object:
            return torch.mm(x, w[i % count].t(), out=y)

        def cublas_wt(i: int, x: Tensor = x, y: Tensor = y) -> object:
            return torch.mm(x, wt[i % count], out=y)

        moved, work = x.nbytes + out.nbytes, flops(layout, n, k, m)
        least = floor(size + moved, work, device.copy, device.rate)
        least_dense = floor(w[0].nbytes + moved, 2 * m * n * k, device.copy, device.rate)
        mine = prepared(ours, least, len(packed))
        peers = [prepared(order, least_dense, count) for order in (cublas_w, cublas_wt)]
        error = _checked(
            mine, out, expected, f"{layout}, {scheme.label}, {n}x{k}, {m} {device.dtype} tokens"
        )
        time_us, cublas_w_us, cublas_wt_us = medians([mine, *peers])
        yield row_of(
            layer,
            m,
            device,
            layout=layout,
            scheme=scheme.label,
            path=launcher.fastest(scheme, n, k, where, portable).path,
            times=(time_us, cublas_w_us, cublas_wt_us),
            floor_us=least,
            weight_bytes=size,
            relative_error=error,
            copies=len(packed),
            calls=mine.calls,
            rounds=mine.rounds,
        )


def _unquantized(n: int, k: int, dtype: torch.dtype, where: torch.device) -> Tensor:
    """Make a dense weight `[n, k]` of normal numbers.

    Dequantized or half-zero weights draw less power, so cuBLAS would be faster with them.
    """
    random = torch.Generator(where).manual_seed(1)
    return torch.randn(n, k, device=where, generator=random).mul_(0.02).to(dtype)


def _checked(timed: Timed, out: Tensor, expected: Tensor, what: str) -> float:
    """Replay a graph, and compute the relative error of `out`; KernelError if it is too large."""
    out.fill_(float("nan"))
    timed.graph.replay()
    wrong = mismatch(out, expected)
    if wrong is not None:
        raise KernelError(f"the product {wrong}: it is wrong, not timed", subject=what)
    return relative_error(out, expected)
