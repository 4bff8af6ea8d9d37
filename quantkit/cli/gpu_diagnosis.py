"""The part of the diagnosis that needs torch: its build, CuPy, the GPUs, and the kernels that run
on them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

import quantkit.planning.needs  # noqa: F401  # shows whether the packages of a run load
from quantkit.cli.doctor import Check, at_least, installed_version
from quantkit.core.memory_limits import free_memory
from quantkit.errors import KernelError
from quantkit.kernels import MATMULS, loader, missing
from quantkit.layouts import LAYOUTS
from quantkit.names import Json


def machine() -> Json:
    """Count torch's threads and the bytes of free memory (None: unknown)."""
    return {"threads": torch.get_num_threads(), "free_memory": free_memory()}


def cuda_build() -> Check:
    """Check that torch sees the GPU. A machine without a GPU needs no CUDA build."""
    found = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    needs = "a CUDA build where there is an NVIDIA GPU"
    works, for_cpu = torch.cuda.is_available(), torch.version.cuda is None
    if works or (not Path("/proc/driver/nvidia").exists() and shutil.which("nvidia-smi") is None):
        return Check("torch build", found, needs, True if works or for_cpu else None)
    fix = (
        "pip install --force-reinstall --no-cache-dir torch"
        if for_cpu
        else "nvidia-smi   # the driver does not answer torch: it says why"
    )
    return Check("torch build", found, needs, False, fix)


def cupy() -> Check:
    """Check CuPy, which compiles the kernels. Its package depends on the CUDA version of the torch
    build.
    """
    state = loader.toolchain()
    found = f"{state['cupy']}, NVRTC {state['nvrtc']}" if state["nvrtc"] else None
    needs = ">=13.6, for kernels on a GPU"
    if state["nvrtc"]:
        return Check("cupy", found, needs, at_least(str(state["cupy"]), "13.6"))
    installed = next(
        (name for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy") if installed_version(name)), None
    )
    if installed is not None:
        found = f"{installed} does not load: {state['problem']}"
    fix = loader.install()
    if installed not in (None, f"cupy-{loader.extra()}x"):
        fix = f"pip uninstall -y {installed} && {fix}"
    return Check("cupy", found, needs, False if torch.cuda.is_available() else None, fix)


def gpus() -> Iterator[Json]:
    """Describe the GPUs with compute capability, memory in bytes, and why kernels cannot run on one
    (`problem`).
    """
    if not torch.cuda.is_available():
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        capability, problem = f"{facts.major}.{facts.minor}", None
        try:
            loader.arch_name(facts.major, facts.minor)
        except KernelError as error:
            problem = str(error)
        yield {
            "name": facts.name,
            "compute_capability": capability,
            "memory": facts.total_memory,
            "problem": problem,
        }


def kernels() -> Json:
    """Name the layouts whose kernel runs on a GPU of this machine. `note` has the GPUs, or the
    obstacle.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cuda", index) for index in range(count)]
    obstacles = {(name, gpu): missing(name, gpu) for name in sorted(MATMULS) for gpu in devices}
    here = [
        name for name in sorted(MATMULS) if any(obstacles[name, gpu] is None for gpu in devices)
    ]
    if not here:
        why = next(iter(obstacles.values()), None) or "torch sees no CUDA GPU"
        return {"here": here, "note": f"none run here: {why}; verify proves the bits without them"}
    able = dict.fromkeys(
        torch.cuda.get_device_properties(gpu).name
        for (_, gpu), why in obstacles.items()
        if why is None
    )
    others = ", ".join(name for name in LAYOUTS if name not in here)
    note = (
        f"for {', '.join(here)}, on {', '.join(able)}; other programs multiply {others}, whose "
        "bits verify proves"
    )
    return {"here": here, "note": note}
