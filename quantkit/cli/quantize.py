"""The commands that make a checkpoint from a dense model: quantize, prune, plan."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import completers, options, show
from quantkit.cli.exits import emit
from quantkit.cli.keys import fit_options, recipe_options, run_options
from quantkit.cli.options import choice, command, text
from quantkit.cli.parsing import needed_unless, section
from quantkit.cli.plan_table import format_plan
from quantkit.engines.tables import GPUS, TARGETS
from quantkit.keys import keys_of
from quantkit.names import MOST_TOKENS
from quantkit.progress import Progress
from quantkit.recipes.options import FitOptions, RunOptions
from quantkit.recipes.schema import RecipeKeys, pruning_keys

if TYPE_CHECKING:
    from quantkit.recipes.recipe import Recipe

_recipe = section(
    "Basic",
    text(
        "--recipe",
        "FILE|NAME",
        "Recipe that the other options are laid over: a YAML file, or the name of a shipped one.",
        completers.files,
    ),
)
_EVAL = "Measure perplexity before and after, and divergence, on at most"
_eval = section(
    "Output",
    text("--eval", "NAME|FILE", f"{_EVAL} {MOST_TOKENS} tokens of this text.", completers.texts),
)
RUNNING, FITTING = (
    [key.keyword for key in keys_of(declared)] for declared in (RunOptions, FitOptions)
)


@command(
    "quantize",
    "quantkit quantize ./model -o ./model-int4 --calib wikitext2",
    shared=True,
    keys=keys_of(RecipeKeys),
)
@click.argument(
    "model",
    required=False,
    callback=needed_unless("print_recipe"),
    shell_complete=completers.folders,
)
@section("Basic", options.out(unless=("print_recipe",)))
@_recipe
@recipe_options(keys_of(RecipeKeys))
@section(
    "Output",
    options.flag(
        "--print-recipe", "Print the recipe that these options make, and stop.", is_eager=True
    ),
    level="all",
)
@fit_options()
@run_options()
@_eval
def quantize(
    model: str, out: Path, print_recipe: bool, as_json: bool, progress: Progress, **given: Any
) -> None:
    """Quantize MODEL into OUT.

    MODEL is a folder, a hub id or a GGUF file. [Brackets] hold defaults, some of which depend on
    --format.
    """
    running: dict[str, Any] = {"eval": given.pop("eval")}
    running["fitted"] = FitOptions(**{name: given.pop(name) for name in FITTING})
    options, recipe = _split(given)
    if print_recipe:
        emit(recipe.to_yaml().rstrip())
        return
    _produce(model, out, recipe, {**running, **options}, as_json, progress)


@command(
    "prune",
    "quantkit prune ./model -o ./model-24 --calib wikitext2",
    shared=True,
    keys=pruning_keys(),
)
@options.model
@section("Basic", options.out())
@recipe_options(pruning_keys())
@run_options()
@_eval
def prune(model: str, out: Path, as_json: bool, progress: Progress, **given: Any) -> None:
    """Keep two of each four weights of MODEL.

    OUT is an ordinary dense checkpoint, to be trained further, or quantized with --prune 2:4 --set
    prune=magnitude."""
    from quantkit import api
    from quantkit.recipes.files import from_pairs

    given["settings"] = from_pairs(given["settings"], pruning_keys())
    running = {name: given.pop(name) for name in ("eval", *RUNNING)}
    _produce(model, out, api.build_pruning(**given), running, as_json, progress)


@command(
    "plan",
    "quantkit plan ./model --format int4 --target vllm --gpu h100",
    shared=True,
    keys=keys_of(RecipeKeys),
)
@options.model
@section("Basic", options.out(required=False))
@_recipe
@recipe_options(keys_of(RecipeKeys))
@section(
    "Output",
    click.option(
        "--target",
        type=choice(TARGETS),
        help="Program that will load the output: shows its kernels.",
    ),
    click.option("--gpu", type=choice(GPUS), help="GPU on which --target will run [the one here]."),
)
@section(
    "Advanced",
    click.option(
        "--gpu-memory",
        type=options.Bytes(),
        help="Memory of the GPU that will quantize, if it is not here, like 80GB.",
    ),
)
@section(
    "Advanced",
    click.option(
        "--probe/--no-probe",
        default=True,
        help="Measure a part of a long run to estimate its duration [probe].",
    ),
    level="all",
)
@fit_options("target")
@run_options()
def plan(model: str, out: Path | None, as_json: bool, progress: Progress, **given: Any) -> None:
    """Say what quantize would do, and end with its exit code.

    Exact bytes of the output, memory, duration, and everything that quantize would refuse before it
    computes.
    """
    from quantkit.pipeline import fit

    fitted = FitOptions(**{name: given.pop(name) for name in FITTING})
    asked: Any = {name: given.pop(name) for name in ("gpu_memory", "gpu", "probe")}
    running, recipe = _split(given)
    told = progress if progress.quiet else None  # the table lists all warnings, one line does not
    found = fit.plan(model, recipe, out=out, progress=told, fitted=fitted, **asked, **running)
    if as_json or found.refusal is None:
        emit(show.as_json(found.to_dict()) if as_json else format_plan(found, progress))
    if found.refusal is not None:
        raise found.refusal


def _produce(
    model: str,
    out: Path,
    recipe: Recipe,
    running: dict[str, Any],
    as_json: bool,
    progress: Progress,
) -> None:
    from quantkit import api

    report = api.produce(model, out, recipe, progress=progress, **running)
    emit(show.as_json(report) if as_json else show.report(report, progress))


def _split(given: dict[str, Any]) -> tuple[dict[str, Any], Recipe]:
    """Separate the options of a run, and make a recipe of the others."""
    from quantkit import api
    from quantkit.recipes.files import from_pairs

    running = {name: given.pop(name) for name in RUNNING}
    twice = [
        pattern
        for pattern, count in Counter(pattern for pattern, _ in given["override"]).items()
        if count > 1
    ]
    if twice:
        raise click.UsageError(f"--override gives {twice[0]!r} two schemes: leave one")
    given["override"] = dict(given["override"])
    given["settings"] = from_pairs(given["settings"], keys_of(RecipeKeys))
    return running, api.build_recipe(given.pop("recipe"), **given)
