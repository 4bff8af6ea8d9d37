"""`quantkit_report.json`, the report that the pipeline writes into every output folder.

A report is a plain mapping. It may come from a folder of unknown origin, so a reader must accept that any key is
absent, and print names as data.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import CheckpointError
from quantkit.io.hashing import hash_of
from quantkit.io.json_files import dump_json, load_json, shown
from quantkit.io.model_folder import inside
from quantkit.version import __version__

REPORT = "quantkit_report.json"
#: The entry that holds the hash of all others.
SEAL = "seal"

SCALES = ("floored", "subnormal", "zero")

#: Front matter keys of a source's model card that also hold for an output.
KEPT = ("license", "license_name", "license_link", "language", "pipeline_tag", "tags")
#: Entries of `base`.
BASE = ("name", "revision", "base_model", "relation", *KEPT)
#: Facts of a layer that are text.
WORDS = ("reason", "by_magnitude", "descent_skipped", "few_routed", "restated_from", "requantized_from")
#: The kinds of entries that quantkit reads; any of them may be absent.
_TEXT, _TEXT_OR_NULL, _TEXTS, _TEXT_BY_NAME = "text", "text or null", "a list of texts", "an object of texts"
_NUMBER, _NUMBERS, _NUMBER_BY_NAME = "a number", "a list of numbers", "an object of numbers"
_NUMBER_OR_NULL = "a number or null"
_COUNTS = "a number or a list of numbers"
_OBJECT, _OBJECTS, _SCALAR = "an object", "a list of objects", "text, a number, or a list of these"
_ENTRIES = {
    **dict.fromkeys(("quantkit", "command", "failed", "device", "compute_dtype", "auto_class", SEAL), _TEXT),
    **dict.fromkeys(("recipe_sha256", "layout", "scheme"), _TEXT_OR_NULL),
    **dict.fromkeys(("dense", "notices", "layout_notices", "readers", "opened_by", "left_out"), _TEXTS),
    **dict.fromkeys(("files", "not_opened_by", "not_tried"), _TEXT_BY_NAME),
    **dict.fromkeys(("source", "base", "totals", "calibration", "recipe", "environment", "fit"), _OBJECT),
    **dict.fromkeys(("evaluation", "distillation"), _OBJECT),
    "layers": _OBJECTS,
    "phases": _NUMBER_BY_NAME,
    **dict.fromkeys(("same_values", "outside"), _NUMBER),
    "ranks": _COUNTS,
}
#: Facts of a layer, and entries of `totals`, that must be numbers.
COUNTS = ("zeros", "kept", "dead_columns", "guard_rows", "zeroed", *(f"{s}_scales" for s in SCALES))
SCALE_ERRORS = ("rounded_scales", "scale_error", "mean_scale_error")
TUNING = ("untuned_loss", "untuned_error", "tuned_error", "tuned_step", "tuned_changed")
NUMBERS = ("relative_error", "loss", "rtn_loss", "norm", *COUNTS, *SCALE_ERRORS, *TUNING)
#: Entries, at any depth, that differ from run to run or from machine to machine; `profile` is of older versions.
VOLATILE = (
    *("environment", "phases", "profile", "peak_memory", "seconds", "opened_by", "not_opened_by", "not_tried"),
    SEAL,
)
_FACTS = {
    **dict.fromkeys(("name", "digest", "scheme", *WORDS), _TEXT),
    **dict.fromkeys(("layout", "method", "prune"), _TEXT_OR_NULL),
    **dict.fromkeys((*NUMBERS, "seconds", "tokens", "requantized_error"), _NUMBER_OR_NULL),
    **dict.fromkeys(("shape", "true_shape", "rungs"), _NUMBERS),
}
TOTALS = ("bits_per_weight", "share", "source_bytes", "bytes", "seconds")
KLD = ("kld", "kld_low", "kld_high", "kld_median", "kld_p99", "kld_p999", "kld_above")
EVALUATED = ("before", "after", "top1", *KLD)


def heading(
    command: str, name: str, revision: str | None, files: Mapping[str, str], base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Build the entries that are known before the work: versions, machine, the source and its file hashes.

    `base` has the facts about the original model that the outputs of each step hand on.
    """
    source = {"name": valid_text(name), "revision": revision}
    known = base or source
    return {
        "quantkit": __version__,
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


def untuned(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a tuned layer. The loss is not recomputed, so it is named as the loss before tuning."""
    return {"untuned_loss" if key == "loss" else key: value for key, value in facts.items()}


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
    """Compute the SHA-256 of a report's facts about bytes: every hash, name, shape, count and setting.

    Times, memory and machine differ from run to run. The last digits of figures depend on the number of threads.
    """
    return hashlib.sha256(dump_json(_constant(report))).hexdigest()


def _constant(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _constant(held) for key, held in value.items() if key not in VOLATILE and not isinstance(held, float)
        }
    return [_constant(held) for held in value] if isinstance(value, list) else value


def seal(report: Mapping[str, Any]) -> str:
    """Return the entry SEAL of a report: the hash of the file without it."""
    return hash_of(dump_json({key: value for key, value in report.items() if key != SEAL}))


def peak_memory() -> dict[str, int]:
    """Measure the peak memory of this process in bytes: `ram`, and with a GPU `vram`."""
    peak = {"ram": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)}
    with suppress(OSError):  # on Linux, ru_maxrss includes the peak of the parent process
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        peak["ram"] = int(found[1]) * 1024 if found else peak["ram"]
    used = max((torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())), default=0)
    return peak | ({"vram": used} if used else {})


def load(folder: Path) -> dict[str, Any]:
    """Read the report of an output folder, `{}` if it has none.

    CheckpointError if an entry that quantkit reads or copies has a wrong type, the seal is not that of the other
    entries, or the file is a link out of the folder.
    """
    path = folder / REPORT
    if not path.exists() and not path.is_symlink():
        return {}
    report = load_json(inside(Path(os.path.realpath(folder)), REPORT))
    for where, kind in _malformed(report):
        raise CheckpointError(
            f"{shown(where)} must be {kind}", "restore the file", "quantize or pack again", subject=path
        )
    if SEAL in report and report[SEAL] != seal(report):
        raise CheckpointError("was changed since it was written", "restore it", "remove it", subject=path)
    return report


def _malformed(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (entry, the kind that it must be) for each entry of another kind."""
    yield from _wrong(report, _ENTRIES, "")
    for key in ("source", "base"):
        named = report.get(key, {})
        texts = dict.fromkeys(("name", "revision", "weights"), _TEXT_OR_NULL)
        yield from _wrong(named, {**texts, "files": _TEXT_BY_NAME}, f"{key}.")
    yield from _nested(report.get("base", {}), "base.")
    yield from _wrong(report.get("evaluation", {}), dict.fromkeys(EVALUATED, _NUMBER_OR_NULL), "evaluation.")
    yield from _nested(report.get("evaluation", {}), "evaluation.")
    totals, calibration = report.get("totals", {}), report.get("calibration", {})
    yield from _wrong(totals, {**dict.fromkeys(TOTALS, _NUMBER_OR_NULL), "peak_memory": _NUMBER_BY_NAME}, "totals.")
    yield from _wrong(calibration, {"sources": _OBJECTS}, "calibration.")
    yield from _wrong(
        report.get("distillation", {}), dict.fromkeys(("kl_before", "kl_after"), _NUMBER), "distillation."
    )
    yield from _nested(report.get("distillation", {}), "distillation.")
    for source in calibration.get("sources", []):
        yield from _wrong(source, {"share": _NUMBER_OR_NULL}, "calibration.sources.")
    for layer in report.get("layers", []):
        if "name" not in layer:
            yield "layers.name", _TEXT
        yield from _wrong(layer, _FACTS, "layers.")
        yield from _nested(layer, "layers.")


def _nested(found: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    """Yield the entries deeper than a list; a conversion copies them all, also from other versions."""
    for key, value in found.items():
        if not all(_is(_SCALAR, part) for part in (value if isinstance(value, list) else [value])):
            yield f"{where}{key}", _SCALAR


def _wrong(found: Mapping[str, Any], kinds: Mapping[str, str], where: str) -> Iterator[tuple[str, str]]:
    return ((f"{where}{key}", kind) for key, kind in kinds.items() if key in found and not _is(kind, found[key]))


def _is(kind: str, value: Any) -> bool:
    """Return True if an entry of a report is of a kind."""
    if kind in (_TEXT, _TEXT_OR_NULL):
        return isinstance(value, str) or (value is None and kind == _TEXT_OR_NULL)
    if kind in (_NUMBER, _NUMBER_OR_NULL):
        return isinstance(value, (int, float)) or (value is None and kind == _NUMBER_OR_NULL)
    if kind == _COUNTS:
        return _is(_NUMBER, value) or _is(_NUMBERS, value)
    if kind == _SCALAR:
        return value is None or isinstance(value, (str, int, float))
    if kind in (_TEXTS, _NUMBERS, _OBJECTS):
        each = {_TEXTS: _TEXT, _NUMBERS: _NUMBER, _OBJECTS: _OBJECT}[kind]
        return isinstance(value, list) and all(_is(each, part) for part in value)
    if kind in (_TEXT_BY_NAME, _NUMBER_BY_NAME):
        each = {_TEXT_BY_NAME: _TEXT, _NUMBER_BY_NAME: _NUMBER}[kind]
        return isinstance(value, dict) and all(_is(each, part) for part in value.values())
    return isinstance(value, dict)
