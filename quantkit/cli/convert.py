"""The commands that rewrite a quantized checkpoint: pack and convert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from quantkit.cli import completers, options, show
from quantkit.cli.exits import emit
from quantkit.cli.options import command
from quantkit.cli.parsing import combined, needed_unless, section
from quantkit.progress import Progress

#: The options for a checkpoint that does not fit the other layout, and for the files of the output.
repacking_options = combined(
    section(
        "Method",
        options.flag("--pad", f"{options.PAD}."),
        options.flag(
            "--requantize", "Round again what has no lossless way (lossy; it is reported)."
        ),
        options.flag(
            "--requantize-scales", "Round scales that are no float16 values, keep codes (reported)."
        ),
    ),
    section(
        "Output",
        click.option(
            "--max-shard-size",
            type=options.Bytes(),
            default="2GiB",
            help="Most bytes of one weight file [2GiB].",
        ),
        options.overwrite,
    ),
)


@command("pack", "quantkit pack ./model-int4 --layout marlin -o ./model-marlin")
@options.checkpoint
@section("Basic", options.layout, options.out())
@repacking_options
def pack(
    checkpoint: Path, layout: str, out: Path, as_json: bool, progress: Progress, **asked: Any
) -> None:
    """Rewrite CHECKPOINT in another layout.

    Every value stays the same bit for bit; what the layout cannot hold is refused."""
    from quantkit.pipeline.convert import pack as pack_folder

    _use_one_thread_an_operation(asked)
    report = pack_folder(checkpoint, out, layout, progress=progress, **asked)
    emit(show.as_json(report) if as_json else show.report(report, progress))


@command("convert", "quantkit convert gptq-to-marlin ./model-gptq -o ./model-marlin")
@click.argument(
    "pair",
    metavar="A-to-B",
    required=False,
    callback=needed_unless("listing"),
    shell_complete=completers.pairs,
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
@repacking_options
def convert(
    pair: str,
    checkpoint: Path,
    out: Path,
    listing: bool,
    as_json: bool,
    progress: Progress,
    **asked: Any,
) -> None:
    """Rewrite CHECKPOINT from A to B.

    As pack, and CHECKPOINT must be in layout A."""
    from quantkit import api
    from quantkit.layouts import compatibility

    if listing:
        found = compatibility.conversions()
        rows = [(f"{c.source}-to-{c.target}", c.verdict) for c in found]
        told = {"conversions": [asdict(c) for c in found]}
        emit(show.as_json(told) if as_json else show.table(("conversion", "verdict"), rows))
        return
    _use_one_thread_an_operation(asked)
    report = api.convert(pair, checkpoint, out, progress=progress, **asked).report
    emit(show.as_json(report) if as_json else show.report(report, progress))


def _use_one_thread_an_operation(asked: Mapping[str, Any]) -> None:
    """Several workers pack side by side: threads that share one operation would wait longer than
    they work.
    """
    import torch

    if not asked["requantize"]:
        torch.set_num_threads(1)
