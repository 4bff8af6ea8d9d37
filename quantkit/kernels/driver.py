"""What is asked of the CUDA driver itself: the library, where and into what torch would launch, and the launches.

A launch is as cheap as it can be from Python: what repeats, that is the configuration and the places of arguments, is
made once. A product in eager mode waits for little else.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.errors import KernelError

#: Of the driver's header: CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6
#: CU_STREAM_CAPTURE_STATUS_NONE, CU_GRAPH_NODE_TYPE_KERNEL, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
NOT_CAPTURING, KERNEL_NODE, MAX_SHARED = 0, 0, 8
#: What a block may use of shared memory without asking for more.
SHARED = 48 * 1024

#: Numbers as kernels take them, in eight bytes each; a bare Python float would arrive as 64 bits, garbage to a `float`.
FORMS = {int: "i4x", float: "f4x"}

_LOCAL = threading.local()


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


@dataclass
class Function:
    """A kernel on a device: CuPy's function, which must be kept, and the bytes that a block of it may share."""

    kept: Any
    allowed: int = SHARED


class Place(NamedTuple):
    """Where torch launches on a device: on which stream, into which CUDA graph, 0 for none; each capture has its own.

    What is launched next may begin `early`: in a CUDA graph only a kernel can be begun behind, not a copy, nor the
    start; outside of a capture anything can.
    """

    stream: int
    graph: int
    early: bool


@functools.cache
def library() -> Any:
    """Return the driver's library; KernelError if it does not load."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelError(f"the CUDA driver does not load ({error}): use --device cpu") from error


def place(device: torch.device) -> Place:
    """Return where torch launches on a CUDA device at this moment."""
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)  # as code that torch compiles asks for it
    return _captured(stream) if stream else Place(0, 0, True)  # the default stream cannot be captured


def _captured(stream: int) -> Place:
    status, number, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_size_t()
    graph, nodes, edges = ctypes.c_void_p(), ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_void_p()
    asked = [ctypes.byref(part) for part in (status, number, graph, nodes)]
    ask = getattr(library(), "cuStreamGetCaptureInfo_v3", None)  # drivers from CUDA 12.3 on have it
    if ask is not None:
        failed = ask(ctypes.c_void_p(stream), *asked, ctypes.byref(edges), ctypes.byref(count))
    else:
        failed = library().cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *asked, ctypes.byref(count))
    if failed or status.value == NOT_CAPTURING:
        return Place(stream, 0, ask is not None and not failed)
    kind = ctypes.c_int()
    follows = (
        ask is not None
        and count.value == 1
        and not library().cuGraphNodeGetType(ctypes.c_void_p(nodes[0]), ctypes.byref(kind))
        and kind.value == KERNEL_NODE
    )
    return Place(stream, 1 + number.value, follows)


def launch(
    function: Function,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: Sequence[Tensor | int | float | bytes | None],
    shared: int,
    device: torch.device,
    cluster: int,
    early: bool,
) -> Place:
    """Launch a function of a device where torch would, and return where; see `loader.launch`."""
    at = place(device)
    config, _ = _config(grid, block, shared, at.stream, cluster, early and at.early)
    pointers = _arguments(args)
    context, current = _context(device.index), ctypes.c_void_p()
    _require(library().cuCtxGetCurrent(ctypes.byref(current)), device)
    other = current.value != context
    if other:  # torch's current device is another, or this thread has used none so far
        _require(library().cuCtxPushCurrent_v2(ctypes.c_void_p(context)), device)
    try:
        handle = ctypes.c_void_p(function.kept.ptr)
        if shared > function.allowed:
            _require(library().cuFuncSetAttribute(handle, MAX_SHARED, shared), device)
            function.allowed = shared
        _require(library().cuLaunchKernelEx(config, handle, pointers, None), device)
    finally:
        if other:
            library().cuCtxPopCurrent_v2(ctypes.byref(current))
    return at


def _require(failed: int, device: torch.device) -> None:
    if failed:
        said = ctypes.c_char_p()
        library().cuGetErrorString(failed, ctypes.byref(said))
        why = (said.value or b"unknown").decode()
        raise KernelError(f"a kernel could not be launched on {device}: {why} (error {failed} of the CUDA driver)")


@functools.cache
def _context(index: int) -> int:
    """Return the context of a device that torch and CuPy use, its primary one."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    where = torch.device("cuda", index)
    _require(library().cuDeviceGet(ctypes.byref(device), index), where)
    _require(library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), where)
    return context.value or 0


@functools.lru_cache(maxsize=4096)
def _config(
    grid: tuple[int, ...], block: tuple[int, ...], shared: int, stream: int, cluster: int, early: bool
) -> tuple[Any, _Config]:
    """Return a pointer to the configuration of a launch, and what it points to."""
    sizes = (*grid, 1, 1)[:3] + (*block, 1, 1)[:3]
    asked = ((CLUSTER_DIMENSION, (cluster, 1, 1), cluster > 0), (PROGRAMMATIC_STREAM_SERIALIZATION, (1, 0, 0), early))
    wanted = [(name, value) for name, value, there in asked if there]
    attributes = (_Attribute * len(wanted))(*[_Attribute(name, 0, value) for name, value in wanted])
    config = _Config((ctypes.c_uint * 6)(*sizes), shared, stream, attributes, len(wanted))
    return ctypes.byref(config), config


def _arguments(args: Sequence[Tensor | int | float | bytes | None]) -> Any:
    """Return pointers to the arguments of a launch, in memory that this thread's next launch uses again."""
    values: list[Any] = [arg.data_ptr() if isinstance(arg, Tensor) else 0 if arg is None else arg for arg in args]
    kinds = tuple(
        [len(arg) if type(arg) is bytes else FORMS.get(type(arg), "Q") for arg in args]  # a list is made faster
    )
    rooms: dict[tuple[int | str, ...], Any] = _LOCAL.__dict__.setdefault("rooms", {})
    found = rooms.get(kinds)
    if found is None:
        found = rooms[kinds] = _room(kinds)
    packed, room, pointers = found
    packed.pack_into(room, 0, *values)
    return pointers


def _room(kinds: Sequence[int | str]) -> tuple[struct.Struct, Any, Any]:
    """Return how arguments of some kinds are written, where to, and the pointers to them."""
    forms = [f"<{kind}s" if isinstance(kind, int) else f"<{kind}" for kind in kinds]
    packed = struct.Struct("<" + "".join(form[1:] for form in forms))
    room = ctypes.create_string_buffer(packed.size)
    sizes = [struct.calcsize(form) for form in forms]
    starts = [ctypes.addressof(room) + sum(sizes[:i]) for i in range(len(sizes))]
    return packed, room, (ctypes.c_void_p * len(starts))(*starts)
