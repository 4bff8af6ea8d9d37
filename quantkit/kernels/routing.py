"""Sort the rows of a mixture of experts by expert, and list tiles of rows of one expert
(kernels/routing.cu).

A row is one of the `topk` choices of a token. The list has a fixed shape and stays on the GPU, so
the host never waits for it, and a CUDA graph can be replayed with other experts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.core.tensors import dtype_name
from quantkit.errors import KernelError
from quantkit.kernels import driver, loader
from quantkit.kernels.driver import Function

#: dtype of experts' numbers -> the instance that reads them.
INSTANCES = {torch.int32: "routing<int>", torch.int64: "routing<long long>"}
SOURCES = {"routing": tuple(INSTANCES.values())}
#: The counts of a block, one for each warp and expert, fit into the shared memory of every GPU.
MAX_EXPERTS = 512
THREADS, WARPS = 1024, 32
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


def load(device: torch.device) -> dict[str, Function]:
    """Compile and load the kernels; returns the functions by instance."""
    return loader.load("routing", SOURCES["routing"], device).functions


def route(topk_ids: Tensor, experts: int, tile: int) -> Routing:
    """Sort the rows of `topk_ids` `[m, topk]` (int32 or int64, on a GPU) by expert, in tiles of
    `tile` rows.

    Rows of an expert keep their order. Numbers outside 0 to `experts` - 1 are experts of other
    ranks. KernelError for other tensors, and for more than 512 experts.
    """
    _check(topk_ids, experts)
    (m, topk), device = topk_ids.shape, topk_ids.device
    rows = m * topk
    found = torch.empty(list_size(rows, experts, tile), dtype=torch.int32, device=device)
    routing = Routing(found, m, topk, experts, tile, most_tiles(rows, experts, tile))
    state = driver.stream_state(device)
    sizes = (rows, experts, tile, routing.max_tiles)
    arguments = driver.written_arguments(
        ("Q", "Q", "i4x", "i4x", "i4x", "i4x"), (topk_ids.data_ptr(), found.data_ptr(), *sizes)
    )
    function, shared = _planned(topk_ids.dtype, experts, device)
    driver.launch(
        function, (1,), (THREADS,), arguments, shared, device, state, early=starts_early(device)
    )
    return routing


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Return True if a launch may begin before the preceding launch ends, for whose end its kernel
    then waits.
    """
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _planned(dtype: torch.dtype, experts: int, device: torch.device) -> tuple[Function, int]:
    return load(device)[INSTANCES[dtype]], 4 * (WARPS + 1) * (experts + 1)


def _check(ids: Tensor, experts: int) -> None:
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
