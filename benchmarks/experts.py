"""Time the experts of a mixture: the products gate_up and down, and the whole layer, beside other kernels.

Experts are drawn at random for each token, another draw in each call of a CUDA graph, and copies of the weights take
turns, so that nothing is left in the L2 cache. The floor is the time to read the weights of the experts in use, and to
read and write activations, at the speed of a copy. `torch` is `torch._grouped_mm` of bfloat16 weights (sorting is not
timed), `vllm` is vLLM's fused_marlin_moe on the same tensors, where it can be imported.

A layer is: sort the rows, gate_up, silu(gate) * up, down with the weights of the choices, the sum over choices.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_kernels import random_record
from benchmarks.timing import copies, floor, measured_on, medians, prepared
from quantkit.core.quantized_tensor import Scheme
from quantkit.kernels import proof
from quantkit.kernels.grouped import GroupedKernel
from quantkit.kernels.routing import route, silu_multiply, sum_choices
from quantkit.layouts import LAYOUTS

#: Hidden and intermediate width, experts, and experts of a token.
SHAPES = {"qwen3-30b-a3b": (2048, 768, 128, 8), "mixtral-8x7b": (4096, 14336, 8, 2)}
SCHEMES = {"marlin": "int4:g128", "tcfpx": "fp6:channel"}
BATCHES = [1, 16, 64, 256, 2048]
#: Draws of experts that take turns, and different weights of an expert.
DRAWS, RECORDS = 16, 4
COLUMNS = (
    *("model", "batch", "kernel", "scheme", "part", "tile", "time_us", "floor_us", "pct_of_floor", "active", "error"),
    *("gpu", "torch", "copy_GBps"),
)


@dataclass(frozen=True)
class Weights:
    """One product of the experts: copies of the stacked tensors, and RECORDS weights in float32 in turn."""

    kernel: GroupedKernel
    stacks: list[tuple[Tensor, ...]]
    dense: list[Tensor]

    @property
    def bytes_of_expert(self) -> int:
        return sum(tensor.nbytes for tensor in self.stacks[0]) // self.kernel.experts


@dataclass(frozen=True)
class Work:
    """A batch: activations, draws of experts with their weights, and buffers."""

    x: Tensor
    ids: list[Tensor]
    weights: Tensor
    h: Tensor
    a: Tensor
    z: Tensor
    y: Tensor

    @property
    def active(self) -> float:
        """The mean number of experts in use."""
        return sum(len(ids.unique()) for ids in self.ids) / len(self.ids)


def weights(layout: str, scheme: Scheme, experts: int, n: int, k: int, where: torch.device) -> Weights:
    """Pack RECORDS random weights and stack them in turn for all experts, as often as the L2 cache asks for."""
    kernel = GroupedKernel.of(layout, scheme, experts, n, k, where)
    records = [random_record(scheme, n, k, where, seed) for seed in range(RECORDS)]
    packed = [LAYOUTS[layout].pack(record) for record in records]
    turns = torch.arange(experts, device=where) % RECORDS
    stack = tuple(torch.stack([one[name] for one in packed])[turns] for name in kernel.weight.tensors)
    size = sum(tensor.nbytes for tensor in stack)
    count = copies(size, torch.cuda.get_device_properties(where).L2_cache_size)
    stacks = [stack, *(tuple(tensor.clone() for tensor in stack) for _ in range(count - 1))]
    return Weights(kernel, stacks, [record.dequantize() for record in records])


def work(shape: tuple[int, int, int, int], m: int, up: Weights, dtype: torch.dtype) -> Work:
    """Draw activations and experts."""
    hidden, inner, experts, topk = shape
    where = up.dense[0].device
    random = torch.Generator(where).manual_seed(m)
    ids = [
        torch.rand(m, experts, device=where, generator=random).argsort(1)[:, :topk].int().contiguous()
        for _ in range(DRAWS)
    ]
    x = proof.activations(up.dense[0], m, dtype)
    rows = m * topk
    buffers = (torch.empty(rows, width, dtype=dtype, device=where) for width in (2 * inner, inner, hidden))
    drawn = torch.rand(m, topk, device=where, generator=random)
    return Work(x, ids, drawn / drawn.sum(1, keepdim=True), *buffers, torch.empty_like(x))


def layer(up: Weights, down: Weights, one: Work, i: int) -> Tensor:
    """Compute the experts with draw and copies number i."""
    m, topk = one.ids[0].shape
    found = route(one.ids[i % DRAWS], up.kernel.experts, up.kernel.tile(m, topk))
    up.kernel.launch(up.stacks[i % len(up.stacks)], one.x, found, one.h, gather=True)
    silu_multiply(one.h, one.a)
    stack = down.stacks[i % len(down.stacks)]
    down.kernel.launch(stack, one.a, found, one.z, gather=False, weights=one.weights)
    sum_choices(one.z, one.y)
    return one.y


def reference(up: Weights, down: Weights, one: Work) -> Tensor:
    """Compute the experts of the first draw in float32, rounded where the kernels round."""
    m, topk = one.ids[0].shape
    rows, dtype = one.ids[0].reshape(-1), one.x.dtype
    z = torch.zeros_like(one.z, dtype=torch.float32)
    for record in range(RECORDS):
        own = (rows % RECORDS == record).nonzero()[:, 0]
        h = proof.reference(one.x[own // topk], up.dense[record]).to(dtype).float()
        gate, value = h.chunk(2, 1)
        a = (torch.nn.functional.silu(gate) * value).to(dtype)
        z[own] = proof.reference(a, down.dense[record]) * one.weights.reshape(-1, 1)[own]
    return z.to(dtype).float().view(m, topk, -1).sum(1).to(dtype)


def calls(up: Weights, down: Weights, one: Work) -> dict[str, Callable[[int], object]]:
    """List what is timed of our own."""
    m, topk = one.ids[0].shape
    tile = up.kernel.tile(m, topk)
    lists = [route(ids, up.kernel.experts, tile) for ids in one.ids]

    def gate_up(i: int) -> None:
        up.kernel.launch(up.stacks[i % len(up.stacks)], one.x, lists[i % DRAWS], one.h, gather=True)

    def down_(i: int) -> None:
        stack = down.stacks[i % len(down.stacks)]
        down.kernel.launch(stack, one.a, lists[i % DRAWS], one.z, gather=False, weights=one.weights)

    return {
        "route": lambda i: route(one.ids[i % DRAWS], up.kernel.experts, tile),
        "gate_up": gate_up,
        "down": down_,
        "silu_multiply": lambda i: silu_multiply(one.h, one.a),
        "sum_choices": lambda i: sum_choices(one.z, one.y),
        "layer": partial(layer, up, down, one),
    }


def floors(up: Weights, down: Weights, one: Work, copy: float) -> dict[str, float]:
    """Compute the least microseconds of the products and of the layer."""
    sizes = {
        "gate_up": one.active * up.bytes_of_expert + one.x.nbytes + one.h.nbytes,
        "down": one.active * down.bytes_of_expert + one.a.nbytes + one.z.nbytes,
    }
    products = sum(sizes.values())
    return {part: floor(int(size), 0, copy, 1) for part, size in {**sizes, "layer": products}.items()}


def torch_calls(shape: tuple[int, int, int, int], one: Work) -> dict[str, Callable[[int], object]]:
    """List the products of torch with dense bfloat16 weights, of rows that are sorted already."""
    grouped: Any = getattr(torch, "_grouped_mm", None) or getattr(torch.nn.functional, "grouped_mm", None)
    if grouped is None:
        return {}
    hidden, inner, experts, _ = shape
    where = one.x.device
    ends = [torch.bincount(ids.reshape(-1), minlength=experts).cumsum(0).to(torch.int32) for ids in one.ids]
    found: dict[str, Callable[[int], object]] = {}
    for name, n, k in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        dense = torch.randn(experts, n, k, dtype=torch.bfloat16, device=where).transpose(1, 2)
        rows = torch.randn(one.ids[0].numel(), k, dtype=torch.bfloat16, device=where)
        found[name] = lambda i, dense=dense, rows=rows: grouped(rows, dense, offs=ends[i % DRAWS])  # type: ignore[misc]
    return found


def vllm_layer(up: Weights, down: Weights, one: Work) -> Callable[[int], Tensor] | None:
    """Make vLLM's experts on the same tensors; None if it cannot be imported."""
    fused = None
    for module in ("fused_moe.experts.marlin_moe", "fused_moe.fused_marlin_moe"):
        try:
            fused = importlib.import_module(f"vllm.model_executor.layers.{module}").fused_marlin_moe
            types = importlib.import_module("vllm.scalar_type").scalar_types
            break
        except Exception:  # an engine that is not complete fails to import in many ways
            continue
    if fused is None:
        return None

    def call(i: int) -> Tensor:
        (w1, s1), (w2, s2) = up.stacks[i % len(up.stacks)], down.stacks[i % len(down.stacks)]
        found: Tensor = fused(
            one.x,
            w1,
            w2,
            None,
            None,
            s1,
            s2,
            one.weights,
            one.ids[i % DRAWS],
            quant_type_id=types.uint4b8.id,
            global_num_experts=up.kernel.experts,
        )
        return found

    return call


