"""The model card: the README.md of an output folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from quantkit.checkpoint.report import CARD_KEYS, REPORT
from quantkit.engines.readers import CAUSAL, engine_of, use_of
from quantkit.names import Json, JsonView
from quantkit.reporting import charts, facts, layer_errors as errors
from quantkit.reporting.tables import pieces

#: Linears in the table of the largest errors.
WORST = 10
#: Auto class of transformers -> the hub's name of the task, if it is not to generate text.
TASKS = {
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
    "AutoModelForImageTextToText": "image-text-to-text",
}


def model_card(report: JsonView, sha256: str | None = None) -> str:
    """Write the text of the README.md: YAML front matter, then scheme, readers, calibration and
    figures.

    `sha256` is the `digest` of the report.
    """
    source, left = report.get("base") or report.get("source", {}), facts.left_out(report)
    base = "base_model" if source.get("relation") == "quantized" else "name"
    layers, recipe = report.get("layers", []), report.get("recipe")
    return charts.render(
        "card.md.jinja",
        plain=_plain,
        cell=_cell,
        raw=charts.verbatim,
        report=report,
        front={key: json.dumps(value) for key, value in _front(report, source).items()},
        base=source.get(base) or "unknown",
        revision=source.get("revision"),
        scheme=facts.schemes(report),
        pruned=report.get("command") == "prune",
        facts=[
            (label if row == 0 else "", piece)
            for label, value in _facts(report)
            for row, piece in enumerate(pieces(str(value or "")))
        ],
        happened=[*facts.events(report), *([f"left out: {left}"] if left else [])],
        uses=list(_uses(report)),
        sections=[
            ("Calibration", facts.protocol(report)),
            ("Target size", facts.fit(report)),
            ("Evaluation", facts.evaluation(report)),
        ],
        worst=errors.worst(layers, errors.weight_error, WORST),
        ratios={name: f"{ratio:.3f}" for ratio, name in facts.ratios(layers)},
        file=REPORT,
        sha256=sha256,
        recipe=json.dumps(recipe, indent=1) if recipe else "",
    )


def _front(report: JsonView, source: JsonView) -> dict[str, Any]:
    """Collect the YAML front matter. The hub refuses a `base_model` that is no id, and has no
    relation for pruning.
    """
    pruned = report.get("command") == "prune"
    stated = {key: source.get(key) for key in CARD_KEYS}
    kept: Json = {
        key: value
        for key, value in stated.items()
        if isinstance(value, str)
        or (isinstance(value, list) and all(isinstance(word, str) for word in value))
    }
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


def _uses(report: JsonView) -> Iterator[tuple[str, str, str, str]]:
    """Yield the commands of each reader that opens this folder: title, language, commands, and the
    limit of a reader for signed scales. A pruned model opens as any dense one.
    """
    pruned, recipe = report.get("command") == "prune", report.get("recipe")
    readers = ["transformers (with compressed-tensors)"] if pruned else report.get("readers", [])
    is_signed = isinstance(recipe, Mapping) and recipe.get("signed") is True
    for reader in map(str, readers):
        use = use_of(reader, report.get("chat_template") is True, report.get("auto_class", CAUSAL))
        if use is None:
            continue
        title, language, commands = use
        engine = engine_of(title) if is_signed else None
        limit = engine.signed.get(str(report.get("layout"))) if engine else None
        note = f"{title}: {limit.spelled()}." if limit else ""
        yield "transformers" if pruned else title, language, commands, note


def _facts(report: JsonView) -> list[tuple[str, Any]]:
    layers, totals, layout = (
        report.get("layers", []),
        report.get("totals", {}),
        report.get("layout"),
    )
    unknown = "what loads the source" if layout == "dense" else "unknown"
    (loads, certain), doubtful = facts.readers(report)
    return [
        ("source", report.get("source", {}).get("weights")),
        ("scheme", facts.schemes(report)),
        ("method", facts.methods(layers)),
        ("layout", str(layout)),
        (loads, certain or unknown),
        doubtful,
        ("size", facts.sizes(totals)),
        ("dense", facts.dense(totals)),
        ("share", facts.share(report)),
        ("2:4", facts.sparsity(layers)),
        ("weight error", facts.weight_error(layers) or "not recorded"),
        ("output loss", facts.losses(layers)),
        ("held out", facts.held_out(layers)),
    ]


def _plain(text: Any) -> str:
    """Join text into one line and neutralize its markup."""
    return " ".join(str(text).split()).replace("`", "'").replace("<", "&lt;")


def _cell(text: Any) -> str:
    return _plain(text).replace("|", "\\|")
