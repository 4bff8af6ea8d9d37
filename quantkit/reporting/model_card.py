"""The model card: the README.md of an output folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quantkit.checkpoint.report import KEPT, REPORT
from quantkit.engines.readers import CAUSAL, engine_of, use_of
from quantkit.reporting import facts

#: Stands for the folder, or the repository that it is in, in every command of a card.
FOLDER = "FOLDER"
#: Auto class of transformers -> the hub's name of the task, if it is not to generate text.
TASKS = {
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
    "AutoModelForImageTextToText": "image-text-to-text",
}


def model_card(report: Mapping[str, Any], sha256: str | None = None) -> str:
    """Write the text of the README.md: YAML front matter, then scheme, readers, calibration and
    figures.

    `sha256` is the `digest` of the report.
    """
    source = report.get("base") or report.get("source", {})
    layout, totals = str(report.get("layout")), report.get("totals", {})
    scheme = facts.schemes(report)
    base = str(
        source.get("base_model" if source.get("relation") == "quantized" else "name") or "unknown"
    )
    pruned = report.get("command") == "prune"
    revision = f" (revision {_plain(source['revision'])})" if source.get("revision") else ""
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in _front(report, source).items()),
        "---",
        "",
    ]
    lines += [f"# {_plain(base)}, {scheme}", ""]
    done, check, known = (
        ("Pruned", "eval ppl", "") if pruned else ("Quantized", "verify", "digest, ")
    )
    lines += [
        f"{done} from `{_plain(base)}`{revision} with quantkit {_plain(report.get('quantkit'))}.",
        "",
    ]
    lines += ["| | |", "|---|---|"]
    lines += [
        f"| {label} | {_cell(value)} |" for label, value in _facts(report, totals, layout, scheme)
    ]
    happened = facts.events(report)
    if left := facts.left_out(report):
        happened.append(f"left out: {left}")
    if happened:
        lines += ["", "## Worth knowing", "", *(f"- {_plain(line)}" for line in happened)]
    lines += _use(report, pruned)
    lines += ["", "## Calibration", "", _plain(facts.protocol(report))]
    more = {
        "Target size": facts.fit,
        "Evaluation": facts.evaluation,
    }
    for title, fact in more.items():
        lines += ["", f"## {title}", "", _plain(fact(report))] if fact(report) else []
    lines += ["", "## Largest errors", "", *_worst(report)]
    lines += [
        "",
        "## Check it",
        "",
        "```",
        f"quantkit {check} {FOLDER}",
        f"quantkit inspect {FOLDER}",
        "```",
        "",
    ]
    lines += [
        f"`{REPORT}` has the hash of every file, and the {known}error and method of every linear."
    ]
    if sha256:
        lines += ["", f"The SHA-256 of its hashes, names and settings is `{sha256}`."]
    if report.get("recipe"):
        recipe = json.dumps(report["recipe"], indent=1)
        lines += [
            "",
            "## Recipe",
            "",
            f"SHA-256 `{_plain(report.get('recipe_sha256'))}`",
            "",
            "```json",
            recipe,
            "```",
        ]
    return "\n".join(lines) + "\n"


def _front(report: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the YAML front matter. The hub refuses a `base_model` that is no id, and has no
    relation for pruning.
    """
    pruned = report.get("command") == "prune"
    kept = {key: source[key] for key in KEPT if _is_words(source.get(key))}
    layout, scheme = str(report.get("layout")), str(report.get("scheme")).split(":")
    ours = (
        ["pruned", "quantkit", ":".join(scheme)]
        if pruned
        else ["quantized", "quantkit", layout, scheme[0]]
    )
    theirs = kept.pop("tags", [])
    tags = [*ours, *(theirs if isinstance(theirs, list) else [theirs])]
    base, related = source.get("base_model"), source.get("relation") == "quantized" and not pruned
    return {
        **({"base_model": str(base)} if base else {}),
        **({"base_model_relation": "quantized"} if base and related else {}),
        "library_name": "transformers",
        "pipeline_tag": TASKS.get(str(report.get("auto_class")), "text-generation"),
        **kept,
        "tags": list(dict.fromkeys(tags)),
    }


def _is_words(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(word, str) for word in value)
    )


def _use(report: Mapping[str, Any], pruned: bool) -> list[str]:
    """Write the commands of the readers that open this folder; a pruned model opens as any dense
    one.
    """
    readers = (
        ["transformers (with compressed-tensors)"]
        if pruned
        else map(str, report.get("readers", []))
    )
    auto = report.get("auto_class", CAUSAL)
    uses = (use_of(reader, report.get("chat_template") is True, auto) for reader in readers)
    found = [use for use in uses if use is not None]
    lines = ["", "## Use it"] if found else []
    recipe = report.get("recipe")
    is_signed = isinstance(recipe, Mapping) and recipe.get("signed") is True
    for title, language, text in found:
        lines += [
            "",
            f"With {'transformers' if pruned else title}:",
            "",
            f"```{language}",
            text,
            "```",
        ]
        engine = engine_of(title) if is_signed else None
        if engine and (limit := engine.signed.get(str(report.get("layout")))):
            lines += ["", _plain(f"{title}: {limit.spelled()}.")]
    return lines


def _facts(
    report: Mapping[str, Any], totals: Mapping[str, Any], layout: str, scheme: str
) -> list[tuple[str, str]]:
    layers, unknown = (
        report.get("layers", []),
        "what loads the source" if layout == "dense" else "unknown",
    )
    found = [
        ("source", report.get("source", {}).get("weights")),
        ("scheme", scheme),
        ("method", facts.methods(layers)),
        ("layout", layout),
        ("loads in", ", ".join(map(str, report.get("readers", []))) or unknown),
        ("opened by", facts.openings(report)),
        ("size", facts.sizes(totals)),
        ("dense", facts.dense(totals)),
        ("share", facts.share(report)),
        ("2:4", facts.sparsity(layers)),
        ("weight error", facts.weight_error(layers) or "not recorded"),
        ("output loss", facts.losses(layers)),
    ]
    return [(label, str(value)) for label, value in found if value]


def _worst(report: Mapping[str, Any], most: int = 10) -> list[str]:
    errors = facts.figures(report.get("layers", []), "relative_error")
    found = sorted(errors, key=lambda item: (-item[0], item[1]))[:most]
    if not found:
        return ["Not recorded."]
    over_rounding = {name: f"{ratio:.3f}" for ratio, name in facts.ratios(report.get("layers", []))}
    lines = ["| linear | relative weight error | output loss over rounding's |", "|---|---|---|"]
    return lines + [
        f"| {_cell(name)} | {value:.5f} | {over_rounding.get(name, '')} |" for value, name in found
    ]


def _plain(text: Any) -> str:
    """Join text into one line and neutralize its markup."""
    return " ".join(str(text).split()).replace("`", "'").replace("<", "&lt;")


def _cell(text: Any) -> str:
    return _plain(text).replace("|", "\\|")
