"""Ask vLLM, by a script that checks folders on a CPU, which outputs of the census it opens."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: what vLLM says of an architecture that it has no class for
UNKNOWN = "are not supported for now"


def opened(script: Path, folders: Sequence[Path]) -> dict[str, str]:
    """Return folder name -> "ok", "no class" or vLLM's reason.

    `script` takes folders and `--json`. It prints one object a folder: `folder`, `ok`, and on failure `stage` and
    `error`. RuntimeError if it has no answer for a folder.
    """
    command = [sys.executable, str(script), "--json", "-q", *map(str, folders)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {}
    for line in filter(lambda text: text.startswith("{"), run.stdout.splitlines()):
        result = json.loads(line)
        found[Path(result["folder"]).name] = _verdict(result)
    if len(found) != len(folders):
        raise RuntimeError(f"{script}: {len(found)} of {len(folders)} folders were checked: {run.stderr[-500:]}")
    return found


def _verdict(result: dict[str, str]) -> str:
    if result["ok"]:
        return "ok"
    error = " ".join(result["error"].split())
    return "no class" if UNKNOWN in error else f"{result['stage']}: {error[:300]}"
