"""Compile CUDA sources with NVRTC when they are first needed, cache the binaries on disk, and load
them through CuPy.

Only this file imports CuPy, and only inside functions. A source is compiled for the exact
architecture of the device; the wheel holds only sources. Kernels run on torch's current stream and
memory, so CuPy allocates nothing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from quantkit import names
from quantkit.errors import KernelError, Option, QuantkitError, reason
from quantkit.io import files
from quantkit.kernels import driver

OPTIONS = ("--std=c++17", "--ptxas-options=-v")
#: Compute capabilities whose special instructions (wgmma, setmaxnreg) NVRTC accepts only under the
#: name with an a.
SPECIFIC = {(9, 0), (10, 0)}

_LOCK = threading.Lock()


@dataclass(frozen=True)
class Binary:
    """A compiled source: the cubin, instance -> its name in the cubin, and the compiler's log."""

    cubin: bytes
    names: dict[str, str]
    log: str = field(compare=False)


def source_dir() -> Path:
    """Find the folder of the CUDA sources: inside an installed package, or at the top of a
    checkout.
    """
    packaged = Path(__file__).parent / "cuda"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "kernels"


def cache_dir() -> Path:
    """Find the folder of compiled kernels: `kernels` in QUANTKIT_CACHE, else in the user's cache
    folder.
    """
    own = os.environ.get("QUANTKIT_CACHE")
    users = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(own or os.path.join(users, "quantkit")) / "kernels"


def arch_name(major: int, minor: int) -> str:
    """Name a compute capability as NVRTC does, such as sm_90a; KernelError for one
    older than 8.0.
    """
    if (major, minor) < (8, 0):
        raise KernelError(
            f"this GPU has compute capability {major}.{minor}, quantkit's kernels need 8.0 "
            "(Ampere) or newer",
            "use another GPU",
            Option("device", "cpu"),
        )
    return f"sm_{major}{minor}{'a' if (major, minor) in SPECIFIC else ''}"


def arch_of(device: torch.device) -> str:
    """Name the architecture that kernels for a CUDA device are compiled for. KernelError for a
    device that is too old.
    """
    return arch_name(*torch.cuda.get_device_capability(device))


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Return True if sources for sm_90a run on `device`."""
    return device.type == "cuda" and arch_of(device) == "sm_90a"


def extra() -> str:
    """Name the extra of quantkit that installs the CuPy for this torch."""
    return "cuda12" if (torch.version.cuda or "13").startswith("12") else "cuda13"


def toolchain() -> dict[str, str | None]:
    """Report the versions of CuPy and of its NVRTC, each None if it cannot be used, and the
    `problem` met.
    """
    found: dict[str, str | None] = {"cupy": None, "nvrtc": None, "problem": None}
    try:
        import cupy
        from cupy.cuda import nvrtc

        found["nvrtc"] = ".".join(str(part) for part in nvrtc.getVersion())
        found["cupy"] = cupy.__version__
    except Exception as error:  # a CuPy that does not match the machine fails to load in many ways
        found["problem"] = reason(error)
    return found


def compile(name: str, instances: Sequence[str], arch: str) -> Binary:
    """Compile `name`.cu for an architecture such as sm_90a; needs no GPU.

    `instances` are C++ name expressions such as `f<half, float>`. KernelError with the compiler's
    first error, or with the extra to install if CuPy is missing.
    """
    nvrtc = _usable_nvrtc()
    headers = {header: text.encode() for header, text in _headers().items()}
    program = nvrtc.createProgram(
        _text(source_dir() / f"{name}.cu"),
        f"{name}.cu",
        list(headers.values()),
        [header.encode() for header in headers],
    )
    try:
        for instance in instances:
            nvrtc.addNameExpression(program, instance)
        anew = (
            ["--no-cache"] if nvrtc.getVersion() >= (13, 0) else []
        )  # the driver's own cache drops the log
        nvrtc.compileProgram(program, [f"--gpu-architecture={arch}", *OPTIONS, *anew])
        return Binary(
            nvrtc.getCUBIN(program),
            {instance: nvrtc.getLoweredName(program, instance) for instance in instances},
            nvrtc.getProgramLog(program).strip("\0 \n"),
        )
    except nvrtc.NVRTCError as error:
        lines = nvrtc.getProgramLog(program).splitlines()
        first = next(
            (line for line in lines if "error" in line), "".join(lines[:1]) or reason(error)
        )
        compiler = f"NVRTC {'.'.join(map(str, nvrtc.getVersion()))}"
        raise KernelError(
            f"{name}.cu does not compile for {arch} with {compiler}: {first.strip()[:300]}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def cached(name: str, instances: Sequence[str], arch: str) -> Binary:
    """As `compile`, but read the binary from the disk cache if it is there, and write it there
    otherwise.

    Several processes may do this at once, because entries are written atomically. A damaged entry
    is compiled again. If the folder cannot be written, one warning says so.
    """
    path = _entry(name, instances, arch)
    try:
        with files.open_regular(path) as file:
            return _decoded(file.read())
    except (QuantkitError, OSError, ValueError):
        binary = compile(name, instances, arch)
    try:
        files.make_folder(path.parent, parents=True)
        files.write_atomic(path, _encoded(binary))
    except (QuantkitError, OSError):
        _warn_once(path.parent)
    return binary


def _entry(name: str, instances: Sequence[str], arch: str) -> Path:
    return cache_dir() / f"{name}-{arch}-{cache_key(name, instances, arch)}"


def uncompiled(name: str, instances: Sequence[str], device: torch.device) -> list[str]:
    """List the instances that `load` would compile, because the disk cache has no
    binary of them.
    """
    arch = arch_of(device)
    return [instance for instance in instances if not _entry(name, (instance,), arch).exists()]


def load(name: str, instances: Sequence[str], device: torch.device) -> dict[str, driver.Function]:
    """Load instances of `name`.cu on a CUDA device, once per process and device; returns the
    functions by instance.

    Each instance is compiled by itself, on all cores. KernelError for a GPU that is too old,
    without CuPy, for a source that does not compile or load, or during a capture of torch's current
    stream.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with _LOCK:
        return loaded(name, tuple(instances), index)


