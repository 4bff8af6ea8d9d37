"""What CuPy does not reach in the CUDA driver: the library itself, and launches that begin early."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from quantkit.errors import KernelError

#: Of the driver's header: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, CU_STREAM_CAPTURE_STATUS_NONE,
#: CU_GRAPH_NODE_TYPE_KERNEL.
PROGRAMMATIC_STREAM_SERIALIZATION, NOT_CAPTURING, KERNEL_NODE = 6, 0, 0


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: the value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 6),  # of the grid, then of a block
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@functools.cache
def library() -> Any:
    """Return the driver's library; KernelError if it does not load."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelError(f"the CUDA driver does not load ({error}): use --device cpu") from error


def follows_kernel(stream: int) -> bool:
    """Return whether what is launched next on a stream may be launched early.

    In a CUDA graph only a kernel can be begun behind, not a copy, nor the start; outside of a capture anything can.
    """
    status, number, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_size_t()
    graph, nodes, edges = ctypes.c_void_p(), ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_void_p()
    found = [ctypes.byref(part) for part in (status, number, graph, nodes, edges, count)]
    ask = getattr(library(), "cuStreamGetCaptureInfo_v3", None)  # drivers from CUDA 12.3 on have it
    if ask is None or ask(ctypes.c_void_p(stream), *found):
        return False
    if status.value == NOT_CAPTURING:
        return True
    kind = ctypes.c_int()
    return (
        count.value == 1
        and not library().cuGraphNodeGetType(ctypes.c_void_p(nodes[0]), ctypes.byref(kind))
        and (kind.value == KERNEL_NODE)
    )


def launch_early(
    function: int, grid: tuple[int, ...], block: tuple[int, ...], values: Sequence[Any], shared: int, stream: int
) -> None:
    """Launch a function of the current device with NumPy scalars as arguments, before the launch in front has ended.

    Its kernel must wait itself for what that one does (griddepcontrol of PTX). KernelError if the driver refuses.
    """
    kept = [np.array(value) for value in values]  # the driver reads them through pointers
    pointers = (ctypes.c_void_p * len(kept))(*(value.ctypes.data for value in kept))
    sizes = (*grid, 1, 1)[:3] + (*block, 1, 1)[:3]
    attribute = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, (ctypes.c_int * 16)(1))
    config = _Config((ctypes.c_uint * 6)(*sizes), shared, stream, ctypes.pointer(attribute), 1)
    failed = library().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), pointers, None)
    if failed:
        raise KernelError(f"a kernel could not be launched: the driver's error {failed}")
