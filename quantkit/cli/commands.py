"""The commands: options in, one call, a result printed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from quantkit import __version__, api
from quantkit.bench import generate as bench_generate
from quantkit.bench import kernels as bench_kernels
from quantkit.bench import roofline
from quantkit.checkpoint.inspection import describe
from quantkit.checkpoint.reader import Checkpoint, resolve
from quantkit.cli import demo, doctor, options, show
from quantkit.cli.exits import FAILED, MISSED, UNVERIFIED, emit, leave
from quantkit.errors import CheckpointError
from quantkit.evaluation.verify import verify as prove
from quantkit.evaluation.verify import write as write_proof
from quantkit.inference import load
from quantkit.io import files
from quantkit.layouts import compatibility
from quantkit.pipeline import quantize as pipeline
from quantkit.pipeline.recipe import Recipe
from quantkit.progress import Progress
from quantkit.reporting import plots, report

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


@click.group(
    context_settings=HELP,
    epilog="\b\nExample:\n  quantkit quantize ./Llama-3.2-1B -o ./Llama-3.2-1B-int4 --calib wikitext2",
)
@click.version_option(__version__, prog_name="quantkit")
def quantkit() -> None:
    """Low-bit checkpoints from Hugging Face causal LMs: quantize, pack, convert and prove.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 verification failed, 4 a quality threshold was missed, 75 stopped and
    can be resumed, 130 interrupted.
    """


@quantkit.group("eval", epilog="\b\nExample:\n  quantkit eval ppl ./Llama-3.2-1B-int4 --data wikitext2")
def evaluation() -> None:
    """Measure how good a checkpoint is."""


@options.command(
    quantkit, "quantize", "quantkit quantize ./model -o ./model-int4 --calib wikitext2 --samples 128", as_json=True
)
@click.argument("model", required=False)
@options.out(required=False)
@options.recipe
@click.option("--print-recipe", is_flag=True, help="Print the recipe that these options make, and stop.")
@click.option("--dry-run", is_flag=True, help="Print what would be written and needed, and stop: quantkit plan.")
@options.running
def quantize(
    model: str | None,
    out: Path | None,
    print_recipe: bool,
    dry_run: bool,
    as_json: bool,
    progress: Progress,
    **given: Any,
) -> None:
    """Quantize MODEL into OUT.

    MODEL is a folder or a hub id. [Brackets] hold defaults, some of which depend on --format.
    """
    running, recipe = options.split(given)
    if print_recipe:
        emit(recipe.to_yaml().rstrip())
        return
    if model is None:
        raise click.UsageError("Missing argument 'MODEL'.")
    if dry_run:
        _plan(model, out, recipe, running, as_json)
        return
    if out is None:
        raise click.UsageError("Missing option '-o' / '--out'.")
    _quantize(model, out, recipe, running, as_json, progress)


@options.command(quantkit, "prune", "quantkit prune ./model -o ./model-24 --calib wikitext2", as_json=True)
@options.model
@options.out()
@options.pruning
@options.running
def prune(model: str, out: Path, as_json: bool, progress: Progress, **given: Any) -> None:
    """Keep two of each four weights of MODEL.

    OUT is an ordinary dense checkpoint, to be trained further, or quantized with --prune 2:4 --prune-method
    magnitude."""
    running = {name: given.pop(name) for name in options.RUNNING}
    asked = api.build_pruning(**given)
    progress.note(f"{asked.scheme} by {asked.method}")
    _report(pipeline.prune(model, out, asked, progress=progress, **running), as_json)


@options.command(quantkit, "plan", "quantkit plan ./model --format int4 --layout marlin", as_json=True)
@options.model
@options.out(required=False)
@options.recipe
@options.running
def plan(model: str, out: Path | None, as_json: bool, progress: Progress, **given: Any) -> None:
    """Say what quantize would do.

    Exact bytes of the output, memory, and every weight that does not fit, from headers alone."""
    running, recipe = options.split(given)
    _plan(model, out, recipe, running, as_json)


@options.command(quantkit, "run", "quantkit run int4-marlin ./model -o ./model-marlin", as_json=True)
@click.argument("recipe")
@options.model
@options.out()
@options.running
def run(recipe: str, model: str, out: Path, as_json: bool, progress: Progress, **running: Any) -> None:
    """Quantize MODEL by a recipe.

    RECIPE is a YAML file, or the name of one that comes with quantkit."""
    _quantize(model, out, api.build_recipe(recipe), running, as_json, progress)


@options.command(quantkit, "pack", "quantkit pack ./model-int4 --layout marlin -o ./model-marlin", as_json=True)
@options.checkpoint
@options.layout(required=True)
@options.out()
@options.repacking
def pack(checkpoint: Path, layout: str, out: Path, as_json: bool, progress: Progress, **asked: Any) -> None:
    """Rewrite CHECKPOINT in another layout.

    Every value stays the same bit for bit; what the layout cannot hold is refused."""
    _report(pipeline.pack(checkpoint, out, layout, progress=progress, **asked), as_json)


@options.command(quantkit, "convert", "quantkit convert gptq-to-marlin ./model-gptq -o ./model-marlin", as_json=True)
@click.argument("pair", metavar="A-to-B", required=False)
@click.argument("checkpoint", type=options.PATH, required=False)
@options.out(required=False)
@options.repacking
@click.option(
    "--list", "listing", is_flag=True, help="Print which conversions are lossless, when, and why others are not."
)
def convert(
    pair: str | None,
    checkpoint: Path | None,
    out: Path | None,
    listing: bool,
    as_json: bool,
    progress: Progress,
    **asked: Any,
) -> None:
    """Rewrite CHECKPOINT from A to B.

    As pack, and CHECKPOINT must be in layout A."""
    if listing:
        found = compatibility.conversions()
        emit(show.as_json({"conversions": [asdict(c) for c in found]}) if as_json else show.matrix(found))
        return
    if pair is None or checkpoint is None or out is None:
        raise click.UsageError("Missing one of 'A-to-B', 'CHECKPOINT', '-o'.")
    _report(api.convert(pair, checkpoint, out, progress=progress, **asked), as_json)


@options.command(quantkit, "verify", "quantkit verify ./model-marlin --against ./model-int4", as_json=True)
@options.checkpoint
@click.option(
    "--against", type=options.PATH, help="Quantized checkpoint whose codes, scales and zeros must be the same."
)
@options.device
def verify(checkpoint: Path, against: Path | None, device: str, as_json: bool, progress: Progress) -> None:
    """Prove the bits of CHECKPOINT.

    Every packed weight is unpacked and packed again and compared with its digest in the report, and on a GPU multiplied
    by its kernels; verify.json is written into the folder."""
    found = prove(checkpoint, against, progress, device)
    emit(show.as_json(found.to_dict()) if as_json else show.verification(found))
    write_proof(found, checkpoint)
    if not found.ok:
        leave(UNVERIFIED, f"Error: {checkpoint} is not what it should be: {len(found.failures)} failures, see above")


@options.command(quantkit, "inspect", "quantkit inspect ./model-marlin", as_json=True)
@click.argument("checkpoint")
@options.source
def inspect(checkpoint: str, revision: str | None, trust_remote_code: bool, as_json: bool, progress: Progress) -> None:
    """Describe CHECKPOINT from its headers.

    Layout, scheme, bits per weight with scales, sizes and shapes, of checkpoints of any program."""
    found = describe(Checkpoint(resolve(checkpoint, revision), trust_remote_code))
    emit(show.as_json(found) if as_json else show.description(found))


@options.command(evaluation, "ppl", "quantkit eval ppl ./model-int4 --data wikitext2 --window 2048", as_json=True)
@click.argument("checkpoint")
@options.protocol
@click.option("--max-perplexity", type=float, metavar="X", help="Leave with exit code 4 if the perplexity is above X.")
def ppl(checkpoint: str, max_perplexity: float | None, as_json: bool, progress: Progress, **protocol: Any) -> None:
    """Measure perplexity.

    CHECKPOINT may be dense or quantized; the protocol is printed beside the figure."""
    found = api.eval_ppl(checkpoint, progress=progress, **protocol)
    emit(show.as_json(asdict(found)) if as_json else show.perplexity(found))
    if max_perplexity is not None and not found.perplexity <= max_perplexity:
        leave(MISSED, f"Error: perplexity {found.perplexity:.4f} is above --max-perplexity {max_perplexity:g}")


@options.command(evaluation, "kld", "quantkit eval kld ./model-int4 --against ./model --data wikitext2", as_json=True)
@click.argument("checkpoint")
@click.option("--against", required=True, metavar="MODEL", help="The model that CHECKPOINT was made from.")
@options.protocol
@click.option("--max-kld", type=float, metavar="X", help="Leave with exit code 4 if the divergence is above X nats.")
def divergence(
    checkpoint: str, against: str, max_kld: float | None, as_json: bool, progress: Progress, **protocol: Any
) -> None:
    """Measure KL divergence.

    How far CHECKPOINT's next-token distributions are from MODEL's, and how often both prefer the same token."""
    found = api.eval_kld(checkpoint, against, progress=progress, **protocol)
    emit(show.as_json(asdict(found)) if as_json else show.divergence(found))
    if max_kld is not None and not found.kld <= max_kld:
        leave(MISSED, f"Error: KL divergence {found.kld:.6f} is above --max-kld {max_kld:g}")


@options.command(
    quantkit, "generate", "quantkit generate ./model-int4 'The capital of France is' --max-new-tokens 32", as_json=True
)
@click.argument("checkpoint")
@click.argument("prompt")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, help="Most tokens to write [64].")
@options.device
@options.source
def generate(checkpoint: str, prompt: str, as_json: bool, progress: Progress, **asked: Any) -> None:
    """Write on after PROMPT.

    CHECKPOINT may be dense or quantized; the likeliest token is taken each time."""
    found = load.generate(checkpoint, prompt, progress=progress, **asked)
    emit(show.as_json(asdict(found)) if as_json else show.generated(found))
    rate = found.tokens / found.seconds
    progress.note(f"{found.tokens} tokens in {found.seconds:.1f} s, {rate:.1f} a second; {found.weights}")


@quantkit.group("bench", epilog="\b\nExample:\n  quantkit bench kernels --layout marlin")
def benches() -> None:
    """Measure how fast quantkit's parts are."""


