"""The commands that rewrite a quantized checkpoint: pack and convert."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from quantkit.cli import options, show
from quantkit.cli.options import command, declared
from quantkit.cli.parsing import needed_unless, section
from quantkit.cli.process import emit
from quantkit.progress import Progress
from quantkit.recipes.options import PackOptions


@command("pack", "quantkit pack ./model-int4 --layout marlin -o ./model-marlin")
@options.folder
@section("Basic", options.layout, options.out())
@declared({"asked": PackOptions})
def pack(
    checkpoint: Path,
    layout: str,
    out: Path,
    asked: PackOptions,
    as_json: bool,
    progress: Progress,
) -> None:
    """Rewrite CHECKPOINT in another layout.

    Every value stays the same bit for bit; what the layout cannot hold is refused."""
    from quantkit.pipeline.convert import pack as pack_folder

    _use_one_thread_an_operation(asked)
    report = pack_folder(checkpoint, out, layout, progress=progress, **vars(asked))
    emit(show.as_json(report) if as_json else show.report(report, progress))


@command("convert", "quantkit convert gptq-to-marlin ./model-gptq -o ./model-marlin")
@click.argument(
    "pair",
    metavar="A-to-B",
    required=False,
    callback=needed_unless("listing"),
    shell_complete=options.pairs,
)
@click.argument("checkpoint", type=options.PATH, required=False, callback=needed_unless("listing"))
@section(
    "Basic",
    options.out(unless=("listing",)),
    options.flag(
        "--list",
        "Print which conversions are lossless, when, and why others are not.",
        "listing",
        is_eager=True,
    ),
)
@declared({"asked": PackOptions})
def convert(
    pair: str,
    checkpoint: Path,
    out: Path,
    listing: bool,
    asked: PackOptions,
    as_json: bool,
    progress: Progress,
) -> None:
    """Rewrite CHECKPOINT from A to B.

    As pack, and CHECKPOINT must be in layout A."""
    from quantkit import api
    from quantkit.layouts import recast

    if listing:
        found = recast.conversions()
        rows = [(f"{c.source}-to-{c.target}", c.verdict) for c in found]
        conversions = {"conversions": [asdict(c) for c in found]}
        table = show.table(("conversion", "verdict"), rows)
        emit(show.as_json(conversions) if as_json else table)
        return
    _use_one_thread_an_operation(asked)
    report = api.convert(pair, checkpoint, out, progress=progress, **vars(asked)).report
    emit(show.as_json(report) if as_json else show.report(report, progress))


def _use_one_thread_an_operation(asked: PackOptions) -> None:
    """Several workers pack side by side: threads that share one operation would wait longer than
    they work.
    """
    import torch

    if not asked.requantize:
        torch.set_num_threads(1)
