"""The command doctor: packages, the machine, and the exact command that installs a missing part.

Versions come from package metadata, and torch is imported late. So a broken library cannot stop its
own diagnosis.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from quantkit.cli import show
from quantkit.cli.options import command
from quantkit.cli.process import FAILED, emit, leave
from quantkit.core.units import counted, format_bytes
from quantkit.errors import reason
from quantkit.names import OPTIONAL, Json
from quantkit.progress import Progress
from quantkit.version import __version__

PYTHON = ((3, 10), (3, 15))


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis. `ok` is None if the thing is missing and nothing here needs it."""

    name: str
    found: str | None
    needs: str
    ok: bool | None
    fix: str | None = None


@command("doctor", "quantkit doctor", computes=False)
def doctor(as_json: bool, progress: Progress) -> None:
    """Say what is installed and missing.

    Packages, GPUs and kernels that can be used here, and what to type against what is missing."""
    found = diagnose()
    emit(show.as_json(found) if as_json else format_diagnosis(found))
    if not found["ok"]:
        leave(FAILED, "Error: something that quantkit needs is missing, the fixes are above")


def format_diagnosis(found: Mapping[str, Any]) -> str:
    """Format the diagnosis of `doctor`, with the commands that fix it."""
    marks = {True: "ok", False: "MISSING", None: "-"}
    rows = [
        (marks[check["ok"]], check["name"], check["found"] or "not found", check["needs"])
        for check in found["checks"]
    ]
    machine = found["machine"]
    gpus = [
        f"{gpu['name']}, {format_bytes(gpu['memory'])}, "
        f"sm_{gpu['compute_capability'].replace('.', '')}"
        + (f" ({gpu['problem']})" if gpu["problem"] else "")
        for gpu in found["gpus"]
    ]
    threads = f" ({counted(machine['threads'], 'thread')} used)" if machine["threads"] else ""
    lines = [
        show.table(("", "what", "found", "needed"), rows),
        "",
        show.facts(
            [
                ("machine", machine["platform"]),
                ("cores", f"{machine['cores']}{threads}"),
                (
                    "free memory",
                    format_bytes(machine["free_memory"]) if machine["free_memory"] else "unknown",
                ),
                ("free disk", format_bytes(machine["free_disk"])),
                ("GPU", "; ".join(gpus) or "none that torch sees"),
                ("kernels", found["kernels"]["note"]),
                *(("fix", fix) for fix in found["fixes"]),
                *(("optional", check["fix"]) for check in found["checks"] if check["ok"] is None),
            ]
        ),
    ]
    return "\n".join(lines)


def diagnose() -> Json:
    """Diagnose the installation: `ok`, `checks` (name, found, needs, ok, fix), `gpus`, `kernels`,
    `machine`, `fixes`.

    `ok` is False if something is missing that quantkit or this machine's GPU needs. The free disk
    space, in bytes, is measured at the current folder.
    """
    checks = [_python(), *(package(name, lowest) for name, lowest in required().items())]
    gpus: list[Json] = []
    machine: Json = {"threads": None, "free_memory": None}
    try:
        from quantkit.cli import gpu_diagnosis
    except (
        ImportError,
        OSError,
    ) as error:  # a torch whose libraries do not fit the machine raises an OSError
        kernels: Json = {"here": [], "note": f"unknown: {reason(error)}"}
        if all(check.ok for check in checks):
            checks.append(_broken(error))
    else:
        gpus, kernels, machine = (
            [*gpu_diagnosis.gpus()],
            gpu_diagnosis.kernels(),
            gpu_diagnosis.machine(),
        )
        checks += [gpu_diagnosis.cuda_build(), gpu_diagnosis.cupy()]
    optional = {name: facts for name, facts in OPTIONAL.items() if not name.startswith("cupy")}
    checks += [package(name, lowest, why) for name, (lowest, why) in optional.items()]
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
            "free_disk": shutil.disk_usage(".").free,
        },
        "fixes": list(
            dict.fromkeys(check.fix for check in checks if check.fix and check.ok is not None)
        ),
    }


def _python() -> Check:
    low, high = (".".join(map(str, version)) for version in PYTHON)
    ok = PYTHON[0] <= sys.version_info[:2] < PYTHON[1]
    fix = (
        None
        if ok
        else f"install a Python from {low} to before {high}, and quantkit again with its pip"
    )
    return Check("python", platform.python_version(), f">={low},<{high}", ok, fix)


def _broken(error: ImportError | OSError) -> Check:
    """Report a package that is installed but does not load."""
    name = (getattr(error, "name", None) or "torch").partition(".")[0].replace("_", "-")
    fix = f"pip install --force-reinstall --no-cache-dir {name if name in required() else 'torch'}"
    return Check(name, f"does not load: {reason(error)}", "a package that loads", False, fix)


def required() -> dict[str, str]:
    """Read the packages that quantkit needs, each with its lowest version; none if quantkit is not
    installed.
    """
    stated = metadata.requires("quantkit") or [] if installed_version("quantkit") else []
    rule = re.compile(
        r"([\w.-]+)[^;]*>=([\d.]+)[^;]*"
    )  # other releases may be left out; behind a `;` stands an extra
    return dict((found[1], found[2]) for each in stated if (found := rule.fullmatch(each)))


def package(name: str, lowest: str, why: str = "") -> Check:
    """Check a package that quantkit needs, or only the uses that `why` names."""
    found = installed_version(name)
    ok = at_least(found, lowest) if found is not None else None if why else False
    return Check(
        name,
        found,
        f">={lowest} {why}".rstrip(),
        ok,
        None if ok else f"pip install --upgrade '{name}>={lowest}'",
    )


def at_least(version: str, lowest: str) -> bool:
    """Compare the leading numbers of two versions (`2.13.0+cpu` is 2.13.0): is the first one as
    high or higher?
    """
    return _numbers(version) >= _numbers(lowest)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def installed_version(package: str) -> str | None:
    """Find the version of an installed package, None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
