"""Launches through the CUDA driver. A launch is planned once, and each call writes only addresses.

The time of a launch from Python limits small products in eager mode. So plans, configurations and
argument buffers are cached, and `submit` calls few functions.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
#: Captures whose streams are remembered; more are not under way at the same time.
CAPTURES = 16
#: `struct` codes of arguments: a pointer, and a 32-bit integer padded to eight bytes.
POINTER, INTEGER = "Q", "i4x"
#: Float32 sums and int32 counters.
Workspace = tuple[Tensor, Tensor]
#: Source, device, CUDA graph and stream -> workspace.
WORKSPACES: dict[tuple[str, torch.device, int, int], Workspace] = {}
#: Source and device -> the workspaces that all graphs share, one for each stream of a capture.
SHARED_BY_GRAPHS: dict[tuple[str, torch.device], list[Workspace]] = {}


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


@dataclass(eq=False)
class Function:
    """A kernel on a device: CuPy's function, which owns the handle, and the shared bytes that a
    block may use.
    """

    cupy_function: Any
    shared_limit: int = DEFAULT_SHARED

    def __post_init__(self) -> None:
        self.handle = ctypes.c_void_p(self.cupy_function.ptr)


class Plan(NamedTuple):
    """A launch without its addresses.

    `shared` counts the bytes of a block, and `cluster` the blocks of a cluster (0: no clusters).
    `workspace` has a name, and counts float32 sums and int32 counters. `sizes` are the last
    arguments. If `early`, the kernel may begin while the preceding kernel runs, and must itself
    wait for the memory accesses of that kernel (Hopper and newer).
    """

    function: Function
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int = 0
    workspace: tuple[str, int, int] | None = None
    sizes: tuple[int, ...] = ()
    cluster: int = 0
    early: bool = False


class StreamState(NamedTuple):
    """torch's current stream on a device, and the CUDA graph that it is captured into (0: none).

    `early`: the next launch may begin before the work in front of it has ended. In a CUDA graph the
    preceding node must be a kernel for this, not a copy or the start of the graph.
    """

    stream: int
    graph: int
    early: bool


#: The default stream cannot be captured.
DEFAULT_STREAM = StreamState(0, 0, True)


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
    # The call that torch's compiled code makes.
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    if not stream:
        return DEFAULT_STREAM
    status = ctypes.c_int()
    failed = library().cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status))
    if failed or status.value != NOT_CAPTURING:
        return _capture_state(stream)
    return StreamState(stream, 0, True)


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


def submit(
    plan: Plan,
    device: torch.device,
    maps: Sequence[bytes],
    before: Sequence[Tensor | None],
    behind: Sequence[Tensor | None] = (),
    sizes: tuple[int, ...] = (),
    early: bool | None = None,
) -> StreamState:
    """Launch a plan on torch's current stream, and return the state of the stream.

    The arguments are tensor maps, pointers, the plan's workspace between those `before` and
    `behind`, `sizes` and the plan's sizes. None is a null pointer. `early` overrides that of the
    plan. KernelError for a launch that the driver refuses; later failures appear when torch
    synchronises.
    """
    state = stream_state(device)
    given = [*before, *behind]
    if plan.workspace is not None:
        own = WORKSPACES.get((plan.workspace[0], device, state.graph, state.stream))
        given[len(before) : len(before)] = own or workspace(*plan.workspace, device, state)
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in given]
    kinds = _kinds(len(maps), len(pointers), len(sizes) + len(plan.sizes))
    values: tuple[int | bytes, ...] = (*maps, *pointers, *sizes, *plan.sizes)
    _launch(plan, kinds, values, device, state, plan.early if early is None else early)
    return state


def launch(
    function: Function,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: Sequence[Tensor | int | bytes | None],
    shared: int = 0,
) -> None:
    """Launch a function on torch's current stream of the device that holds the tensors in `args`.

    Tensors arrive as pointers, None as a null pointer, int as 32 bits, bytes as a structure.
    `shared` is dynamic shared memory in bytes. Errors as `submit`.
    """
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    values: list[Any] = [
        arg.data_ptr() if isinstance(arg, Tensor) else 0 if arg is None else arg for arg in args
    ]
    kinds = tuple(
        f"{len(arg)}s" if isinstance(arg, bytes) else INTEGER if isinstance(arg, int) else POINTER
        for arg in args
    )
    _launch(
        Plan(function, grid, block, shared),
        kinds,
        values,
        device,
        stream_state(device),
        early=False,
    )


@functools.cache
def _kinds(maps: int, pointers: int, sizes: int) -> tuple[str, ...]:
    return ("128s",) * maps + (POINTER,) * pointers + (INTEGER,) * sizes


class _Arguments(threading.local):
    """The memory of a thread for arguments, by their kinds; each launch reuses it."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, ...], tuple[struct.Struct, Any, Any]] = {}

    def allocate(self, kinds: tuple[str, ...]) -> tuple[struct.Struct, Any, Any]:
        """Make a `struct` of arguments, memory for it, and pointers to each argument there."""
        packed = struct.Struct("<" + "".join(kinds))
        buffer = ctypes.create_string_buffer(packed.size)
        starts = [struct.calcsize("<" + "".join(kinds[:i])) for i in range(len(kinds))]
        addresses = [ctypes.addressof(buffer) + start for start in starts]
        found = packed, buffer, (ctypes.c_void_p * len(addresses))(*addresses)
        self.buffers[kinds] = found
        return found


