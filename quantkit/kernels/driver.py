"""Calls to the CUDA driver: the state of torch's current stream, and launches.

Launch configurations and argument buffers are cached, because the time of a launch from Python
limits small products in eager mode. For the same reason `launch` takes arguments that are written
already.
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

from quantkit.errors import KernelError, Option, Words

#: CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION of
#: the driver's header.
CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6
#: CU_STREAM_CAPTURE_STATUS_NONE, CU_GRAPH_NODE_TYPE_KERNEL,
#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
NOT_CAPTURING, KERNEL_NODE, MAX_SHARED = 0, 0, 8
#: Bytes of shared memory that a block may use without a change of the function's attribute.
DEFAULT_SHARED = 48 * 1024

#: Python type -> `struct` code of a kernel argument: 32 bits, padded to eight bytes.
STRUCT_CODES = {int: "i4x", float: "f4x"}

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
    """A kernel on a device: CuPy's function, which owns the handle, and the shared bytes that a
    block may use.
    """

    cupy_function: Any
    shared_limit: int = DEFAULT_SHARED

    def __post_init__(self) -> None:
        self.handle = ctypes.c_void_p(self.cupy_function.ptr)


class StreamState(NamedTuple):
    """torch's current stream on a device, and the CUDA graph that it is captured into (0: none).

    `early`: the next launch may begin before the work in front of it has ended. In a CUDA graph the
    preceding node must be a kernel for this, not a copy or the start of the graph.
    """

    stream: int
    graph: int
    early: bool


@functools.cache
def library() -> Any:
    """Load the driver's library; KernelError if it does not load."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelError(
            f"the CUDA driver does not load ({error})", Words("use", Option("device", "cpu"))
        ) from error


def stream_state(device: torch.device) -> StreamState:
    """Ask for torch's current stream on a CUDA device, and whether it is captured."""
    stream: int = torch._C._cuda_getCurrentRawStream(
        device.index
    )  # the call that torch's compiled code makes
    if not stream:
        return StreamState(0, 0, True)  # the default stream cannot be captured
    status = ctypes.c_int()
    failed = library().cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status))
    return (
        _capture_state(stream)
        if failed or status.value != NOT_CAPTURING
        else StreamState(stream, 0, True)
    )


def _capture_state(stream: int) -> StreamState:
    status, number, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_size_t()
    graph, nodes, edges = ctypes.c_void_p(), ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_void_p()
    asked = [ctypes.byref(part) for part in (status, number, graph, nodes)]
    ask = getattr(library(), "cuStreamGetCaptureInfo_v3", None)  # drivers from CUDA 12.3 on have it
    if ask is not None:
        failed = ask(ctypes.c_void_p(stream), *asked, ctypes.byref(edges), ctypes.byref(count))
    else:
        failed = library().cuStreamGetCaptureInfo_v2(
            ctypes.c_void_p(stream), *asked, ctypes.byref(count)
        )
    if failed or status.value == NOT_CAPTURING:
        return StreamState(stream, 0, not failed)
    kind = ctypes.c_int()
    follows_kernel = (
        ask is not None
        and count.value == 1
        and not library().cuGraphNodeGetType(ctypes.c_void_p(nodes[0]), ctypes.byref(kind))
        and kind.value == KERNEL_NODE
    )
    return StreamState(stream, 1 + number.value, follows_kernel)


