"""The commands `eval rouge`, `eval code` and `eval tasks`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import completers, options, show
from quantkit.cli.exits import emit
from quantkit.cli.options import command
from quantkit.cli.parsing import section
from quantkit.progress import Progress

if TYPE_CHECKING:
    from quantkit.evaluation.rouge import Rouge

_COUNT = click.IntRange(min=1)
_limit = click.option("--limit", type=_COUNT, metavar="N", help="Read the first N records only [all].")
_journal = section(
    "Output",
    click.option(
        "--journal",
        metavar="FILE",
        shell_complete=completers.files,
        help="Keep finished parts in FILE, from which the same command continues.",
    ),
)
_advanced = section("Advanced", options.source, options.no_check)


def _batch_size(default: int) -> Any:
    return click.option("--batch-size", type=_COUNT, default=default, metavar="N", help=f"Texts at a time [{default}].")


@command("rouge", "quantkit eval rouge ./model-int4 --data summaries.jsonl --max-new-tokens 96")
@click.argument("checkpoint", shell_complete=completers.folders)
@section(
    "Basic",
    click.option(
        "--data",
        required=True,
        metavar="FILE",
        shell_complete=completers.files,
        help="Records with document and summary (.jsonl, .json, .parquet).",
    ),
    _limit,
    options.device,
)
@section(
    "Method",
    click.option("--prompt", metavar="TEXT", help="Prompt, {document} in it is the document [it, and TL;DR:]."),
    click.option("--max-new-tokens", type=_COUNT, default=128, metavar="N", help="Most tokens of a summary [128]."),
    _batch_size(8),
)
@_journal
@_advanced
def rouge(checkpoint: str, prompt: str | None, as_json: bool, progress: Progress, **asked: Any) -> None:
    """Measure ROUGE of summaries.

    CHECKPOINT summarizes each document by its likeliest tokens, up to a blank line. The summary is compared with the
    reference: F-measures of ROUGE-1, 2 and L of stemmed words, with 95 % intervals by bootstrap over records."""
    from quantkit import api

    asked |= {} if prompt is None else {"prompt": prompt}
    found = api.eval_rouge(checkpoint, progress=progress, **asked)
    emit(show.as_json(asdict(found)) if as_json else format_rouge(found, progress))


def format_rouge(found: Rouge, progress: Progress) -> str:
    """Format the scores of summaries and their protocol."""
    kinds = {"ROUGE-1": "rouge1", "ROUGE-2": "rouge2", "ROUGE-L": "rougeL"}
    values = asdict(found)
    rows = [
        (label, f"{100 * values[kind]:.2f}", _interval(values[f"{kind}_low"], values[f"{kind}_high"]))
        for label, kind in kinds.items()
    ]
    protocol = (
        f"on {found.data}: {found.records} records, at most {found.max_new_tokens} new tokens, batches of "
        f"{found.batch_size}, prompt {found.prompt!r}; {found.truncated} documents cut to fit, {found.empty} summaries "
        f"empty; {found.weights}"
    )
    line = ", ".join(f"{label} {value}" for label, value, _ in rows)
    text = show.table(("F-measure, %", "mean", "95 % interval"), rows)
    return show.of_level(progress, f"{line} {protocol}", f"{text}\n{protocol}")


def _interval(low: float | None, high: float | None) -> str:
    """Format an interval of shares in percent, empty if there is none."""
    return "" if low is None or high is None else f"{100 * low:.2f} to {100 * high:.2f}"