@options.command(
    benches, "kernels", "quantkit bench kernels --layout marlin --model llama3-8b --csv kernels.csv", as_json=True
)
@options.timing
@click.option("--csv", type=options.PATH, help="Write the figures into this .csv file.")
@click.option("--png", type=options.PATH, help="Draw speedup over cuBLAS against tokens into this .png file.")
@click.option("--against", type=options.PATH, metavar="CSV", help="Figures of other kernels, or of an earlier run.")
@click.option("--peer", multiple=True, metavar="NAME", help="The kernel in it to compare with, the best of several.")
def kernels(
    csv: Path | None,
    png: Path | None,
    against: Path | None,
    peer: tuple[str, ...],
    as_json: bool,
    progress: Progress,
    **asked: Any,
) -> None:
    """Time the kernels of packed weights.

    Beside cuBLAS on weights that were never quantized, a copy and the floor that these set; a wrong product is an
    error."""
    options.writable(csv, ".csv")
    options.writable(png, ".png")
    if png is not None:
        plots.pictures()  # missing is better known before than after
    if peer and against is None:
        raise click.UsageError("--peer names a kernel of --against: give both")
    peers = roofline.read_peers(against, peer) if against is not None else None
    measured = bench_kernels.kernels(**options.timed(asked), progress=progress)
    rows = measured.rows()
    found = measured.to_dict() | ({"against": roofline.compare(measured.cells, peers)} if peers is not None else {})
    if csv is not None:
        files.write_atomic(csv, roofline.table(rows))
    if png is not None:
        plots.speedups(roofline.panels(rows), png)
    emit(show.as_json(found) if as_json else show.speeds(found))