def rows(args: argparse.Namespace, where: torch.device) -> Iterator[dict[str, Any]]:
    """Measure all cells."""
    dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float16
    device = measured_on(where, dtype)
    print(f"{device.gpu}: copy {device.copy / 1e9:.0f} GB/s", flush=True)
    common = {"gpu": device.gpu, "torch": device.torch, "copy_GBps": round(device.copy / 1e9)}
    for model in args.model:
        shape = SHAPES[model]
        hidden, inner, experts, _ = shape
        for layout in args.layout:
            scheme = Scheme.parse(SCHEMES[layout])
            up = weights(layout, scheme, experts, 2 * inner, hidden, where)
            down = weights(layout, scheme, experts, hidden, inner, where)
            up.kernel.load(dtype, where)
            down.kernel.load(dtype, where)
            for m in args.batch:
                one = work(shape, m, up, dtype)
                wanted = reference(up, down, one)
                error = proof.relative_error(layer(up, down, one, 0), wanted)
                least = floors(up, down, one, device.copy)
                first = {**common, "model": model, "batch": m, "scheme": scheme.label, "active": round(one.active, 1)}
                ours = {**first, "kernel": layout, "tile": up.kernel.tile(m, shape[3])}
                yield from timed(ours, calls(up, down, one), least, DRAWS * len(down.stacks), error)
                for tile, _ in up.kernel.costs if args.sweep else ():
                    if tile != ours["tile"]:
                        others = other_tile(up, down, one, tile)
                        yield from timed({**ours, "tile": tile}, others, least, DRAWS, error)
                if layout != "marlin":
                    continue
                theirs = vllm_layer(up, down, one)
                if theirs is not None:
                    name = {**first, "kernel": "vllm"}
                    yield from attempted(name, {"layer": theirs}, least, wanted)
                dense = {**first, "kernel": "torch", "scheme": "bfloat16"}
                size = one.active * 2 * hidden * inner
                least = {
                    part: floor(int(count * size), 0, device.copy, 1) for part, count in (("gate_up", 2), ("down", 1))
                }
                yield from attempted(dense, torch_calls(shape, one), least, None)
            del up, down
            torch.cuda.empty_cache()


