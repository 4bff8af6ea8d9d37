"""The steps of a mixture of experts beside its products: rows are sorted by expert and gathered,
activated, and added up (kernels/routing.cu, kernels/expert_steps.cu).

A row is one of the `topk` choices of a token. The list of rows has a fixed shape and stays on the
GPU, so the host never waits for it, and a CUDA graph can be replayed with other experts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.core.formats import dtype_name
from quantkit.errors import KernelError
from quantkit.kernels import driver, loader
from quantkit.kernels.contract import ACTIVATIONS, TYPES, check_operand, not_on_a_gpu

#: dtype of experts' numbers -> the instance that reads them.
INSTANCES = {torch.int32: "routing<int>", torch.int64: "routing<long long>"}
SOURCES = {
    "routing": tuple(INSTANCES.values()),
    "expert_steps": tuple(
        [f"{name}<{TYPES[x]}>" for name in ("silu_multiply", "sum_choices") for x in ACTIVATIONS]
        + ["gather_rows<half, half>", "gather_rows<bfloat, bfloat>", "gather_rows<bfloat, half>"]
    ),
}
#: The counts of a block, one for each warp and expert, fit into the shared memory of every GPU.
MAX_EXPERTS = 512
#: Threads and warps of the block that sorts, threads of a block of the other steps.
SORTERS, WARPS, THREADS = 1024, 32, 256
#: Numbers that a thread of the other steps loads at once.
VECTOR = 8
#: Most rows; the kernels count them in 32 bits.
MAX_ROWS = 1 << 24


@dataclass(frozen=True)
class Routing:
    """The rows of `m` tokens, `topk` of each, by expert: int32 `[...]`, as kernels/routing.cuh
    says.
    """

    list: Tensor
    m: int
    topk: int
    experts: int
    tile: int
    max_tiles: int

    @property
    def rows(self) -> int:
        """Count the choices of all tokens."""
        return self.m * self.topk


def most_tiles(rows: int, experts: int, tile: int) -> int:
    """Count the tiles if the rows are on as many experts as possible, and one of these has all
    others.
    """
    active = min(rows, experts)
    return active + (rows - active) // tile


def list_size(rows: int, experts: int, tile: int) -> int:
    """Count the numbers of a list: two counts, the experts of tiles, the places of rows in tiles
    that may be padded.
    """
    return 2 + most_tiles(rows, experts, tile) + rows + min(rows, experts) * (tile - 1)


def load(device: torch.device) -> None:
    """Compile and load the kernels of all steps."""
    for source, instances in SOURCES.items():
        loader.load(source, instances, device)


def route(topk_ids: Tensor, experts: int, tile: int) -> Routing:
    """Sort the rows of `topk_ids` `[m, topk]` (int32 or int64, on a GPU) by expert, in tiles of
    `tile` rows.

    Rows of an expert keep their order. Numbers outside 0 to `experts` - 1 are experts of other
    ranks. KernelError for other tensors, and for more than 512 experts.
    """
    _check_numbers(topk_ids, experts)
    (m, topk), device = topk_ids.shape, topk_ids.device
    rows = m * topk
    found = torch.empty(list_size(rows, experts, tile), dtype=torch.int32, device=device)
    routing = Routing(found, m, topk, experts, tile, most_tiles(rows, experts, tile))
    shared = 4 * (WARPS + 1) * (experts + 1)
    plan = _planned("routing", INSTANCES[topk_ids.dtype], device, (1,), SORTERS, shared)
    driver.submit(
        plan, device, (), (topk_ids, found), sizes=(rows, experts, tile, routing.max_tiles)
    )
    return routing


def gather_rows(
    x: Tensor, routing: Routing, choices: int, y: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Put row r // `choices` of `x` `[rows, k]` to the place of row r in the tiles: returns
    `[max_tiles * tile, k]`.

    From bfloat16 to float16, each row is multiplied by a power of two; the second tensor has the
    float32 factors that invert this. Places without a row are not written. Rows of `y` whose expert
    is not here become zeros. Operands are not checked.
    """
    k, device = x.shape[1], x.device
    places = routing.max_tiles * routing.tile
    found = torch.empty(places, k, dtype=dtype, device=device)
    powers = None if dtype == x.dtype else torch.empty(places, device=device)
    # A warp for each place or row without an expert.
    grid = (-(-(len(routing.list) - 2 - routing.max_tiles) // (THREADS // 32)),)
    instance = f"gather_rows<{TYPES[x.dtype]}, {TYPES[dtype]}>"
    sizes = (routing.max_tiles, routing.tile, choices, k // VECTOR, y.shape[1] // VECTOR)
    plan = _planned("expert_steps", instance, device, grid)
    driver.submit(plan, device, (), (x, routing.list, found, powers, y), sizes=sizes)
    return found, powers


def silu_multiply(h: Tensor, a: Tensor) -> None:
    """Write silu(gate) * up into `a` `[rows, n]`; `h` is `[rows, 2 n]`, first gate, then up.
    Rounded once.

    KernelError unless both are float16 or bfloat16, contiguous on one GPU, and n is a multiple of
    eight.
    """
    rows, n = a.shape
    _step("silu_multiply", h, (rows, 2 * n), a, ())


def sum_choices(z: Tensor, y: Tensor) -> None:
    """Add up `z` `[m * topk, n]` over the topk rows of each token into `y` `[m, n]`, in float32,
    rounded once.

    KernelError unless both are float16 or bfloat16, contiguous on one GPU, and n is a multiple of
    eight.
    """
    m, n = y.shape
    choices = z.shape[0] // max(1, m)
    _step("sum_choices", z, (m * choices, n), y, (choices,))


def _step(
    name: str, given: Tensor, shape: tuple[int, int], out: Tensor, sizes: tuple[int, ...]
) -> None:
    device = out.device
    check_operand(name, "result", out, ACTIVATIONS, tuple(out.shape), device)
    check_operand(name, "input", given, (out.dtype,), shape, device)
    if not out.numel() or out.shape[1] % VECTOR:
        raise KernelError(f"the {name} kernel cannot make {list(out.shape)} of {list(given.shape)}")
    if device.type != "cuda":
        raise not_on_a_gpu(name, "result", device)
    vectors = out.shape[1] // VECTOR
    grid = (out.shape[0], -(-vectors // THREADS))
    plan = _planned("expert_steps", f"{name}<{TYPES[out.dtype]}>", device, grid)
    driver.submit(plan, device, (), (given, out), sizes=(vectors, *sizes))


@functools.lru_cache(maxsize=4096)
def _planned(
    source: str,
    instance: str,
    device: torch.device,
    grid: tuple[int, ...],
    threads: int = THREADS,
    shared: int = 0,
) -> driver.Plan:
    return driver.Plan(
        loader.load(source, SOURCES[source], device)[instance],
        grid,
        (threads,),
        shared,
        early=starts_early(device),
    )


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Return True if a launch may begin before the preceding launch ends, for whose end its kernel
    then waits.
    """
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _check_numbers(ids: Tensor, experts: int) -> None:
    if ids.dtype not in INSTANCES:
        raise KernelError(f"numbers of experts must be int32 or int64, not {dtype_name(ids.dtype)}")
    if ids.ndim != 2 or not 1 <= ids.numel() <= MAX_ROWS or not ids.is_contiguous():
        raise KernelError(
            f"numbers of experts must be contiguous [m, topk] with 1 to {MAX_ROWS} in all, not "
            f"{list(ids.shape)}"
        )
    if not 1 <= experts <= MAX_EXPERTS:
        raise KernelError(f"the kernels take 1 to {MAX_EXPERTS} experts, not {experts}")
    if ids.device.type != "cuda":
        raise KernelError(
            f"numbers of experts must be on a CUDA device, not on {ids.device}",
            "move them with .to('cuda')",
        )