@options.command(
    benches, "generate", "quantkit bench generate --model llama2-70b --layout tcfpx --csv generate.csv", as_json=True
)
@options.generating
@click.option("--csv", type=options.PATH, help="Write the figures into this .csv file.")
def paces(csv: Path | None, as_json: bool, progress: Progress, **asked: Any) -> None:
    """Time whole models.

    Prompts and new tokens a second and GPU memory, packed beside dense, with random weights: nothing is downloaded."""
    options.writable(csv, ".csv")
    found = bench_generate.measure(*options.generated(asked), progress)
    if csv is not None:
        files.write_atomic(csv, roofline.table(found.rows()))
    emit(show.as_json(found.to_dict()) if as_json else show.paces(found.to_dict()))


@options.command(quantkit, "report", "quantkit report ./model-int4 --html ./model-int4.html", as_json=True)
@click.argument("folder", type=options.PATH)
@click.option("--html", type=options.PATH, help="Draw it into this .html file.")
@click.option("--png", type=options.PATH, help="Draw it into this .png file.")
def show_report(folder: Path, html: Path | None, png: Path | None, as_json: bool, progress: Progress) -> None:
    """Print or draw a report.

    FOLDER is an output of quantkit; drawn are error per layer, time per phase, size before and after."""
    found = report.load(folder)
    if not found:
        raise CheckpointError(f"{folder}: has no {report.REPORT}: give a folder that quantkit wrote")
    for path, suffix in ((html, ".html"), (png, ".png")):
        if path is not None and path.suffix != suffix:
            raise click.UsageError(f"{path}: the file name must end in {suffix}")
        if path is not None:
            plots.draw(found, path)
            progress.note(f"drawn: {path}")
    _report(found, as_json)