@functools.cache
def loaded(name: str, instances: tuple[str, ...], index: int) -> dict[str, driver.Function]:
    device = torch.device("cuda", index)
    if driver.stream_state(device).graph:
        raise KernelError(
            f"{name}.cu is first used on {device} in a capture", "call it once before the capture"
        )
    arch = arch_of(device)
    with ThreadPoolExecutor(
        min(len(instances), os.cpu_count() or 1)
    ) as pool:  # NVRTC releases the GIL
        binaries = list(pool.map(lambda instance: cached(name, (instance,), arch), instances))
    import cupy
    from cupy.cuda import function

    functions: dict[str, driver.Function] = {}
    try:
        with cupy.cuda.Device(index):
            for binary in binaries:
                module = function.Module()
                module.load(binary.cubin)
                functions |= {
                    instance: driver.Function(module.get_function(lowered))
                    for instance, lowered in binary.names.items()
                }
    except RuntimeError as error:  # the base class of CuPy's driver errors
        raise KernelError(
            f"the kernels of {name}.cu cannot be loaded on cuda:{index}: {reason(error)}"
        ) from error
    return functions


def _usable_nvrtc() -> Any:
    problem = toolchain()["problem"]
    if problem is not None:
        raise KernelError(
            f"kernels are compiled through CuPy, which does not load ({problem}): {install()}"
        )
    from cupy.cuda import nvrtc

    return nvrtc


def install() -> str:
    """Write the command that installs a CuPy for this torch."""
    return names.install(f"cupy-{extra()}x")


def _headers() -> dict[str, str]:
    return {path.name: _text(path) for path in sorted(source_dir().glob("*.cuh"))}


def _text(path: Path) -> str:
    with files.open_regular(path) as file:
        return file.read().decode()


def cache_key(name: str, instances: Sequence[str], arch: str) -> str:
    parts = [
        _text(source_dir() / f"{name}.cu"),
        _headers(),
        OPTIONS,
        list(instances),
        arch,
        list(_usable_nvrtc().getVersion()),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _encoded(binary: Binary) -> bytes:
    data = msgspec.msgpack.encode(binary)
    return hashlib.sha256(data).digest() + data


def _decoded(entry: bytes) -> Binary:
    digest, data = entry[:32], entry[32:]
    if hashlib.sha256(data).digest() != digest:
        raise ValueError("damaged")
    return msgspec.msgpack.decode(data, type=Binary)


@functools.cache
def _warn_once(folder: Path) -> None:
    warnings.warn(
        f"compiled kernels cannot be kept in {folder}, so that every start compiles them again: "
        "make it writable, or set QUANTKIT_CACHE to a folder that is",
        RuntimeWarning,
        stacklevel=2,
    )
