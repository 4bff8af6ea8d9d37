"""Descriptors of matrices for Hopper's copy engine, made by the driver on the host (cuTensorMapEncodeTiled)."""

from __future__ import annotations

import ctypes
import functools
import math

from torch import Tensor

from quantkit.errors import KernelError
from quantkit.kernels import driver

#: What the driver's header calls the types that differ in size, in bytes, and the two ways to lie in shared memory.
KINDS = {2: 6, 8: 4}  # FLOAT16 (zeros are zeros in any), UINT64
PLAIN, SWIZZLED = 0, 3  # in 128 bytes
SIZE, ALIGNMENT = 128, 64


def tensor_map(
    matrix: Tensor, shape: tuple[int, ...], box: tuple[int, ...], item: int, swizzled: bool = False
) -> bytes:
    """Return the descriptor of contiguous `matrix` as `shape` of `item` bytes, copied in boxes of as many dimensions.

    What a box has outside of the matrix arrives as zeros. It is passed to a kernel by value, and good for as long as
    the matrix lies where it lies. KernelError if the driver refuses it.
    """
    return _encoded(matrix.data_ptr(), shape, box, item, SWIZZLED if swizzled else PLAIN)


@functools.lru_cache(maxsize=4096)
def _encoded(pointer: int, shape: tuple[int, ...], box: tuple[int, ...], item: int, swizzle: int) -> bytes:
    rank = len(shape)
    strides = [math.prod(shape[i:]) * item for i in range(rank - 1, 0, -1)]  # the driver counts from the last dimension
    room = ctypes.create_string_buffer(SIZE + ALIGNMENT)
    address = (ctypes.addressof(room) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    failed = driver.library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(address),
        KINDS[item],
        rank,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # not interleaved
        swizzle,
        3,  # fetched into the L2 by 256 bytes
        0,  # zeros outside
    )
    if failed:
        raise KernelError(f"the driver makes no tensor map of {shape} in boxes of {box}: error {failed}")
    return ctypes.string_at(address, SIZE)