_ARGUMENTS = _Arguments()
_LOCK = threading.Lock()


def _launch(
    plan: Plan,
    kinds: tuple[str, ...],
    values: Sequence[int | bytes],
    device: torch.device,
    state: StreamState,
    early: bool,
) -> None:
    packed, buffer, pointers = _ARGUMENTS.buffers.get(kinds) or _ARGUMENTS.allocate(kinds)
    packed.pack_into(buffer, 0, *values)
    function, shared = plan.function, plan.shared
    config, _ = launch_config(
        plan.grid, plan.block, shared, state.stream, plan.cluster, early and state.early
    )
    driver, context, current = library(), _context(device.index), ctypes.c_void_p()
    driver.cuCtxGetCurrent(ctypes.byref(current))
    failed, other = 0, current.value != context
    if other:  # torch's current device is another, or this thread has used none so far
        failed = driver.cuCtxPushCurrent_v2(ctypes.c_void_p(context))
    if not failed:
        try:
            if shared > function.shared_limit:
                failed = driver.cuFuncSetAttribute(function.handle, MAX_SHARED, shared)
                function.shared_limit = function.shared_limit if failed else shared
            failed = failed or driver.cuLaunchKernelEx(config, function.handle, pointers, None)
        finally:
            if other:
                driver.cuCtxPopCurrent_v2(ctypes.byref(current))
    if failed:
        raise _refusal(failed, device)


def _refusal(failed: int, device: torch.device) -> KernelError:
    message = ctypes.c_char_p()
    library().cuGetErrorString(failed, ctypes.byref(message))
    why = (message.value or b"unknown").decode()
    return KernelError(
        f"a kernel could not be launched on {device}: {why} (error {failed} of the CUDA driver)"
    )


@functools.cache
def _context(index: int) -> int:
    """Retain the primary context of a device, which torch and CuPy use."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    failed = library().cuDeviceGet(ctypes.byref(device), index)
    failed = failed or library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if failed:
        raise _refusal(failed, torch.device("cuda", index))
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
    wanted = [(CLUSTER_DIMENSION, (cluster, 1, 1))] if cluster else []
    if early:
        wanted.append((PROGRAMMATIC_STREAM_SERIALIZATION, (1, 0, 0)))
    attributes = (_Attribute * len(wanted))(*[_Attribute(name, 0, value) for name, value in wanted])
    config = _Config((ctypes.c_uint * 6)(*sizes), shared, stream, attributes, len(wanted))
    return ctypes.byref(config), config


def workspace(
    source: str, sums: int, counters: int, device: torch.device, state: StreamState
) -> Workspace:
    """Return float32 `[sums]` and int32 `[counters]`, in which the blocks of a launch exchange
    sums. The workspace is made on first use, and every launch leaves its counters at zero.

    Each stream has its own workspace, and so has each stream that is captured into one CUDA graph.
    So they may overlap. But two graphs must not be replayed at the same time, because graphs share
    workspaces. None can be made during a capture: KernelError if `source` is captured on more
    streams at once than it was launched on before.
    """
    key = (source, device, state.graph, state.stream)
    with _LOCK:
        if key in WORKSPACES:
            return WORKSPACES[key]
        shared = SHARED_BY_GRAPHS.setdefault((source, device), [])
        if not state.graph:
            shared.append(allocate(device, sums, counters))
            return WORKSPACES.setdefault(key, allocate(device, sums, counters))
        known = [graph for name, where, graph, _ in WORKSPACES if (name, where) == key[:2]]
        captures, streams = [graph for graph in known if graph], known.count(state.graph)
        if streams == len(shared):
            raise KernelError(
                f"{source} is captured on {streams + 1} streams of {device} at once, and was "
                f"launched on {streams}",
                "call it once on each stream before the capture",
            )
        if len({*captures, state.graph}) > CAPTURES:
            for old in [known for known in WORKSPACES if known[:3] == (*key[:2], captures[0])]:
                del WORKSPACES[old]
        WORKSPACES[key] = shared[streams]
        return shared[streams]


def allocate(device: torch.device, sums: int, counters: int) -> Workspace:
    """Allocate a workspace in another thread.

    In the thread that warms up a compiled model, torch would take the memory from the pool of a
    CUDA graph, where no allocation may outlive the warm-up.
    """

    def make() -> Workspace:
        found = (
            torch.empty(sums, dtype=torch.float32, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )
        torch.cuda.current_stream(device).synchronize()  # every stream sees the zeros from now on
        return found

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
