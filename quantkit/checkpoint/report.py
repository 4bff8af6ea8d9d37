"""`quantkit_report.json`, the report that the pipeline writes into every output folder.

A report is a plain mapping. It may come from a folder of unknown origin, so a reader must accept
that any key is absent, and print names as data.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import GenericAlias
from typing import Any

import msgspec
import torch

from quantkit.errors import CheckpointError, printable
from quantkit.io.files import hash_of
from quantkit.io.json_files import dump_json, load_json
from quantkit.io.model_folder import inside
from quantkit.names import Json, JsonView
from quantkit.version import __version__

REPORT = "quantkit_report.json"
#: The entry that holds the hash of all others.
SEAL = "seal"

#: Front matter keys of a source's model card that also hold for an output.
CARD_KEYS = ("license", "license_name", "license_link", "language", "pipeline_tag", "tags")
#: Entries of `base`.
BASE = ("name", "revision", "base_model", "relation", *CARD_KEYS)
#: Facts of a layer that are text.
WORDS = (
    "reason",
    "by_magnitude",
    "few_routed",
    "restated_from",
    "requantized_from",
)
#: Types of an entry that conversions copy unchanged, also from other versions: at most a list deep.
_Scalar = str | float | bool | None
_COPIED = dict[str, _Scalar | list[_Scalar] | dict[str, _Scalar]]
#: The largest sum of a row before its scale multiplies it, where vLLM's kernel holds it in float16
#: and it comes near.
ROW_SUM = "row_sum"
#: Facts of a layer that must be numbers.
NUMBERS = (
    "relative_error",
    "loss",
    "rtn_loss",
    "norm",
    ROW_SUM,
    "zeros",
    "kept",
    "dead_columns",
    "guard_rows",
    "zeroed",
    "all_zero",
    "floored_scales",
    "subnormal_scales",
    "zero_scales",
    "raised_scales",
    "rounded_scales",
    "scale_error",
    "mean_scale_error",
    "untuned_loss",
    "untuned_error",
    "tuned_error",
    "tuned_step",
    "tuned_changed",
)
#: Entries, at any depth, that differ from run to run or from machine to machine; `profile` is of
#: older versions.
VOLATILE = (
    "environment",
    "phases",
    "profile",
    "peak_memory",
    "seconds",
    "opened_by",
    "not_opened_by",
    "not_tried",
    SEAL,
)
KLD = ("kld", "kld_low", "kld_high", "kld_median", "kld_p99", "kld_p999", "kld_above")


def _entries(kinds: Mapping[Any, Any], *required: str) -> Any:
    """Describe an object for msgspec: kinds of entries, each for keys that may be absent, and
    `required` texts.
    """
    optional = [(key, kind, None) for keys, kind in kinds.items() for key in keys]
    return msgspec.defstruct("Entries", [*((key, str) for key in required), *optional])


#: The kinds of entries that quantkit reads.
_FACTS = {
    ("digest", "scheme", *WORDS): str,
    ("layout", "method", "prune"): str | None,
    (*NUMBERS, "seconds", "tokens", "requantized_error"): float | None,
    ("held_out",): dict[str, float],
    ("shape", "true_shape", "rungs"): list[float],
}
_NAMES = {("name", "revision", "weights"): str | None}
_CURVE = {("bytes", "bits", "harm"): float, ("fits",): bool}
_FIT = {
    ("target_size", "target_bits"): float | None,
    ("chosen",): str,
    ("best_uniform",): str | None,
    ("kld", "predicted"): dict[str, float],
    ("held_out",): _entries({("source",): str, ("tokens",): float}),
    ("curve",): GenericAlias(list, _entries(_CURVE, "scheme", "layout")),
}
_TOTALS = ("bits_per_weight", "share", "source_bytes", "bytes", "seconds")
_REPORT = {
    ("quantkit", "command", "failed", "device", "compute_dtype", "auto_class", SEAL): str,
    ("recipe_sha256", "layout", "scheme"): str | None,
    ("dense", "notices", "layout_notices", "readers", "opened_by", "left_out"): list[str],
    ("files", "not_opened_by", "not_tried"): dict[str, str],
    ("recipe", "environment"): Json,
    ("fit",): _entries(_FIT),
    ("same_values", "outside"): float,
    ("ranks",): float | list[float],
    ("phases",): dict[str, float],
    ("tuned_scales",): _entries({("steps", "before", "after"): float, ("reason",): str}),
    ("layers",): GenericAlias(list, _entries(_FACTS, "name")),
    ("source",): _entries({**_NAMES, ("files",): dict[str, str]}),
    ("base",): _entries(_NAMES),
    ("totals",): _entries({_TOTALS: float | None, ("peak_memory",): dict[str, float]}),
    ("calibration",): _entries(
        {
            ("sources",): GenericAlias(list, _entries({("share",): float | None})),
            ("held_out",): dict[str, float],
        }
    ),
    ("evaluation",): _entries({("before", "after", "top1", *KLD): float | None}),
}
_KINDS = (
    _entries(_REPORT),
    _entries({("base", "evaluation"): _COPIED, ("layers",): list[_COPIED]}),
)


def heading(
    command: str,
    name: str,
    revision: str | None,
    files: Mapping[str, str],
    base: JsonView | None = None,
) -> Json:
    """Build the entries that are known before the work: versions, machine, the source and its file
    hashes.

    `base` has facts about the original model, which each output copies from its source.
    """
    source = {"name": printable(name), "revision": revision}
    known = {
        key: printable(value) if isinstance(value, str) else value
        for key, value in (base or source).items()
    }
    return {
        "quantkit": __version__,
        "command": command,
        "base": {key: known[key] for key in BASE if key in known},
        "source": {**source, "files": dict(files)},
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": metadata.version("transformers"),
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
        },
    }


def phases(done: Iterable[JsonView]) -> dict[str, float]:
    """Add up the seconds of each phase over journal lines."""
    return added_up(line.get("facts", {}).get("phases", {}) for line in done)


def added_up(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up seconds by phase."""
    total: dict[str, float] = {}
    for part in parts:
        for phase, seconds in part.items():
            total[phase] = total.get(phase, 0.0) + seconds
    return total


