"""The command doctor."""

from __future__ import annotations

from quantkit.cli import show
from quantkit.cli.exits import FAILED, emit, leave
from quantkit.cli.options import command
from quantkit.progress import Progress


@command("doctor", "quantkit doctor", computes=False)
def doctor(as_json: bool, progress: Progress) -> None:
    """Say what is installed and missing.

    Packages, GPUs and kernels that can be used here, and what to type against what is missing."""
    from quantkit.cli import diagnosis

    found = diagnosis.diagnose()
    emit(show.as_json(found) if as_json else show.diagnosis(found))
    if not found["ok"]:
        leave(FAILED, "Error: something that quantkit needs is missing, the fixes are above")
