"""The commands that make a checkpoint from a dense model: quantize, prune, plan, run."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from quantkit.algorithms.options import Options
from quantkit.cli import completers, options, show
from quantkit.cli.exits import emit
from quantkit.cli.options import choice, choice_of, command
from quantkit.cli.parsing import combined, needed_unless, section
from quantkit.cli.plan_table import format_plan
from quantkit.cli.push import pushed, pushing_options
from quantkit.engines.tables import GPUS, TARGETS
from quantkit.errors import QuantkitError
from quantkit.names import FORMATS, MOST_TOKENS, Clip, Method, Metric, Rule
from quantkit.progress import Progress
from quantkit.recipes.calibration_options import Calib
from quantkit.recipes.run_options import RunOptions

if TYPE_CHECKING:
    from quantkit.recipes.recipe import Recipe

_solving = combined(
    click.option(
        "--act-order", type=choice_of(Options, "act_order"), help="Columns by activation, or as they are [static]."
    ),
    click.option("--damp", type=float, help="Damping of the Hessian [0.01]."),
    click.option(
        "--damp-kind", type=choice_of(Options, "damp_kind"), help="By each channel's diagonal, or the mean [own]."
    ),
    click.option(
        "--true-sequential/--no-true-sequential",
        default=None,
        help="Calibrate each linear behind those of its block that are done already [on].",
    ),
)
_calibrating = section(
    "Calibration",
    click.option(
        "--calib",
        multiple=True,
        metavar="SOURCE[:WEIGHT]",
        shell_complete=completers.texts,
        help=f"Calibration text: {options.CALIBRATION} [c4]; repeatable, the weights are relative.",
    ),
    click.option(
        "--text-column", metavar="NAME", help="Key of the text or messages in records [text, messages, conversations]."
    ),
    click.option("--split", metavar="NAME", help="Split of a hub data set [train]."),
    click.option("--samples", type=click.IntRange(min=1), help="Calibration sequences [256]."),
    click.option("--max-length", type=click.IntRange(min=2), help="Their longest length in tokens [4096]."),
    click.option(
        "--lengths", type=choice_of(Calib, "lengths"), help="Documents whole, or windows of max-length [own]."
    ),
    click.option(
        "--moe-calibration",
        type=choice_of(Calib, "moe"),
        help="Experts on the tokens that reach them, or on all of their layer [routed].",
    ),
    click.option("--seed", type=int, help="Seed of the draw of calibration text [0]."),
)

#: The options that decide the bytes of a pruned model; their names are those of `quantkit.prune`.
pruning_options = combined(
    section(
        "Basic",
        click.option("--method", type=choice(get_args(Rule)), help="Which two of four stay [sparsegpt]."),
        options.skip,
    ),
    _calibrating,
    section("Method", _solving),
)

#: The options that decide the bytes of a quantized model; their names are those of `quantkit.quantize`.
recipe_options = combined(
    section(
        "Basic",
        click.option(
            "--recipe",
            metavar="FILE|NAME",
            shell_complete=completers.files,
            help="Recipe that the options below are laid over.",
        ),
        click.option("--format", type=choice(FORMATS), help="Number format [int4]."),
        click.option(
            "--group-size", type=options.GroupSize(), help="Columns per scale, or channel [int4: 128, fp: channel]."
        ),
        click.option("--asym/--sym", default=None, help="Zero points, or none [sym]."),
        click.option("--method", type=choice(get_args(Method)), help="How codes are chosen [int4: gptq, fp: rtn]."),
        options.layout(),
        options.skip,
        click.option(
            "--override",
            multiple=True,
            type=options.Override(),
            help="A scheme for some: '.*down_proj=int4:g64'; repeatable.",
        ),
    ),
    _calibrating,
    section(
        "Method",
        click.option("--clip", type=choice(get_args(Clip)), help="Search for scales [fp rtn: none, else search]."),
        click.option(
            "--metric", type=choice(get_args(Metric)), help="What the search minimises [gptq: block, rtn: mse]."
        ),
        _solving,
        click.option(
            "--on-unsolvable", type=choice_of(Options, "on_unsolvable"), help="If no damping suffices [stop]."
        ),
        click.option(
            "--signed/--unsigned", default=None, help="Scales with a sign, for symmetric int4 [gptq: signed]."
        ),
        click.option(
            "--descent",
            type=click.IntRange(min=0),
            metavar="N",
            help="Passes that move codes after gptq [symmetric int4: 3].",
        ),
        click.option("--refit/--no-refit", default=None, help="Least-squares scales after gptq [off]."),
        click.option(
            "--output-aware/--no-output-aware",
            default=None,
            help="Weigh the errors of gptq and --tune by gradients of the model's likelihood [off].",
        ),
        click.option(
            "--tune",
            type=click.IntRange(min=0),
            metavar="N",
            help="Steps by gradient that tune the codes and scales of each block after gptq [0].",
        ),
        click.option(
            "--distill",
            type=click.IntRange(min=0),
            metavar="N",
            help="Steps that tune scales and norms of the whole model, which must fit in memory, at the end [0].",
        ),
        click.option("--distill-codes/--no-distill-codes", default=None, help="Let --distill move codes too [off]."),
        click.option("--prune", type=choice(["2:4"]), help="Keep two of each four weights, int4 only [all]."),
        click.option(
            "--prune-method", type=choice(get_args(Rule)), help="Which two [gptq: sparsegpt, rtn: magnitude]."
        ),
    ),
    section("Output", click.option("--pad/--no-pad", default=None, help=f"{options.PAD} [off].")),
    section(
        "Advanced",
        click.option(
            "--fused-alike/--no-fused-alike",
            default=None,
            help="Treat q, k and v, gate and up, experts of a layer as the widest of them [off].",
        ),
    ),
)

#: The options of a run besides its recipe.
running_options = combined(
    section("Basic", options.device),
    section(
        "Output",
        click.option("--resume", is_flag=True, help="Continue the interrupted run that left OUT.partial-*."),
        options.overwrite,
        click.option(
            "--min-share",
            type=float,
            default=RunOptions.min_share,
            metavar="X",
            help="Leave with exit code 4 if the share of the decoder's weights that change is below X [0.9].",
        ),
    ),
    section(
        "Advanced",
        click.option(
            "--act-budget", type=options.Bytes(), help="Calibration activations kept in RAM, like 8GB; more go to disk."
        ),
        options.source,
    ),
)
#: The options that measure an output and upload it.
publishing_options = combined(
    section(
        "Output",
        click.option(
            "--eval",
            metavar="NAME|FILE",
            shell_complete=completers.texts,
            help=f"Measure perplexity before and after, and divergence, on at most {MOST_TOKENS} tokens of this text.",
        ),
    ),
    pushing_options,
)
RUNNING = [field.name for field in fields(RunOptions) if field.name != "progress"]
PUBLISHING = ("eval", "push_to", "public")


@command("quantize", "quantkit quantize ./model -o ./model-int4 --calib wikitext2 --samples 128", shared=True)
@click.argument("model", required=False, callback=needed_unless("print_recipe"), shell_complete=completers.folders)
@section("Basic", options.out(unless=("print_recipe", "dry_run")))
@recipe_options
@section(
    "Output",
    click.option(
        "--print-recipe", is_flag=True, is_eager=True, help="Print the recipe that these options make, and stop."
    ),
    click.option(
        "--dry-run",
        is_flag=True,
        is_eager=True,
        help="Print what would be written and needed, and stop: quantkit plan.",
    ),
)
@running_options
@publishing_options
def quantize(
    model: str,
    out: Path,
    print_recipe: bool,
    dry_run: bool,
    as_json: bool,
    progress: Progress,
    **given: Any,
) -> None:
    """Quantize MODEL into OUT.

    MODEL is a folder or a hub id. [Brackets] hold defaults, some of which depend on --format.
    """
    publishing = {name: given.pop(name) for name in PUBLISHING}
    running, recipe = _split(given)
    if print_recipe:
        emit(recipe.to_yaml().rstrip())
        return
    if dry_run:
        _plan(model, out, recipe, running, as_json, progress)
        return
    _produce(model, out, recipe, publishing, running, as_json, progress)


@command("prune", "quantkit prune ./model -o ./model-24 --calib wikitext2", shared=True)
@options.model
@section("Basic", options.out())
@pruning_options
@running_options
@publishing_options
def prune(model: str, out: Path, as_json: bool, progress: Progress, **given: Any) -> None:
    """Keep two of each four weights of MODEL.

    OUT is an ordinary dense checkpoint, to be trained further, or quantized with --prune 2:4 --prune-method
    magnitude."""
    from quantkit import api

    running, publishing = ({name: given.pop(name) for name in names} for names in (RUNNING, PUBLISHING))
    _produce(model, out, api.build_pruning(**given), publishing, running, as_json, progress)


@command("plan", "quantkit plan ./model --format int4 --target vllm --gpu h100", shared=True)
@options.model
@section("Basic", options.out(required=False))
@recipe_options
@section(
    "Output",
    click.option("--target", type=choice(TARGETS), help="Program that will load the output: shows its kernels."),
    click.option("--gpu", type=choice(GPUS), help="GPU on which --target will run [the one here]."),
)
@section(
    "Advanced",
    click.option(
        "--gpu-memory", type=options.Bytes(), help="Memory of the GPU that will quantize, if it is not here, like 80GB."
    ),
)
@running_options
def plan(
    model: str,
    out: Path | None,
    gpu_memory: int | None,
    target: str | None,
    gpu: str | None,
    as_json: bool,
    progress: Progress,
    **given: Any,
) -> None:
    """Say what quantize would do, and end with its exit code.

    Exact bytes of the output, memory, and everything that quantize would refuse before it computes. No weight is
    read."""
    running, recipe = _split(given)
    _plan(model, out, recipe, running, as_json, progress, gpu_memory=gpu_memory, target=target, gpu=gpu)


@command("run", "quantkit run int4-marlin ./model -o ./model-marlin", shared=True)
@click.argument("recipe", shell_complete=completers.files)
@options.model
@section("Basic", options.out())
@running_options
@publishing_options
def run(recipe: str, model: str, out: Path, as_json: bool, progress: Progress, **running: Any) -> None:
    """Quantize MODEL by a recipe.

    RECIPE is a YAML file, or the name of one that comes with quantkit."""
    from quantkit import api

    publishing = {name: running.pop(name) for name in PUBLISHING}
    try:
        _produce(model, out, api.build_recipe(recipe), publishing, running, as_json, progress)
    except QuantkitError as error:
        raise type(error)(f"{error}{_where(str(error), recipe)}") from error


def _where(message: str, recipe: str) -> str:
    """Say where the options of a message are that `run` lacks; empty if it has them all."""
    known, named = ({name for param in command.params for name in param.opts} for command in (run, quantize))
    lacking = [name for name in re.findall(r"--[a-z][a-z-]*", message) if name in named - known]
    return f" ({lacking[0]} is an option of quantkit quantize --recipe {recipe})" if lacking else ""


def _produce(
    model: str,
    out: Path,
    recipe: Recipe,
    publishing: dict[str, Any],
    running: dict[str, Any],
    as_json: bool,
    progress: Progress,
) -> None:
    from quantkit import api
    from quantkit.recipes.goals import label

    layout = f", in the layout {recipe.layout}" if recipe.layout else ""
    progress.note(f"{label(recipe.scheme)} by {recipe.method}{layout}")
    with pushed(out, publishing, progress, running["device"]):
        report = api.produce(model, out, recipe, progress=progress, **publishing, **running)
        emit(show.as_json(report) if as_json else show.report(report, progress))


def _plan(
    model: str,
    out: Path | None,
    recipe: Recipe,
    running: dict[str, Any],
    as_json: bool,
    progress: Progress,
    **asked: Any,
) -> None:
    from quantkit.pipeline import quantize as pipeline

    told = progress if progress.quiet else None  # the table lists all warnings, one line does not
    found = pipeline.plan(model, recipe, out=out, progress=told, **asked, **running)
    emit(show.as_json(found.to_dict()) if as_json else format_plan(found, progress))
    if found.refusal is not None:
        raise found.refusal


def _split(given: dict[str, Any]) -> tuple[dict[str, Any], Recipe]:
    """Separate the options of a run, and make a recipe of the others."""
    from quantkit import api

    running = {name: given.pop(name) for name in RUNNING}
    given["override"] = dict(given["override"])
    return running, api.build_recipe(given.pop("recipe"), **given)
