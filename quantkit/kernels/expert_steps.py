"""The steps of a mixture of experts beside its products: an activation, and the sum over choices
(expert_steps.cu).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from quantkit.errors import KernelError
from quantkit.kernels import driver, loader
from quantkit.kernels.contract import ACTIVATIONS, TYPES, check_operand, not_on_a_gpu
from quantkit.kernels.driver import Function
from quantkit.kernels.routing import Routing, starts_early

THREADS = 256
#: Numbers of a thread.
EIGHT = 8
SOURCES = {
    "expert_steps": tuple(
        [f"{name}<{TYPES[x]}>" for name in ("silu_multiply", "sum_choices") for x in ACTIVATIONS]
        + ["gather_rows<half, half>", "gather_rows<bfloat, bfloat>", "gather_rows<bfloat, half>"]
    )
}


def load(device: torch.device) -> dict[str, Function]:
    """Compile and load the kernels; returns the functions by instance."""
    return loader.load("expert_steps", SOURCES["expert_steps"], device).functions


def silu_multiply(h: Tensor, a: Tensor) -> None:
    """Write silu(gate) * up into `a` `[rows, n]`; `h` is `[rows, 2 n]`, first gate, then up.
    Rounded once.

    KernelError unless both are float16 or bfloat16, contiguous on one GPU, and n is a multiple of
    eight.
    """
    rows, n = a.shape
    _check("silu_multiply", h, a, (rows, 2 * n))
    _launch("silu_multiply", h, a, (n // EIGHT,))


def sum_choices(z: Tensor, y: Tensor) -> None:
    """Add up `z` `[m * topk, n]` over the topk rows of each token into `y` `[m, n]`, in float32,
    rounded once.

    KernelError unless both are float16 or bfloat16, contiguous on one GPU, and n is a multiple of
    eight.
    """
    m, n = y.shape
    choices = z.shape[0] // max(1, m)
    _check("sum_choices", z, y, (m * choices, n))
    _launch("sum_choices", z, y, (n // EIGHT, choices))


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
    sizes = (routing.max_tiles, routing.tile, choices, k // EIGHT, y.shape[1] // EIGHT)
    arguments = driver.written_arguments(
        ("Q",) * 5 + ("i4x",) * 5,
        (
            *(0 if one is None else one.data_ptr() for one in (x, routing.list, found, powers, y)),
            *sizes,
        ),
    )
    state, function = (
        driver.stream_state(device),
        _instance(f"gather_rows<{TYPES[x.dtype]}, {TYPES[dtype]}>", device),
    )
    grid = (
        -(-(len(routing.list) - 2 - routing.max_tiles) // (THREADS // 32)),
    )  # a warp a place or row without expert
    driver.launch(
        function, grid, (THREADS,), arguments, 0, device, state, early=starts_early(device)
    )
    return found, powers


def _launch(name: str, given: Tensor, out: Tensor, sizes: tuple[int, ...]) -> None:
    device, grid = out.device, (out.shape[0], -(-sizes[0] // THREADS))
    state, kinds = driver.stream_state(device), ("Q", "Q") + ("i4x",) * len(sizes)
    arguments = driver.written_arguments(kinds, (given.data_ptr(), out.data_ptr(), *sizes))
    function = _instance(f"{name}<{TYPES[out.dtype]}>", device)
    driver.launch(
        function, grid, (THREADS,), arguments, 0, device, state, early=starts_early(device)
    )


@functools.cache
def _instance(name: str, device: torch.device) -> Function:
    return load(device)[name]


def _check(name: str, given: Tensor, out: Tensor, shape: tuple[int, ...]) -> None:
    check_operand(name, "result", out, ACTIVATIONS, tuple(out.shape), out.device)
    check_operand(name, "input", given, (out.dtype,), shape, out.device)
    if not out.numel() or out.shape[-1] % EIGHT:
        raise KernelError(f"the {name} kernel cannot make {list(out.shape)} of {list(given.shape)}")
    if out.device.type != "cuda":
        raise not_on_a_gpu(name, "result", out.device)
