"""`quantkit_report.json`: what the machine says for it, and the model card and closing table made of it.

A report is the plain mapping that the pipeline writes beside every output. It may also be read back from a folder of
unknown origin, so everything that reads one takes any key as absent and prints names as data.
"""

from __future__ import annotations

import json
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
from quantkit.io.json_files import load_json

REPORT = "quantkit_report.json"

#: Which programs load a layout today (LAYOUTS 10).
READERS = {
    "compressed-tensors": "transformers (with compressed-tensors), vLLM, SGLang",
    "humming": "vLLM and SGLang, through humming-kernels; transformers (with quantkit)",
    "tcfpx": "transformers (with quantkit), fp6_llm (E3M2 and E2M2), torchao until early 2026",
    "gptq": "vLLM, SGLang, GPTQModel, transformers (through gptqmodel)",
    "gptq-v2": "GPTQModel, vLLM since October 2025 (earlier versions read it wrongly)",
    "awq": "vLLM, GPTQModel, transformers (through gptqmodel); one scale per row in vLLM alone",
    "quick": "transformers (with quantkit), SqueezeBits' fork of AutoAWQ for n of 128 or a multiple of 256",
    "marlin": "transformers (with quantkit), the original MARLIN kernel, AutoGPTQ 0.7, GPTQModel, vLLM up to 0.10.1",
    "marlin24": "transformers (with quantkit), the original Sparse-MARLIN kernel, vLLM up to 0.14",
    "marlin24-ct": "transformers (with quantkit), vLLM up to 0.14 (its compressed-tensors reader)",
}

#: Fact of a layer -> what happened to it; each is counted in the closing table, since nothing is done silently.
EVENTS = {
    "restated_from": "hold the same values in another scheme, before it was",
    "requantized_from": "were rounded a second time, which is lossy, from",
    "rungs": "needed more damping than asked",
    "reason": "were rounded to nearest although the recipe calibrates",
    "by_magnitude": "were pruned by magnitude although the method calibrates",
    "dead_columns": "have input channels that no calibration token reached (kept, rounded to nearest)",
    "descent_skipped": "were not refined by descent, which needs 16 tokens for each input channel",
    "guard_rows": "have rows where rounding was better than GPTQ and was kept",
    "floored_scales": "have scales raised to 2^-20",
    "subnormal_scales": "have scales below the normal float16 range",
    "zero_scales": "have rows whose stored scale is 0",
}

SCALES = ("floored", "subnormal", "zero")

#: Facts of a layer that are words, shown as they are.
WORDS = ("reason", "by_magnitude", "descent_skipped", "restated_from", "requantized_from")
#: What the parts of a report that are used here must be, when they are there.
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
    "base": dict,
}
#: Facts of a layer and entries of `totals` that are computed with.
COUNTS = ("zeros", "kept", "dead_columns", "guard_rows", *(f"{s}_scales" for s in SCALES))
NUMBERS = ("relative_error", "loss", "rtn_loss", "norm", *COUNTS)
TOTALS = ("bits_per_weight", "source_bytes", "bytes", "seconds")


def heading(
    command: str, name: str, revision: str | None, files: Mapping[str, str], base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the report's entries that are known before the work: versions, machine, the source and its file hashes.

    `base` is the model that everything was made of, when it is not the source itself.
    """
    shown_name = name.encode(errors="backslashreplace").decode()  # the name of a folder need not be text
    source = {"name": shown_name, "revision": revision}
    return {
        "quantkit": quantkit.__version__,
        "command": command,
        "base": {key: (base or source).get(key) for key in source},
        "source": {**source, "files": dict(files)},
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": metadata.version("transformers"),
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
        },
    }


def phases(done: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Add up the seconds per phase that the journal lines of committed blocks recorded."""
    total: dict[str, float] = {}
    for line in done:
        for phase, seconds in line.get("facts", {}).get("phases", {}).items():
            total[phase] = total.get(phase, 0.0) + seconds
    return total


def peak_memory() -> dict[str, int]:
    """Return the most bytes that this process has held so far: `ram`, and on a GPU `vram`."""
    peak = {"ram": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)}
    with suppress(OSError):  # on Linux that one begins with the peak of the process that started this one
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        peak["ram"] = int(found[1]) * 1024 if found else peak["ram"]
    used = max((torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())), default=0)
    return peak | ({"vram": used} if used else {})


def load(folder: Path) -> dict[str, Any]:
    """Return the report of an output folder, `{}` if it has none; CheckpointError if its entries have wrong types."""
    path = folder / REPORT
    if not path.exists() and not path.is_symlink():
        return {}
    report = load_json(path)
    wrong = _malformed(report)
    if wrong is not None:
        raise CheckpointError(f"{path}: {wrong} is not what a report has there: quantize or pack again")
    return report