@options.command(quantkit, "demo", "quantkit demo", as_json=True)
@click.option("-o", "--out", type=options.PATH, help="Keep the checkpoints in this new folder.")
def demonstrate(out: Path | None, as_json: bool, progress: Progress) -> None:
    """Do the whole job in a minute.

    Quantize the small model that comes with quantkit, pack, verify, and compare perplexities: no network, no GPU."""
    found = demo.run(out, progress)
    emit(show.as_json(found) if as_json else show.demo(found))


@options.command(quantkit, "doctor", "quantkit doctor", as_json=True)
def diagnose(as_json: bool, progress: Progress) -> None:
    """Say what is installed and missing.

    Packages, GPUs and kernels that can be used here, and what to type against what is missing."""
    found = doctor.diagnose()
    emit(show.as_json(found) if as_json else show.diagnosis(found))
    if not found["ok"]:
        leave(FAILED, "Error: something that quantkit needs is missing, the fixes are above")


def _quantize(
    model: str, out: Path, recipe: Recipe, running: dict[str, Any], as_json: bool, progress: Progress
) -> None:
    progress.note(f"{recipe.scheme.label} by {recipe.method}, in the layout {recipe.layout}")
    _report(pipeline.quantize(model, out, recipe, progress=progress, **running), as_json)


def _plan(model: str, out: Path | None, recipe: Recipe, running: dict[str, Any], as_json: bool) -> None:
    found = pipeline.plan(model, recipe, out=out, **running)
    emit(show.as_json(found.to_dict()) if as_json else show.plan(found))
    found.require()


def _report(found: dict[str, Any], as_json: bool) -> None:
    emit(show.as_json(found) if as_json else report.summary(found))
