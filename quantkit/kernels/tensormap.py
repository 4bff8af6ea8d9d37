"""Tensor maps: descriptors of matrices for Hopper's copy engine (TMA), which the driver encodes on
the host.
"""

from __future__ import annotations

import ctypes
import functools
import math

from quantkit.errors import KernelError
from quantkit.kernels import driver

#: Bytes of an element -> CU_TENSOR_MAP_DATA_TYPE_FLOAT16 (all 2-byte types have the same zero),
#: ..._UINT64.
DATA_TYPES = {2: 6, 8: 4}
#: CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B.
PLAIN, SWIZZLED = 0, 3
#: Bytes of a descriptor, and its alignment.
SIZE, ALIGNMENT = 128, 64


@functools.lru_cache(maxsize=4096)
def tensor_map(
    pointer: int, shape: tuple[int, ...], box: tuple[int, ...], item: int, swizzled: bool = False
) -> bytes:
    """Encode the descriptor of a contiguous matrix of `shape`, `item` bytes for an element, for
    copies of one `box`.

    `pointer` is its address on a GPU. Elements of a box outside the matrix arrive as zeros. The
    descriptor is passed to a kernel by value, and is valid as long as the matrix keeps its address.
    KernelError if the driver refuses it.
    """
    rank = len(shape)
    strides = [
        math.prod(shape[i:]) * item for i in range(rank - 1, 0, -1)
    ]  # the driver counts from the last dimension
    buffer = ctypes.create_string_buffer(SIZE + ALIGNMENT)
    address = (ctypes.addressof(buffer) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    failed = driver.library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(address),
        DATA_TYPES[item],
        rank,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # not interleaved
        SWIZZLED if swizzled else PLAIN,
        3,  # the L2 cache fetches 256 bytes
        0,  # zeros outside
    )
    if failed:
        raise KernelError(
            f"the driver makes no tensor map of {shape} in boxes of {box}: error {failed}"
        )
    return ctypes.string_at(address, SIZE)
