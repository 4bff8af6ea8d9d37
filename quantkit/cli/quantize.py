"""The commands that write checkpoints: quantize, prune and plan of dense models, pack and convert
of quantized ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options, show
from quantkit.cli.options import command, declared, recipe_options, setting, text
from quantkit.cli.parsing import Choice, needed_unless, section
from quantkit.cli.process import emit
from quantkit.core.units import format_bytes, format_range
from quantkit.engines.tables import TARGETS
from quantkit.keys import keys_of
from quantkit.names import MOST_TOKENS
from quantkit.progress import QUIET, Progress
from quantkit.recipes.options import FitOptions, PackOptions, PlanOptions, RunOptions
from quantkit.recipes.schema import RecipeKeys, pruning_keys

if TYPE_CHECKING:
    from quantkit.planning.output import Output
    from quantkit.planning.plan import Kind, Plan, Serving
    from quantkit.recipes.recipe import Recipe


#: The files of an output whose bytes a plan only bounds: report and model card.
REPORT_AND_CARD = 2
_recipe = section(
    "Basic",
    text(
        "--recipe",
        "FILE|NAME",
        "Recipe that the other options are laid over: a YAML file, or the name of a shipped one.",
        options.files,
    ),
)
_eval = section(
    "Output",
    text(
        "--eval",
        "NAME|FILE",
        f"Measure perplexity before and after, and divergence, on at most {MOST_TOKENS} tokens of "
        "this text.",
        options.texts,
    ),
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
    shell_complete=options.folders,
)
@section("Basic", options.out(unless=("print_recipe",)))
@_recipe
@recipe_options(keys_of(RecipeKeys))
@setting(keys_of(RecipeKeys))
@section(
    "Output",
    options.flag(
        "--print-recipe", "Print the recipe that these options make, and stop.", is_eager=True
    ),
    level="all",
)
@declared({"fitted": FitOptions, "run": RunOptions})
@_eval
def quantize(
    model: str,
    out: Path,
    print_recipe: bool,
    fitted: FitOptions,
    run: RunOptions,
    eval: str | None,
    as_json: bool,
    progress: Progress,
    **given: Any,
) -> None:
    """Quantize MODEL into OUT.

    MODEL is a folder, a hub id or a GGUF file. [Brackets] hold defaults, some of which depend on
    --format.
    """
    from quantkit import api

    recipe = _built(**given)
    if print_recipe:
        emit(recipe.to_yaml().rstrip())
        return
    report = api.produce(model, out, recipe, replace(run, progress=progress), eval, fitted)
    emit(show.as_json(report) if as_json else show.report(report, progress))


@command(
    "prune",
    "quantkit prune ./model -o ./model-24 --calib wikitext2",
    shared=True,
    keys=pruning_keys(),
)
@options.model
@section("Basic", options.out())
@recipe_options(pruning_keys())
@setting(pruning_keys())
@declared({"run": RunOptions})
@_eval
def prune(
    model: str,
    out: Path,
    settings: Sequence[str],
    run: RunOptions,
    eval: str | None,
    as_json: bool,
    progress: Progress,
    **given: Any,
) -> None:
    """Keep two of each four weights of MODEL.

    OUT is an ordinary dense checkpoint, to be trained further, or quantized with --prune 2:4 --set
    prune=magnitude."""
    from quantkit import api
    from quantkit.recipes.files import from_pairs

    recipe = api.build_pruning(settings=from_pairs(settings, pruning_keys()), **given)
    report = api.produce(model, out, recipe, replace(run, progress=progress), eval)
    emit(show.as_json(report) if as_json else show.report(report, progress))


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
@setting(keys_of(RecipeKeys))
@section(
    "Output",
    click.option(
        "--target",
        type=Choice(tuple(TARGETS)),
        help="Program that will load the output: shows its kernels.",
    ),
)
@declared({"asked": PlanOptions})
@declared({"fitted": FitOptions}, without=("target",), level="all")
@declared({"run": RunOptions})
def plan(
    model: str,
    out: Path | None,
    asked: PlanOptions,
    fitted: FitOptions,
    run: RunOptions,
    as_json: bool,
    progress: Progress,
    **given: Any,
) -> None:
    """Say what quantize would do, and end with its exit code.

    Exact bytes of the output, memory, duration, and everything that quantize would refuse before it
    computes.
    """
    from quantkit.pipeline import fit

    # The table lists all warnings, one line does not.
    run = replace(run, progress=progress if progress.quiet else QUIET)
    recipe = _built(**given)
    found = fit.plan(model, recipe, run, fitted, asked, out=out, announce=progress.note)
    if as_json or found.refusal is None:
        emit(show.as_json(found.to_dict()) if as_json else format_plan(found, progress))
    if found.refusal is not None:
        raise found.refusal


def _built(
    recipe: str | None, override: Sequence[tuple[str, str]], settings: Sequence[str], **given: Any
) -> Recipe:
    """Make a recipe of its options."""
    from quantkit import api
    from quantkit.recipes.files import from_pairs

    counts = Counter(pattern for pattern, _ in override)
    if twice := [pattern for pattern, count in counts.items() if count > 1]:
        raise click.UsageError(f"--override gives {twice[0]!r} two schemes: leave one")
    return api.build_recipe(
        recipe,
        override=dict(override),
        settings=from_pairs(settings, keys_of(RecipeKeys)),
        **given,
    )


def format_plan(found: Plan, progress: Progress) -> str:
    """Format a plan that nothing refuses: the output, the memory. -v lists every linear."""
    output = found.output
    bits = f", {found.bits_per_weight:.3f} bits/weight" if found.bits_per_weight else ""
    weights = sum(size for name, size in found.files.items() if name.endswith(".safetensors"))
    line = (
        f"plan: {_linears(output)}, {_schemes(output)}, {found.layout}; "
        f"{format_bytes(output.source_bytes)} before, {format_bytes(weights)} after{bits}"
    )
    rows = [(row.module, list(row.shape), row.scheme or "dense", row.bytes) for row in output.rows]
    return show.of_level(
        progress, line, _plan(found), show.table(("linear", "shape", "scheme", "bytes"), rows)
    )


def _linears(output: Output) -> str:
    dense = [row for row in output.rows if row.goal is None and row.bytes]  # no tied head
    return f"{len(output.quantized)} linears quantized, {len(dense)} left dense"


def _schemes(output: Output) -> str:
    from quantkit.reporting import facts

    layers = [{"scheme": row.scheme, "name": row.module} for row in output.quantized]
    return facts.schemes({"scheme": output.scheme, "layers": layers})


def _plan(found: Plan) -> str:
    """Format a plan: the output, the memory, the kernels that will serve it."""
    from quantkit.reporting import facts

    output, memory = found.output, found.needs.memory.to_dict()
    needs = [
        f"{format_bytes(memory[kind])} {kind.upper()}" for kind in ("ram", "vram") if kind in memory
    ]
    facts_, calibration, duration = output.to_dict(), found.calibration, found.needs.duration
    lines = show.facts(
        [
            ("scheme", _schemes(output)),
            ("layout", found.layout),
            ("linears", _linears(output).replace(" linears", "")),
            (
                "output",
                f"{format_bytes(found.total)} in {len(found.files) + REPORT_AND_CARD} files, "
                f"{output.bytes} bytes of tensors, source {format_bytes(output.source_bytes)}",
            ),
            (
                "share",
                f"{100 * found.share:.2f} % of the decoder's weights"
                if found.share is not None
                else None,
            ),
            (
                "bits/weight",
                f"{found.bits_per_weight:.3f} with scales" if found.bits_per_weight else None,
            ),
            (
                "calibration",
                f"{calibration['sequences']} sequences, {calibration['tokens']} tokens of "
                f"{calibration['source']}"
                if calibration
                else None,
            ),
            (
                "duration",
                f"{format_range(*duration)}, by a probe of one block" if duration else None,
            ),
            ("peak memory", f"about {' and '.join(needs)}"),
            ("disk free", format_bytes(found.needs.disk_free) if found.needs.disk_free else None),
            *facts.readers({"readers": output.readers}),
            ("kernel", facts_["kernel"] or "none of quantkit's own"),
            *(("note", notice) for notice in (*found.size_notes, *found.notices)),
        ]
    )
    curve = [_curve(found.fit)] if found.fit else []
    kernels = [_serving(found.serving)] if found.serving else []
    return "\n\n".join([lines, *curve, *kernels])


def _curve(fit: Mapping[str, Any]) -> str:
    """Format the uniform schemes that a target size chooses from; a run mixes them by measured
    loss increase.
    """
    header = ("uniform scheme", "layout", "bytes", "bits/weight", "squared error", "fits")
    rows = [
        (
            row["scheme"],
            row["layout"],
            row["bytes"],
            f"{row['bits']:.3f}",
            f"{row['harm']:.2e}",
            fits,
        )
        for row in fit["curve"]
        for fits in [
            "no" if not row["fits"] else "best" if row["scheme"] == fit["best_uniform"] else "yes"
        ]
    ]
    return show.table(header, rows)


def _serving(found: Serving) -> str:
    """Format the kernels of a program: a row for each kind of linear, then the sources
    of the rows.
    """
    major, minor = found.capability
    sources = list(dict.fromkeys(kind.source for kind in found.kinds if kind.source))
    rows = [
        (
            kind.name,
            kind.count,
            f"{kind.shape[0]}x{kind.shape[1]}",
            kind.scheme or "-",
            _kernel(kind, sources),
        )
        for kind in found.kinds
    ]
    header = (
        f"{found.target} on {found.gpu} ({major}.{minor})",
        "count",
        "n x k",
        "scheme",
        "kernel",
    )
    notes = (f"[{number}] {source}" for number, source in enumerate(sources, start=1))
    return "\n".join([show.table(header, rows), *notes])


def _kernel(kind: Kind, sources: list[str]) -> str:
    name = kind.kernel or ("" if kind.why in ("not known", "dense") else "none")
    text = ": ".join(filter(None, (name, kind.why)))
    return f"{text} [{sources.index(kind.source) + 1}]" if kind.source else text


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
        emit(show.as_json(conversions) if as_json else show.table(("conversion", "verdict"), rows))
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
