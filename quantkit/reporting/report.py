"""`quantkit_report.json`, the report that the pipeline writes into every output folder.

A report is a plain mapping. It may come from a folder of unknown origin, so a reader must accept that any key is
absent, and print names as data.
"""

from __future__ import annotations

import hashlib
import platform
import re
import resource
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import quantkit
from quantkit.errors import CheckpointError
from quantkit.io.json_files import dump_json, load_json

REPORT = "quantkit_report.json"

SCALES = ("floored", "subnormal", "zero")

#: Keys of the front matter of a source's model card that hold for an output as well.
KEPT = ("license", "license_name", "license_link", "language", "pipeline_tag", "tags")
#: Entries of `base`.
BASE = ("name", "revision", "base_model", "relation", *KEPT)
#: Facts of a layer that are text.
WORDS = ("reason", "by_magnitude", "descent_skipped", "few_routed", "restated_from", "requantized_from")
#: Types of the entries that quantkit reads; any of them may be absent.
TYPES: dict[str, type] = {
    "layers": list,
    "files": dict,
    "source": dict,
    "totals": dict,
    "phases": dict,
    "calibration": dict,
    "dense": list,
    "notices": list,
    "layout_notices": list,
    "readers": list,
    "opened_by": list,
    "not_opened_by": dict,
    "not_tried": dict,
    "base": dict,
    "same_values": int,
    "left_out": list,
    "evaluation": dict,
}
#: Facts of a layer, and entries of `totals`, that must be numbers.
COUNTS = ("zeros", "kept", "dead_columns", "guard_rows", *(f"{s}_scales" for s in SCALES))
SCALE_ERRORS = ("rounded_scales", "scale_error", "mean_scale_error")
NUMBERS = ("relative_error", "loss", "rtn_loss", "norm", *COUNTS, *SCALE_ERRORS)
#: Entries, at any depth, that differ from run to run or from machine to machine.
VOLATILE = ("environment", "phases", "peak_memory", "seconds", "opened_by", "not_opened_by", "not_tried")
TOTALS = ("bits_per_weight", "share", "source_bytes", "bytes", "seconds")
EVALUATED = ("before", "after", "kld", "top1")


def heading(
    command: str, name: str, revision: str | None, files: Mapping[str, str], base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Build the entries that are known before the work: versions, machine, the source and its file hashes.

    `base` has the facts about the original model that the outputs of each step hand on.
    """
    source = {"name": valid_text(name), "revision": revision}
    known = base or source
    return {
        "quantkit": quantkit.__version__,
        "command": command,
        "base": {key: _valid(known[key]) for key in BASE if key in known},
        "source": {**source, "files": dict(files)},
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": metadata.version("transformers"),
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
        },
    }


def valid_text(name: str) -> str:
    """Return the name of a file or folder as text that UTF-8 can hold: it may not be valid text."""
    return name.encode(errors="backslashreplace").decode()


def _valid(value: Any) -> Any:
    return valid_text(value) if isinstance(value, str) else value


def phases(done: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Add up the seconds of each phase over journal lines."""
    return added_up(line.get("facts", {}).get("phases", {}) for line in done)


def added_up(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up seconds by phase."""
    total: dict[str, float] = {}
    for part in parts:
        for phase, seconds in part.items():
            total[phase] = total.get(phase, 0.0) + seconds
    return total


def digest(report: Mapping[str, Any]) -> str:
    """Return the SHA-256 of what a report says about bytes: every hash, name, shape, count and setting.

    Times, memory and machine differ from run to run. The last digits of figures depend on the number of threads.
    """
    return hashlib.sha256(dump_json(_constant(report))).hexdigest()


def _constant(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _constant(held) for key, held in value.items() if key not in VOLATILE and not isinstance(held, float)
        }
    return [_constant(held) for held in value] if isinstance(value, list) else value


def peak_memory() -> dict[str, int]:
    """Measure the peak memory of this process in bytes: `ram`, and with a GPU `vram`."""
    peak = {"ram": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)}
    with suppress(OSError):  # on Linux, ru_maxrss includes the peak of the parent process
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        peak["ram"] = int(found[1]) * 1024 if found else peak["ram"]
    used = max((torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())), default=0)
    return peak | ({"vram": used} if used else {})


def load(folder: Path) -> dict[str, Any]:
    """Read the report of an output folder, `{}` if it has none; CheckpointError if an entry has a wrong type."""
    path = folder / REPORT
    if not path.exists() and not path.is_symlink():
        return {}
    report = load_json(path)
    wrong = _malformed(report)
    if wrong is not None:
        raise CheckpointError(f"{path}: {wrong} is not what a report has there: quantize or pack again")
    return report


def _malformed(report: Mapping[str, Any]) -> str | None:
    """Find the first entry that has a wrong type, None if there is none."""
    for key, kind in TYPES.items():
        if not isinstance(report.get(key, kind()), kind):
            return key
    totals = report.get("totals", {})
    if not isinstance(totals.get("peak_memory", {}), dict):
        return "totals"
    numbers = {"phases": [*report.get("phases", {}).values()], "totals": [*totals.get("peak_memory", {}).values()]}
    numbers["totals"] += [totals.get(key) for key in TOTALS]
    sources = report.get("calibration", {}).get("sources", [])
    if not isinstance(sources, list) or not all(isinstance(source, dict) for source in sources):
        return "calibration"
    numbers["calibration"] = [source.get("share") for source in sources]
    numbers["evaluation"] = [report.get("evaluation", {}).get(key) for key in EVALUATED]
    for layer in report.get("layers", []):
        if not isinstance(layer, dict) or not isinstance(layer.get("name"), str):
            return "layers"
        if not isinstance(layer.get("rungs", []), list) or not all(isinstance(layer.get(w, ""), str) for w in WORDS):
            return "layers"
        numbers.setdefault("layers", []).extend(layer.get(key) for key in NUMBERS)
    return next((key for key, found in numbers.items() if not all(_is_number(value) for value in found)), None)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (int, float))
