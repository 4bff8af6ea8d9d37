"""The diagnosis that doctor prints: packages, the machine, and the exact command that fixes what is missing.

Versions come from package metadata, and torch is imported late. So a broken library cannot stop its own diagnosis.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantkit.cli.checks import Check, optional_package, required, required_package
from quantkit.errors import reason
from quantkit.version import __version__

PYTHON = ((3, 10), (3, 15))


def diagnose(folder: Path = Path(".")) -> dict[str, Any]:
    """Diagnose the installation: `ok`, `checks` (name, found, needs, ok, fix), `gpus`, `kernels`, `machine`, `fixes`.

    `ok` is False if something is missing that quantkit or this machine's GPU needs. The free disk space, in bytes, is
    that of `folder`.
    """
    checks = [_python(), *(required_package(name, lowest) for name, lowest in required().items())]
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
        optional_package("gguf", "0.18", "to quantize GGUF files", "gguf"),
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


def _python() -> Check:
    low, high = (".".join(map(str, version)) for version in PYTHON)
    ok = PYTHON[0] <= sys.version_info[:2] < PYTHON[1]
    fix = None if ok else f"install a Python from {low} to before {high} and run: python -m pip install quantkit"
    return Check("python", platform.python_version(), f">={low},<{high}", ok, fix)


def _broken(error: ImportError | OSError) -> Check:
    """Report a package that is installed but does not load."""
    name = (getattr(error, "name", None) or "torch").partition(".")[0].replace("_", "-")
    fix = f"pip install --force-reinstall --no-cache-dir {name if name in required() else 'torch'}"
    return Check(name, f"does not load: {reason(error)}", "a package that loads", False, fix)
