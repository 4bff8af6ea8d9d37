"""The command doctor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.cli import show
from quantkit.cli.exits import FAILED, emit, leave
from quantkit.cli.options import command
from quantkit.core.units import format_bytes
from quantkit.progress import Progress


@command("doctor", "quantkit doctor", computes=False)
def doctor(as_json: bool, progress: Progress) -> None:
    """Say what is installed and missing.

    Packages, GPUs and kernels that can be used here, and what to type against what is missing."""
    from quantkit.cli import diagnosis

    found = diagnosis.diagnose()
    emit(show.as_json(found) if as_json else format_diagnosis(found))
    if not found["ok"]:
        leave(FAILED, "Error: something that quantkit needs is missing, the fixes are above")


def format_diagnosis(found: Mapping[str, Any]) -> str:
    """Format the diagnosis of `doctor`, with the commands that fix it."""
    marks = {True: "ok", False: "MISSING", None: "-"}
    rows = [
        (marks[check["ok"]], check["name"], check["found"] or "not found", check["needs"]) for check in found["checks"]
    ]
    machine = found["machine"]
    gpus = [
        f"{gpu['name']}, {format_bytes(gpu['memory'])}, sm_{gpu['compute_capability'].replace('.', '')}"
        + (f" ({gpu['problem']})" if gpu["problem"] else "")
        for gpu in found["gpus"]
    ]
    threads = f" ({machine['threads']} threads used)" if machine["threads"] else ""
    lines = [
        show.table(("", "what", "found", "needed"), rows),
        "",
        show.facts(
            [
                ("machine", machine["platform"]),
                ("cores", f"{machine['cores']}{threads}"),
                ("free memory", format_bytes(machine["free_memory"]) if machine["free_memory"] else "unknown"),
                ("free disk", format_bytes(machine["free_disk"])),
                ("GPU", "; ".join(gpus) or "none that torch sees"),
                ("kernels", found["kernels"]["note"]),
                *(("fix", fix) for fix in found["fixes"]),
            ]
        ),
    ]
    return "\n".join(lines)
