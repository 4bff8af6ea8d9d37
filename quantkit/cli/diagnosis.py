"""The diagnosis that doctor prints: packages, the machine, and the exact command that fixes what is missing.

Versions come from package metadata. So a broken library cannot stop its own diagnosis.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import quantkit
from quantkit.errors import KernelError
from quantkit.kernels import MATMULS, loader, missing, toolchain
from quantkit.layouts import LAYOUTS
from quantkit.pipeline.memory_estimate import free_memory

PYTHON = ((3, 10), (3, 15))
#: Required packages with the lowest version of each. A test compares them with pyproject.toml.
REQUIRED = {
    "accelerate": "1.1",
    "blake3": "1.0",
    "click": "8.1",
    "datasets": "3.2",
    "filelock": "3.13",
    "huggingface-hub": "1.0",
    "numpy": "1.26",
    "PyYAML": "6.0",
    "safetensors": "0.5",
    "torch": "2.10",
    "tqdm": "4.66",
    "transformers": "5.15",
    "typing-extensions": "4.10",
    "xxhash": "3.0",
}


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis. `ok` is None if the thing is missing and nothing here needs it."""

    name: str
    found: str | None
    needs: str
    ok: bool | None
    fix: str | None = None


def diagnose(folder: Path = Path(".")) -> dict[str, Any]:
    """Diagnose the installation: `ok`, `checks` (name, found, needs, ok, fix), `gpus`, `kernels`, `machine`, `fixes`.

    `ok` is False if something is missing that quantkit or this machine's GPU needs. The free disk space, in bytes, is
    that of `folder`.
    """
    checks = [_python(), *(_package(name, lowest) for name, lowest in REQUIRED.items()), _cuda_build(), _cupy()]
    checks += [
        _optional(
            "compressed-tensors", "0.15", "for transformers to load our default INT4 output", "compressed-tensors"
        ),
        _optional("matplotlib", "3.8", "for quantkit report --png", "quantkit[plot]"),
    ]
    return {
        "quantkit": quantkit.__version__,
        "ok": all(check.ok is not False for check in checks),
        "checks": [asdict(check) for check in checks],
        "gpus": _gpus(),
        "kernels": _kernels(),
        "machine": {
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "free_memory": free_memory(),
            "free_disk": shutil.disk_usage(folder).free,
        },
        "fixes": list(dict.fromkeys(check.fix for check in checks if check.fix and check.ok is not None)),
    }


def at_least(version: str, lowest: str) -> bool:
    """Compare the leading numbers of two versions (`2.13.0+cpu` is 2.13.0): is the first one as high or higher?"""
    return _numbers(version) >= _numbers(lowest)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _python() -> Check:
    low, high = (".".join(map(str, version)) for version in PYTHON)
    ok = PYTHON[0] <= sys.version_info[:2] < PYTHON[1]
    fix = None if ok else f"install a Python from {low} to before {high} and run: python -m pip install quantkit"
    return Check("python", platform.python_version(), f">={low},<{high}", ok, fix)


def _package(name: str, lowest: str) -> Check:
    found = _version(name)
    ok = found is not None and at_least(found, lowest)
    return Check(name, found, f">={lowest}", ok, None if ok else f"pip install --upgrade '{name}>={lowest}'")


def _optional(name: str, lowest: str, why: str, target: str) -> Check:
    found = _version(name)
    ok = None if found is None else at_least(found, lowest)
    wanted = target if "[" in target else f"{target}>={lowest}"
    return Check(name, found, f">={lowest} {why}", ok, None if ok else f"pip install --upgrade '{wanted}'")


def _cuda_build() -> Check:
    """Check that torch sees the GPU. A machine without a GPU needs no CUDA build."""
    found = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    needs = "a CUDA build where there is an NVIDIA GPU"
    if torch.cuda.is_available():
        return Check("torch build", found, needs, True)
    if not Path("/proc/driver/nvidia").exists() and shutil.which("nvidia-smi") is None:
        return Check("torch build", found, needs, True if torch.version.cuda is None else None)
    if torch.version.cuda is None:
        return Check("torch build", found, needs, False, "pip install --force-reinstall --no-cache-dir torch")
    return Check("torch build", found, needs, False, "nvidia-smi   # the driver does not answer torch: it says why")


def _cupy() -> Check:
    """Check CuPy, which compiles the kernels. Its package depends on the CUDA version of the torch build."""
    state = toolchain()
    found = f"{state['cupy']}, NVRTC {state['nvrtc']}" if state["nvrtc"] else None
    needs = ">=13.6, for kernels on a GPU"
    if state["nvrtc"]:
        return Check("cupy", found, needs, at_least(str(state["cupy"]), "13.6"))
    installed = next((name for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy") if _version(name)), None)
    if installed is not None:
        found = f"{installed} does not load: {state['problem']}"
    fix = loader.install()
    if installed not in (None, f"cupy-{loader.extra()}x"):
        fix = f"pip uninstall -y {installed} && {fix}"
    return Check("cupy", found, needs, False if torch.cuda.is_available() else None, fix)


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        capability, problem = f"{facts.major}.{facts.minor}", None
        try:
            loader.arch_name(facts.major, facts.minor)
        except KernelError as error:
            problem = str(error)
        gpu = {"name": facts.name, "compute_capability": capability, "memory": facts.total_memory, "problem": problem}
        found.append(gpu)
    return found


def _kernels() -> dict[str, Any]:
    """Name the layouts whose kernel runs on a GPU of this machine, and say in `note` where, or what is in the way."""
    gpus = [
        torch.device("cuda", index) for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    obstacles = {(name, gpu): missing(name, gpu) for name in sorted(MATMULS) for gpu in gpus}
    here = [name for name in sorted(MATMULS) if any(obstacles[name, gpu] is None for gpu in gpus)]
    if not here:
        why = next(iter(obstacles.values()), None) or "torch sees no CUDA GPU"
        return {"here": here, "note": f"none run here: {why}; verify proves the bits without them"}
    able = dict.fromkeys(
        torch.cuda.get_device_properties(gpu).name for (_, gpu), why in obstacles.items() if why is None
    )
    others = ", ".join(name for name in LAYOUTS if name not in here)
    note = f"for {', '.join(here)}, on {', '.join(able)}; other programs multiply {others}, whose bits verify proves"
    return {"here": here, "note": note}
