"""The model card: the README.md of an output folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from quantkit.reporting import facts
from quantkit.reporting.report import REPORT


def model_card(report: Mapping[str, Any]) -> str:
    """Write the text of the README.md: YAML front matter, then scheme, readers, calibration and figures."""
    source = report.get("base") or report.get("source", {})
    layout, totals = str(report.get("layout")), report.get("totals", {})
    scheme = str(report.get("scheme"))
    base = str(source.get("name") or "unknown")
    pruned = report.get("command") == "prune"  # the hub has no relation for a pruned model
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
    happened = facts.events(report)
    if happened:
        lines += ["", "## Worth knowing", "", *(f"- {_plain(line)}" for line in happened)]
    lines += ["", "## Calibration", "", _plain(facts.protocol(report))]
    lines += ["", "## Largest errors", "", *_worst(report)]
    lines += ["", "## Check it", "", "```", f"quantkit {check} FOLDER", "quantkit inspect FOLDER", "```", ""]
    lines += [f"`{REPORT}` has the hash of every file, and the {known}error and method of every linear."]
    if report.get("recipe"):
        recipe = json.dumps(report["recipe"], indent=1)
        lines += ["", "## Recipe", "", f"SHA-256 `{_plain(report.get('recipe_sha256'))}`", "", "```json", recipe, "```"]
    return "\n".join(lines) + "\n"


def _facts(report: Mapping[str, Any], totals: Mapping[str, Any], layout: str, scheme: str) -> Iterable[tuple[str, str]]:
    yield "scheme", scheme
    yield "method", facts.methods(report.get("layers", []))
    yield "layout", layout
    yield (
        "loads in",
        ", ".join(map(str, report.get("readers", []))) or ("what loads the source" if layout == "dense" else "unknown"),
    )
    if opened := facts.openings(report):
        yield "opened by", opened
    yield "size", facts.sizes(totals)
    if share := facts.share(report):
        yield "share", share
    sparse = facts.sparsity(report.get("layers", []))
    if sparse:
        yield "2:4", sparse
    yield "weight error", facts.statistics(report.get("layers", []), "relative_error") or "not recorded"
    losses = facts.losses(report.get("layers", []))
    if losses:
        yield "output loss", losses


def _worst(report: Mapping[str, Any], most: int = 10) -> list[str]:
    errors = facts.figures(report.get("layers", []), "relative_error")
    found = sorted(errors, key=lambda item: (-item[0], item[1]))[:most]
    if not found:
        return ["Not recorded."]
    over_rounding = {name: f"{ratio:.3f}" for ratio, name in facts.ratios(report.get("layers", []))}
    lines = ["| linear | relative weight error | output loss over rounding's |", "|---|---|---|"]
    return lines + [f"| {_cell(name)} | {value:.5f} | {over_rounding.get(name, '')} |" for value, name in found]


def _plain(text: Any) -> str:
    """Join text into one line and neutralize its markup."""
    return " ".join(str(text).split()).replace("`", "'").replace("<", "&lt;")


def _cell(text: Any) -> str:
    return _plain(text).replace("|", "\\|")
