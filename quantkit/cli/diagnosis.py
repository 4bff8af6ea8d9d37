"""The diagnosis that doctor prints: packages, the machine, and the exact command that fixes what is missing.

Versions come from package metadata, and torch is imported late. So a broken library cannot stop its own diagnosis.
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

from quantkit.errors import reason
from quantkit.version import __version__

PYTHON = ((3, 10), (3, 15))
#: Required packages with the lowest version of each. A test compares them with pyproject.toml.
REQUIRED = {
    "accelerate": "1.1",
    "blake3": "1.0",
    "click": "8.1",
    "datasets": "3.2",
    "filelock": "3.13",
    "huggingface-hub": "1.0",
    "jinja2": "3.1",
    "numpy": "1.26",
    "PyYAML": "6.0",
    "regex": "2024.4",
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
    checks = [_python(), *(required_package(name, lowest) for name, lowest in REQUIRED.items())]
    gpus: list[dict[str, Any]] = []
    machine: dict[str, Any] = {"threads": None, "free_memory": None}
    try:
        from quantkit.cli import gpu_diagnosis
    except (ImportError, OSError) as error:  # a torch whose libraries do not fit the machine raises an OSError
        kernels: dict[str, Any] = {"here": [], "note": f"unknown: {reason(error)}"}
        if all(check.ok for check in checks):
            checks.append(_broken(error))
    else:
        gpus, kernels, machine = gpu_diagnosis.gpus(), gpu_diagnosis.kernels(), gpu_diagnosis.machine()
        checks += [gpu_diagnosis.cuda_build(), gpu_diagnosis.cupy()]
    checks += [
        optional_package(
            "compressed-tensors", "0.15", "for transformers to load our default INT4 output", "compressed-tensors"
        ),
    ]
    return {
        "quantkit": __version__,
        "ok": all(check.ok is not False for check in checks),
        "checks": [asdict(check) for check in checks],
        "gpus": gpus,
        "kernels": kernels,
        "machine": {
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            **machine,
            "free_disk": shutil.disk_usage(folder).free,
        },
        "fixes": list(dict.fromkeys(check.fix for check in checks if check.fix and check.ok is not None)),
    }


def at_least(version: str, lowest: str) -> bool:
    """Compare the leading numbers of two versions (`2.13.0+cpu` is 2.13.0): is the first one as high or higher?"""
    return _numbers(version) >= _numbers(lowest)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def installed_version(package: str) -> str | None:
    """Find the version of an installed package, None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _python() -> Check:
    low, high = (".".join(map(str, version)) for version in PYTHON)
    ok = PYTHON[0] <= sys.version_info[:2] < PYTHON[1]
    fix = None if ok else f"install a Python from {low} to before {high} and run: python -m pip install quantkit"
    return Check("python", platform.python_version(), f">={low},<{high}", ok, fix)


def required_package(name: str, lowest: str) -> Check:
    found = installed_version(name)
    ok = found is not None and at_least(found, lowest)
    return Check(name, found, f">={lowest}", ok, None if ok else f"pip install --upgrade '{name}>={lowest}'")


def _broken(error: ImportError | OSError) -> Check:
    """Report a package that is installed but does not load."""
    name = (getattr(error, "name", None) or "torch").partition(".")[0].replace("_", "-")
    fix = f"pip install --force-reinstall --no-cache-dir {name if name in REQUIRED else 'torch'}"
    return Check(name, f"does not load: {reason(error)}", "a package that loads", False, fix)


def optional_package(name: str, lowest: str, why: str, target: str) -> Check:
    found = installed_version(name)
    ok = None if found is None else at_least(found, lowest)
    wanted = target if "[" in target else f"{target}>={lowest}"
    return Check(name, found, f">={lowest} {why}", ok, None if ok else f"pip install --upgrade '{wanted}'")