def launch(
    function: Function,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    pointers: Any,
    shared: int,
    device: torch.device,
    state: StreamState,
    cluster: int = 0,
    early: bool = False,
) -> None:
    """Launch a function on torch's current stream, whose state is `state`; see `loader.launch`.

    `pointers` are those that this thread's last call of `argument_pointers` or `written_arguments`
    returned. `cluster` is the number of blocks of a cluster (0: no clusters). An `early` launch may
    begin while the preceding kernel runs; the launched kernel must itself wait for the memory
    accesses of that kernel (Hopper and newer).
    """
    config, _ = launch_config(grid, block, shared, state.stream, cluster, early and state.early)
    driver, context, current = library(), _context(device.index), ctypes.c_void_p()
    _require(driver.cuCtxGetCurrent(ctypes.byref(current)), device)
    other = current.value != context
    if other:  # torch's current device is another, or this thread has used none so far
        _require(driver.cuCtxPushCurrent_v2(ctypes.c_void_p(context)), device)
    try:
        if shared > function.shared_limit:
            _require(driver.cuFuncSetAttribute(function.handle, MAX_SHARED, shared), device)
            function.shared_limit = shared
        _require(driver.cuLaunchKernelEx(config, function.handle, pointers, None), device)
    finally:
        if other:
            driver.cuCtxPopCurrent_v2(ctypes.byref(current))


def _require(failed: int, device: torch.device) -> None:
    if failed:
        message = ctypes.c_char_p()
        library().cuGetErrorString(failed, ctypes.byref(message))
        why = (message.value or b"unknown").decode()
        raise KernelError(
            f"a kernel could not be launched on {device}: {why} (error {failed} of the CUDA driver)"
        )


@functools.cache
def _context(index: int) -> int:
    """Retain the primary context of a device, which torch and CuPy use."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    where = torch.device("cuda", index)
    _require(library().cuDeviceGet(ctypes.byref(device), index), where)
    _require(library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), where)
    return context.value or 0


@functools.lru_cache(maxsize=4096)
def launch_config(
    grid: tuple[int, ...],
    block: tuple[int, ...],
    shared: int,
    stream: int,
    cluster: int,
    early: bool,
) -> tuple[Any, _Config]:
    """Build the configuration of a launch; returns a pointer to it, and the structure itself."""
    sizes = (*grid, 1, 1)[:3] + (*block, 1, 1)[:3]
    asked = (
        (CLUSTER_DIMENSION, (cluster, 1, 1), cluster > 0),
        (PROGRAMMATIC_STREAM_SERIALIZATION, (1, 0, 0), early),
    )
    wanted = [(name, value) for name, value, there in asked if there]
    attributes = (_Attribute * len(wanted))(*[_Attribute(name, 0, value) for name, value in wanted])
    config = _Config((ctypes.c_uint * 6)(*sizes), shared, stream, attributes, len(wanted))
    return ctypes.byref(config), config


def argument_pointers(args: Sequence[Tensor | int | float | bytes | None]) -> Any:
    """Write the arguments of a launch, and return pointers to them; this thread's next launch
    reuses the memory.
    """
    values: list[Any] = [
        arg.data_ptr() if isinstance(arg, Tensor) else 0 if arg is None else arg for arg in args
    ]
    kinds = [len(arg) if type(arg) is bytes else STRUCT_CODES.get(type(arg), "Q") for arg in args]
    return written_arguments(tuple(kinds), values)


def written_arguments(kinds: tuple[int | str, ...], values: Sequence[int | float | bytes]) -> Any:
    """Write `values` as arguments, and return pointers to them; this thread's next launch reuses
    the memory.

    `kinds` are `struct` codes, such as "Q" for a pointer, or lengths of structures in bytes.
    """
    buffers: dict[tuple[int | str, ...], Any] = _LOCAL.__dict__.setdefault("buffers", {})
    found = buffers.get(kinds)
    if found is None:
        found = buffers[kinds] = _argument_buffer(kinds)
    packed, buffer, pointers = found
    packed.pack_into(buffer, 0, *values)
    return pointers


def _argument_buffer(kinds: Sequence[int | str]) -> tuple[struct.Struct, Any, Any]:
    forms = [f"<{kind}s" if isinstance(kind, int) else f"<{kind}" for kind in kinds]
    packed = struct.Struct("<" + "".join(form[1:] for form in forms))
    buffer = ctypes.create_string_buffer(packed.size)
    sizes = [struct.calcsize(form) for form in forms]
    starts = [ctypes.addressof(buffer) + sum(sizes[:i]) for i in range(len(sizes))]
    return packed, buffer, (ctypes.c_void_p * len(starts))(*starts)