def other_tile(up: Weights, down: Weights, one: Work, tile: int) -> dict[str, Callable[[int], object]]:
    """List both products with another tile than the chosen one."""
    lists = [route(ids, up.kernel.experts, tile) for ids in one.ids]

    def product(i: int, of: Weights, gather: bool) -> None:
        x, y = (one.x, one.h) if gather else (one.a, one.z)
        of.kernel.launch(of.stacks[i % len(of.stacks)], x, lists[i % DRAWS], y, gather=gather)

    return {"gate_up": partial(product, of=up, gather=True), "down": partial(product, of=down, gather=False)}


def attempted(
    first: dict[str, Any], named: dict[str, Callable[[int], Any]], least: dict[str, float], wanted: Tensor | None
) -> Iterator[dict[str, Any]]:
    """Time kernels of others; one that fails is a line on stderr."""
    try:
        error = None if wanted is None else proof.relative_error(named["layer"](0), wanted)
        yield from timed(first, named, least, DRAWS, error)
    except Exception:
        print(f"{first['kernel']} failed:", traceback.format_exc(limit=-1), file=sys.stderr, flush=True)


def timed(
    first: dict[str, Any],
    named: dict[str, Callable[[int], object]],
    least: dict[str, float],
    count: int,
    error: float | None,
) -> Iterator[dict[str, Any]]:
    """Time calls in CUDA graphs, `count` draws and copies in turn."""
    for part, call in named.items():
        floor_us = least.get(part, 0.0)
        (us,) = medians([prepared(call, max(floor_us, 2.0), count)])
        yield {
            **first,
            "part": part,
            "time_us": round(us, 2),
            "floor_us": round(floor_us, 2) if floor_us else "",
            "pct_of_floor": round(100 * floor_us / us, 1) if floor_us else "",
            "error": "" if error is None else f"{error:.2g}",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, required=True, help="file to write")
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--layout", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--batch", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--sweep", action="store_true", help="time the tiles that were not chosen, too")
    args = parser.parse_args()
    with args.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in rows(args, torch.device("cuda", torch.cuda.current_device())):
            writer.writerow(row)
            file.flush()
            print(*(f"{key}={row.get(key, '')}" for key in COLUMNS[:11]), flush=True)


if __name__ == "__main__":
    main()
