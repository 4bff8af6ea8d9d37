"""The command `compare`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import completers, options, show
from quantkit.cli.evaluate import window
from quantkit.cli.exits import FAILED, emit, leave
from quantkit.cli.keys import recipe_options
from quantkit.cli.options import command, count, text
from quantkit.cli.parsing import section
from quantkit.cli.scores import Numbers, questions, shots
from quantkit.keys import keys_of
from quantkit.progress import Progress
from quantkit.recipes.schema import RecipeKeys
from quantkit.text.sources import PACKAGED

if TYPE_CHECKING:
    from quantkit.evaluation.compare import Comparison

#: Options of quantize that go over all recipes; `--set` takes all others.
OVER_ALL = ("samples", "max_length")


@command(
    "compare",
    "quantkit compare ./model -o table --recipes int4:g128:rtn,int4-gptq,fp6:channel:gptq --calib "
    "packaged,self",
    keys=keys_of(RecipeKeys),
)
@options.model
@section(
    "Basic",
    click.option(
        "-o",
        "--out",
        type=options.PATH,
        required=True,
        help="Folder of the table; finished rows in it stay.",
    ),
    text(
        "--recipes",
        "NAME,NAME",
        "Shipped recipes, YAML files, or schemes with a method, like fp6:g64:gptq.",
        completers.files,
        required=True,
    ),
    options.device,
)
@recipe_options(
    [key for key in keys_of(RecipeKeys) if key.keyword in OVER_ALL], like="calibration.seed=1"
)
@section(
    "Calibration",
    text(
        "--calib",
        "SOURCE,NAME=SOURCE",
        f"Calibration texts as quantize takes them, each for rows of its own [{PACKAGED}].",
        completers.texts,
        default=PACKAGED,
    ),
    click.option(
        "--seeds",
        type=Numbers(),
        default=(0,),
        help="Seeds of the draws of calibration text, like 0,1 [0].",
    ),
)
@section(
    "Method",
    text(
        "--text",
        "SOURCE,NAME=SOURCE",
        "Texts for perplexity and KL divergence, as eval ppl takes them [wikitext2].",
        completers.texts,
        default="wikitext2",
    ),
    window,
    count("--tokens", "Read each text's first N tokens [all].", least=2),
    text("--tasks", "NAME,NAME", "Tasks, as eval tasks takes them.", default=""),
    questions,
    shots,
    count("--limit", "First N questions of each task [all]."),
    count("--batch-size", "Questions at a time", 8),
)
@section("Advanced", options.source)
def compare(
    model: str,
    out: Path,
    settings: tuple[str, ...],
    samples: int | None,
    max_length: int | None,
    as_json: bool,
    progress: Progress,
    **asked: Any,
) -> None:
    """Compare recipes on one model.

    Each recipe quantizes MODEL, with each calibration text and seed if it needs text. The result is
    judged, decoded to float32, beside MODEL. OUT gets compare.csv, compare.md, compare.html with
    plots of quality against size, and a file for each row. The same command continues after a stop,
    makes new rows if more is asked, and shares the rows with others that run at the same time."""
    from quantkit import api
    from quantkit.recipes.files import from_pairs, merge

    over = merge(
        {"calibration": {"samples": samples, "max_length": max_length}},
        from_pairs(settings, keys_of(RecipeKeys)),
    )
    found = api.compare(model, out, settings=over, progress=progress, **asked)
    plain = {**asdict(found), "path": str(found.path)}
    emit(show.as_json(plain) if as_json else format_comparison(found, progress))
    if found.failed:
        leave(
            FAILED,
            f"Error: {len(found.failed)} rows failed, the first is {next(iter(found.failed))}",
        )


def format_comparison(found: Comparison, progress: Progress) -> str:
    """Format the table of finished rows, and the command of each."""
    from quantkit.reporting import recipe_table

    left = f", {len(found.unfinished)} unfinished" if found.unfinished else ""
    line = f"{len(found.rows)} rows{left} in {found.path}"
    if not found.rows:
        return line
    head, body = recipe_table.cells(found.rows, recipe_table.quality(found.rows))
    commands = [
        f"{recipe_table.name(row)}: {row['command']}" for row in found.rows if row["command"]
    ]
    text = "\n".join([show.table(head, body), recipe_table.notes(found.rows), *commands, "", line])
    return show.of_level(progress, line, text)