def _malformed(report: Mapping[str, Any]) -> str | None:
    """Return the name of an entry that is not what the functions here and `verify` take it for."""
    for key, kind in TYPES.items():
        if not isinstance(report.get(key, kind()), kind):
            return key
    totals = report.get("totals", {})
    if not isinstance(totals.get("peak_memory", {}), dict):
        return "totals"
    numbers = {"phases": [*report.get("phases", {}).values()], "totals": [*totals.get("peak_memory", {}).values()]}
    numbers["totals"] += [totals.get(key) for key in TOTALS]
    for layer in report.get("layers", []):
        if not isinstance(layer, dict) or not isinstance(layer.get("name"), str):
            return "layers"
        if not isinstance(layer.get("rungs", []), list) or not all(isinstance(layer.get(w, ""), str) for w in WORDS):
            return "layers"
        numbers.setdefault("layers", []).extend(layer.get(key) for key in NUMBERS)
    return next((key for key, found in numbers.items() if not all(_is_number(value) for value in found)), None)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (int, float))


def model_card(report: Mapping[str, Any]) -> str:
    """Return the README.md of an output folder: YAML front matter, then scheme, readers, protocol and figures."""
    source = report.get("base") or report.get("source", {})
    layout, totals = str(report.get("layout")), report.get("totals", {})
    scheme = str(report.get("scheme"))
    base = str(source.get("name") or "unknown")
    pruned = report.get("command") == "prune"  # the hub has no word for how that relates to its base
    front = {
        "base_model": base,
        **({} if pruned else {"base_model_relation": "quantized"}),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["pruned", "quantkit", scheme] if pruned else ["quantized", "quantkit", layout, scheme.split(":")[0]],
    }
    revision = f" (revision {_plain(source['revision'])})" if source.get("revision") else ""
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", ""]
    lines += [f"# {_plain(base)}, {scheme}", ""]
    done, check, known = ("Pruned", "eval ppl", "") if pruned else ("Quantized", "verify", "digest, ")
    lines += [f"{done} from `{_plain(base)}`{revision} with quantkit {_plain(report.get('quantkit'))}.", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {label} | {_cell(value)} |" for label, value in _facts(report, totals, layout, scheme)]
    happened = _events(report)
    if happened:
        lines += ["", "## Worth knowing", "", *(f"- {_plain(line)}" for line in happened)]
    lines += ["", "## Calibration", "", _plain(_protocol(report))]
    lines += ["", "## Largest errors", "", *_worst(report)]
    lines += ["", "## Check it", "", "```", f"quantkit {check} FOLDER", "quantkit inspect FOLDER", "```", ""]
    lines += [f"`{REPORT}` has the hash of every file, and the {known}error and method of every linear."]
    if report.get("recipe"):
        recipe = json.dumps(report["recipe"], indent=1)
        lines += ["", "## Recipe", "", f"SHA-256 `{_plain(report.get('recipe_sha256'))}`", "", "```json", recipe, "```"]
    return "\n".join(lines) + "\n"


def summary(report: Mapping[str, Any]) -> str:
    """Return the closing table for a terminal: figures, and everything that is never done silently."""
    layers, totals = report.get("layers", []), report.get("totals", {})
    peak = totals.get("peak_memory", {})
    rows = [
        ("failed", report.get("failed", "")),
        (
            "so far" if "failed" in report else "done",
            f"{report.get('command')}: {len(layers)} linears, {report.get('scheme')}, {report.get('layout')}",
        ),
        ("size", _sizes(totals)),
        ("2:4", _sparsity(layers)),
        ("weight error", _statistics(layers, "relative_error")),
        ("output loss", _losses(layers)),
        ("calibration", _protocol(report) if report.get("calibration") else ""),
        ("time", _times(report, totals)),
        ("memory", ", ".join(f"{size(value)} {kind.upper()}" for kind, value in peak.items())),
        *(("note", line) for line in _events(report)),
    ]
    return "\n".join(f"{label:<13} {_line(text)}" for label, text in rows if text)


def size(count: float) -> str:
    """Return bytes as a short text in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _line(text: str) -> str:
    """Return a text from anywhere as one line, without the control characters that a terminal would obey."""
    return "".join(letter for letter in " ".join(str(text).split()) if letter.isprintable())


def _facts(report: Mapping[str, Any], totals: Mapping[str, Any], layout: str, scheme: str) -> Iterable[tuple[str, str]]:
    methods = sorted({str(layer["method"]) for layer in report.get("layers", []) if layer.get("method")})
    yield "scheme", scheme
    yield "method", ", ".join(methods) or "as in the source"
    yield "layout", layout
    yield "loads in", READERS.get(layout, "what loads the source" if layout == "dense" else "unknown")
    yield "size", _sizes(totals)
    sparse = _sparsity(report.get("layers", []))
    if sparse:
        yield "2:4", sparse
    yield "weight error", _statistics(report.get("layers", []), "relative_error") or "not recorded"
    losses = _losses(report.get("layers", []))
    if losses:
        yield "output loss", losses


def _sizes(totals: Mapping[str, Any]) -> str:
    bits, before, after = (totals.get(key) for key in ("bits_per_weight", "source_bytes", "bytes"))
    parts = [f"{size(before)} before, {size(after)} after"] if before and after else []
    return ", ".join([*parts, *([f"{bits:.3f} bits per quantized weight with scales"] if bits else [])])


def figures(layers: Iterable[Mapping[str, Any]], key: str) -> list[tuple[float, str]]:
    return [(float(layer[key]), str(layer.get("name"))) for layer in layers if isinstance(layer.get(key), (int, float))]


def _statistics(layers: Iterable[Mapping[str, Any]], key: str) -> str:
    found = figures(layers, key)
    if not found:
        return ""
    worst, name = max(found)
    return f"relative, mean {sum(value for value, _ in found) / len(found):.4g}, worst {worst:.4g} ({name})"


def _sparsity(layers: Iterable[Mapping[str, Any]]) -> str:
    pruned = [layer for layer in layers if layer.get("zeros") is not None]
    zeros, kept = (sum(layer.get(key) or 0 for layer in pruned) for key in ("zeros", "kept"))
    rules = ", ".join(sorted({str(layer.get("prune") or layer.get("method")) for layer in pruned}))
    share = f"{100 * zeros / max(1, zeros + kept):.2f} % of their weights are zero"
    return f"{len(pruned)} linears by {rules}, {share}, at most two of four are not" if pruned else ""


def ratios(layers: Iterable[Mapping[str, Any]], over: str = "rtn_loss") -> list[tuple[float, str]]:
    """Return (loss over the loss of rounding to nearest, or another figure, name) for each layer that has both."""
    return [
        (float(layer["loss"]) / float(layer[over]), str(layer.get("name")))
        for layer in layers
        if layer.get("loss") is not None and layer.get(over)
    ]


def _losses(layers: Iterable[Mapping[str, Any]]) -> str:
    found, whose = ratios(layers), "rounding's"
    if not found:  # a pruned model has nothing that was rounded
        found, whose = ratios(layers, "norm"), "the outputs' own squares"
    if not found:
        return ""
    worst, name = max(found)
    return f"{sum(r for r, _ in found) / len(found):.3f} of {whose} on average, worst {worst:.3f} ({name})"


def _times(report: Mapping[str, Any], totals: Mapping[str, Any]) -> str:
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.get("phases", {}).items())
    total = totals.get("seconds")
    return "" if total is None else f"{total:.1f} s" + (f" ({phases})" if phases else "")


def _protocol(report: Mapping[str, Any]) -> str:
    facts = report.get("calibration") or {}
    if not facts:
        return "None: every weight was done by itself, no text was read."
    text = (
        f"{facts.get('sequences', '?')} sequences, {facts.get('tokens', '?')} tokens of {facts.get('source', '?')}"
        f" ({facts.get('rule', 'unknown rule')}), lengths {facts.get('lengths', '?')} up to"
        f" {facts.get('max_length', '?')}, seed {facts.get('seed', '?')}"
    )
    return f"{text}; {facts.get('cut', 0)} documents cut, {facts.get('skipped', 0)} skipped"


def _events(report: Mapping[str, Any]) -> list[str]:
    """Return one line for everything that happened and that PRODUCT says is never done silently."""
    found = [str(notice) for key in ("layout_notices", "notices") for notice in report.get(key, [])]
    dense = [str(name) for name in report.get("dense", [])]
    if dense:
        found.append(f"left dense: {', '.join(dense[:5])}{f' and {len(dense) - 5} more' if len(dense) > 5 else ''}")
    layers = report.get("layers", [])
    for fact, meaning in EVENTS.items():
        hit = [layer for layer in layers if _count(fact, layer.get(fact))]
        if hit:
            total = hit[0][fact] if fact in WORDS else sum(_count(fact, layer[fact]) for layer in hit)
            found.append(f"{len(hit)} of {len(layers)} linears {meaning}: {total}, first {hit[0]['name']}")
    return found


def _count(fact: str, value: Any) -> int:
    """Return how often something happened: of the dampings tried, those after the first; of a text, one."""
    if isinstance(value, list):
        return max(0, len(value) - (fact == "rungs"))
    return int(bool(value)) if isinstance(value, str) else int(value or 0)


def _worst(report: Mapping[str, Any], most: int = 10) -> list[str]:
    found = sorted(figures(report.get("layers", []), "relative_error"), key=lambda item: (-item[0], item[1]))[:most]
    if not found:
        return ["Not recorded."]
    over_rounding = {name: f"{ratio:.3f}" for ratio, name in ratios(report.get("layers", []))}
    lines = ["| linear | relative weight error | output loss over rounding's |", "|---|---|---|"]
    return lines + [f"| {_cell(name)} | {value:.5f} | {over_rounding.get(name, '')} |" for value, name in found]


def _plain(text: Any) -> str:
    """One line of text without markup of its own."""
    return " ".join(str(text).split()).replace("`", "'").replace("<", "&lt;")


def _cell(text: Any) -> str:
    return _plain(text).replace("|", "\\|")
