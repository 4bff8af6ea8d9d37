"""What CuPy does not reach in the CUDA driver: the library itself, and launches that begin early."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from quantkit.errors import KernelError

#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION of the driver's header.
PROGRAMMATIC_STREAM_SERIALIZATION = 6


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
