"""Launches of the kernels that GPTQ uses on a GPU: the sources `kernels/gptq_*.cu`.

`algorithms` has the same steps in torch, for CPUs and for GPUs without a compiler. Sums have
another order there, so a code or scale may differ where two are equally good up to rounding errors.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.core.formats import Format
from quantkit.kernels import driver, loader, unusable

#: Columns of a launch of the sweep or of descent, and rows and threads of a block of threads.
COLUMNS, ROWS, THREADS = 128, 32, 256
#: Group sizes that the search holds in registers.
SEARCHED = (32, 64, 128)
#: Groups of columns that a block of threads of a step of tuning has: one for each of its warps.
TUNED = 8
#: For the search: threads of a block, resident blocks of a multiprocessor, waves of blocks, and
#: threads that share the candidates of a row.
SEARCHERS, RESIDENT, WAVES, TOGETHER = 128, 3, 4, 8

GRIDS = ("Integers", "IntegersWithZero", "Floats")
#: CUDA source -> its template instances, in the order of their use.
SOURCES = {
    "gptq_sweep": tuple(
        f"gptq_sweep<{grid}, {sparse}>"
        for grid in (*GRIDS, "Exact")
        for sparse in ("false", "true")
        if (grid, sparse) not in (("Exact", "false"), ("IntegersWithZero", "true"))
    ),
    "gptq_search": tuple(f"gptq_search<{grid}, {size}>" for grid in GRIDS for size in SEARCHED),
    "gptq_descent": tuple(f"gptq_descent<{grid}>" for grid in GRIDS),
    "gptq_fours": tuple(f"gptq_fours<{grid}>" for grid in ("Integers", "Exact")),
    "gptq_tune": tuple(f"gptq_tune<{grid}>" for grid in GRIDS),
}


class Columns(NamedTuple):
    """Hold scales and, if asymmetric, zeros `[groups, n]` in the dtype of the weight, and each
    column's group `[b]`.
    """

    scales: Tensor
    zeros: Tensor | None
    group_of: Tensor

    def part(self, a: int, b: int) -> Columns:
        """Return the part for the columns from `a` to `b`."""
        return self._replace(group_of=self.group_of[a:b])


@functools.cache
def runs_on(device: torch.device) -> bool:
    """Return True if the kernels can be compiled for a device and run there."""
    return unusable(device) is None


def load_beside(device: torch.device) -> None:
    """Begin to import CuPy and to compile and load the kernels in a thread, if they run on a
    device. A launch waits for it.
    """

    def work(index: int) -> None:
        with suppress(Exception):  # the launch meets it again, and raises it
            for name, instances in SOURCES.items() if runs_on(device) else ():
                loader.load(name, instances, torch.device("cuda", index))

    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        Thread(target=work, args=(index,), name="quantkit-compile", daemon=True).start()


def round_block(
    t: Tensor,
    d: Tensor,
    w: Tensor,
    v: Tensor,
    columns: Columns | None,
    fmt: Format | None,
    pattern: Sequence[Tensor | None] | None,
) -> None:
    """Round up to `COLUMNS` columns: `t` `[b, n]` becomes values of codes, `d` `[b, n]` their
    errors.

    All are float32 on a device that `runs_on` accepts, `t`, `d` and `w` contiguous. `v` `[b, b]` is
    the block of V. Without `columns` and `fmt` nothing is rounded, and a pattern removes entries;
    see `algorithms.sweep.Pattern`.
    """
    b, n = t.shape
    name, grid = grid_of(fmt, columns is not None and columns.zeros is not None)
    v = v if v.stride(1) == 1 else v.contiguous()
    given = (None, None, None) if columns is None else columns
    mask = (
        (None, None, None)
        if pattern is None
        else [x if x is None else x.contiguous() for x in pattern]
    )
    instance = f"gptq_sweep<{name}, {'false' if pattern is None else 'true'}>"
    _launch_columns(instance, t, d, w, v, *given, *mask, grid, n, b, v.stride(0))


def descend_block(
    slope: Tensor, e: Tensor, v: Tensor, h: Tensor, columns: Columns, fmt: Format, frozen: bool
) -> None:
    """Move the values `v` `[b, n]` of up to `COLUMNS` columns by coordinate descent, and update
    their errors `e`.

    All are float32 on a device that `runs_on` accepts, `slope`, `e` and `v` contiguous. `slope`
    `[b, n]` is `H e` as the block begins, `h` `[b, b]` its block of H. With `frozen` each value of
    zero stays; see `algorithms.coordinate_descent`.
    """
    b, n = v.shape
    name, grid = grid_of(fmt, columns.zeros is not None)
    h = h if h.stride(1) == 1 else h.contiguous()
    others = (grid, n, b, h.stride(0), int(frozen))
    _launch_columns(f"gptq_descent<{name}>", v, e, slope, h, *columns, *others)


def descend_fours(
    slope: Tensor, e: Tensor, v: Tensor, h: Tensor, columns: Columns | None, fmt: Format | None
) -> None:
    """Move the values `v` `[b, n]` of up to `COLUMNS` columns by descent over the masks of aligned
    fours, and update their errors `e`.

    Tensors are as for `descend_block`, 4 divides `b`, and a four has one group. Without `columns`
    and `fmt` nothing is rounded.
    """
    b, n = v.shape
    name, grid = grid_of(fmt, False)
    h = h if h.stride(1) == 1 else h.contiguous()
    given = (None, None) if columns is None else (columns.scales, columns.group_of)
    _launch_columns(f"gptq_fours<{name}>", v, e, slope, h, *given, grid, n, b, h.stride(0))


def search_errors(
    x: Tensor, scales: Tensor, zeros: Tensor | None, r: Tensor, fmt: Format
) -> Tensor:
    """Return `||(x - nearest(x)) R||^2` `[c, m]` of groups `x` `[m, g]` for candidate `scales` `[c,
    m]`.

    It may be infinite where an earlier candidate has a smaller one. A scale that is not a number is
    no candidate. `zeros` `[c, m]` go with asymmetric scales. `r` `[groups, g, g]` has an upper
    triangular R for each group of a row, repeated for each row of `x`. All are float32 on a device
    that `runs_on` accepts, and `g` is one of `SEARCHED`.
    """
    (m, g), candidates, groups = x.shape, len(scales), len(r)
    name, grid = grid_of(fmt, zeros is not None)
    x, scales, transposed = x.contiguous(), scales.contiguous(), r.transpose(1, 2).contiguous()
    errors = torch.empty_like(scales)
    held = RESIDENT * torch.cuda.get_device_properties(x.device).multi_processor_count
    blocks = min(max(1, WAVES * held // groups), -(-m // groups * TOGETHER // SEARCHERS))
    zeros = None if zeros is None else zeros.contiguous()
    arguments = [x, scales, zeros, transposed, errors, grid, m // groups, groups, candidates]
    _launch(f"gptq_search<{name}, {g}>", (blocks, groups), SEARCHERS, arguments, 4 * g * g)
    return errors


def tune(
    dense: Tensor,
    gradient: Tensor,
    moved: Sequence[Tensor],
    start: Sequence[Tensor | None],
    fmt: Format,
    step: bytes,
) -> None:
    """Move a weight against its `gradient` and write the new weight to `dense`; both are bfloat16
    `[n, k]`.

    `moved`: latent values `[n, groups, g]`, their mean squares, factors `[n, groups]`, their mean
    squares. `start`: the scales, the zeros or None, the centers `[n, groups, g]`, the codes uint8
    `[n, k]`, and each code's step. `step` is the structure of kernels/gptq_tune.cu. All others are
    float32 and contiguous, on a device that `runs_on` accepts.
    """
    name, grid = grid_of(fmt, start[1] is not None)
    groups = moved[2].numel()
    arguments = [
        dense,
        gradient.contiguous(),
        *moved,
        *start,
        grid,
        step,
        groups,
        dense.numel() // groups,
    ]
    _launch(f"gptq_tune<{name}>", (-(-groups // TUNED),), 32 * TUNED, arguments)


def _launch_columns(instance: str, *arguments: Any) -> None:
    """Launch an instance for columns; the first argument is a tensor of them, `[b, n]`."""
    blocks = (-(-arguments[0].shape[1] // ROWS),)
    _launch(instance, blocks, THREADS, arguments, 4 * COLUMNS * COLUMNS)


def _launch(
    instance: str, blocks: tuple[int, ...], threads: int, arguments: Sequence[Any], shared: int = 0
) -> None:
    """Launch an instance, whose name begins with its source's, where its first argument is."""
    source = instance.partition("<")[0]
    function = loader.load(source, SOURCES[source], arguments[0].device)[instance]
    driver.launch(function, blocks, (threads,), arguments, shared)


def grid_of(fmt: Format | None, has_zeros: bool) -> tuple[str, bytes]:
    """Return the name and the bytes of the structure that rounds to a format
    (kernels/gptq_grid.cuh).
    """
    if fmt is None:
        return "Exact", struct.pack("<f", 0)
    if has_zeros:
        return "IntegersWithZero", struct.pack("<2f", 0, 2**fmt.bits - 1)
    if fmt.is_float:
        return "Floats", struct.pack("<3f", fmt.smallest_normal, fmt.largest, 2**fmt.mbits)
    return "Integers", struct.pack("<2f", fmt.values[0], fmt.values[-1])