def digest(report: JsonView) -> str:
    """Compute the SHA-256 of a report's facts about bytes: every hash, name, shape, count and
    setting.

    Times, memory and machine differ from run to run. The last digits of figures depend on the
    number of threads.
    """
    return hashlib.sha256(dump_json(_constant(report))).hexdigest()


def _constant(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _constant(held)
            for key, held in value.items()
            if key not in VOLATILE and not isinstance(held, float)
        }
    return [_constant(held) for held in value] if isinstance(value, list) else value


def seal(report: JsonView) -> str:
    """Return the entry SEAL of a report: the hash of the file without it."""
    return hash_of(dump_json({key: value for key, value in report.items() if key != SEAL}))


def peak_memory() -> dict[str, int]:
    """Measure the peak memory of this process in bytes: `ram`, where the system counts it, and with
    a GPU `vram`.
    """
    peak: dict[str, int] = {}
    with suppress(ImportError):  # Windows has no such module
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak["ram"] = used * (1 if sys.platform == "darwin" else 1024)
    with suppress(OSError):  # on Linux, ru_maxrss includes the peak of the parent process
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        peak |= {"ram": int(found[1]) * 1024} if found else {}
    used = max(
        (torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())), default=0
    )
    return peak | ({"vram": used} if used else {})


def load(folder: Path) -> Json:
    """Read the report of an output folder, `{}` if it has none.

    CheckpointError if an entry has a wrong type, the seal does not match the other entries, or the
    file is a link out of the folder.
    """
    path = folder / REPORT
    if not path.exists() and not path.is_symlink():
        return {}
    report = load_json(inside(Path(os.path.realpath(folder)), REPORT))
    try:
        for kinds in _KINDS:
            msgspec.convert(report, kinds)
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"is no report of quantkit: {str(error).replace('`', '').replace(' - at ', ' at ')}",
            "restore the file",
            "quantize or pack again",
            subject=path,
        ) from None
    if SEAL in report and report[SEAL] != seal(report):
        raise CheckpointError(
            "was changed since it was written", "restore it", "remove it", subject=path
        )
    return report
