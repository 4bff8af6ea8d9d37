"""The commands that run checkpoints: the group `eval`, `compare` and `generate`."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options, show
from quantkit.cli.options import command, declared, text
from quantkit.cli.parsing import Range, section
from quantkit.cli.process import FAILED, MISSED, emit, leave, stream
from quantkit.core.units import counted
from quantkit.evaluation.options import CompareOptions, TaskOptions, TextOptions
from quantkit.keys import keys_of
from quantkit.progress import Progress
from quantkit.recipes.options import LoadOptions, WriteOptions
from quantkit.recipes.schema import RecipeKeys

if TYPE_CHECKING:
    from quantkit.evaluation.compare import Comparison
    from quantkit.evaluation.divergence import Divergence
    from quantkit.evaluation.perplexity import Perplexity
    from quantkit.evaluation.tasks import TaskScore, TaskScores


@options.group("eval", "quantkit eval ppl ./Llama-3.2-1B-int4 --data wikitext2")
def evaluate() -> None:
    """Measure how good a checkpoint is."""


@command("ppl", "quantkit eval ppl ./model-int4 --data wikitext2 --window 2048", evaluate)
@options.checkpoint
@declared({"asked": TextOptions, "load": LoadOptions})
@section(
    "Output",
    text(
        "--max-perplexity",
        "X",
        "Leave with exit code 4 if the perplexity is above X.",
        type=Range(1),
    ),
)
def ppl(
    checkpoint: str,
    asked: TextOptions,
    load: LoadOptions,
    max_perplexity: float | None,
    as_json: bool,
    progress: Progress,
) -> None:
    """Measure perplexity.

    CHECKPOINT may be dense or quantized; the protocol is printed beside the figure."""
    from quantkit.evaluation import perplexity

    found = perplexity.evaluate(checkpoint, asked, load, progress)
    emit(show.as_json(asdict(found)) if as_json else format_perplexity(found, progress))
    if max_perplexity is not None and not found.perplexity <= max_perplexity:
        leave(
            MISSED,
            f"Error: perplexity {found.perplexity:.4f} is above --max-perplexity "
            f"{max_perplexity:g}",
        )


@command("kld", "quantkit eval kld ./model-int4 --against ./model --data wikitext2", evaluate)
@options.checkpoint
@section(
    "Basic",
    text(
        "--against",
        "MODEL",
        "The model that CHECKPOINT was made from.",
        options.folders,
        required=True,
    ),
)
@declared({"asked": TextOptions, "load": LoadOptions})
@section(
    "Output",
    text(
        "--max-kld", "X", "Leave with exit code 4 if the divergence is above X nats.", type=Range(0)
    ),
)
def kld(
    checkpoint: str,
    against: str,
    asked: TextOptions,
    load: LoadOptions,
    max_kld: float | None,
    as_json: bool,
    progress: Progress,
) -> None:
    """Measure KL divergence.

    How far CHECKPOINT's next-token distributions are from MODEL's: the mean with a 95 % interval by
    bootstrap over windows, the tails, and how often both prefer the same token."""
    from quantkit.evaluation import divergence

    found = divergence.evaluate(checkpoint, against, asked, load, progress)
    emit(show.as_json(asdict(found)) if as_json else format_divergence(found, progress))
    if max_kld is not None and not found.kld <= max_kld:
        leave(MISSED, f"Error: KL divergence {found.kld:.6f} is above --max-kld {max_kld:g}")


@command(
    "tasks",
    "quantkit eval tasks ./model-int4 --tasks arc_easy,piqa --data tasks --against ./model",
    evaluate,
)
@options.checkpoint
@declared({"asked": TaskOptions, "load": LoadOptions})
def tasks(
    checkpoint: str, asked: TaskOptions, load: LoadOptions, as_json: bool, progress: Progress
) -> None:
    """Measure answers to tasks.

    CHECKPOINT answers the questions of lm-eval's tasks. Each metric has its standard error;
    --against adds the difference to another checkpoint with a 95 % interval by bootstrap over the
    questions, in pairs. DIR has for each task TASK/validation.jsonl or TASK/test.jsonl, and
    TASK/train.jsonl for examples, with the records of the hub's data set."""
    from quantkit.evaluation import tasks as evaluation

    found = evaluation.evaluate(checkpoint, asked, load, progress)
    emit(show.as_json(asdict(found)) if as_json else format_tasks(found, progress))


#: Options of quantize that go over all recipes; `--set` takes all others.
OVER_ALL = [key for key in keys_of(RecipeKeys) if key.keyword in ("samples", "max_length")]


@command(
    "compare",
    "quantkit compare ./model -o table --recipes int4:g128:rtn,int4-gptq,fp6:channel:gptq --calib "
    "packaged,wikitext2",
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
)
@options.recipe_options(OVER_ALL)
@declared({"asked": CompareOptions})
@options.setting(OVER_ALL, like="calibration.seed=1")
def compare(
    model: str,
    out: Path,
    asked: CompareOptions,
    settings: tuple[str, ...],
    samples: int | None,
    max_length: int | None,
    as_json: bool,
    progress: Progress,
) -> None:
    """Compare recipes on one model.

    Each recipe quantizes MODEL, with each calibration text and seed if it needs text. The result is
    judged, decoded to float32, beside MODEL. OUT gets compare.csv, compare.md, compare.html with
    plots of quality against size, and a file for each row. The same command continues after a stop,
    makes new rows if more is asked, and shares the rows with others that run at the same time."""
    from quantkit.evaluation import compare as evaluation
    from quantkit.recipes.files import from_pairs, merge

    length = {"calibration": {"samples": samples, "max_length": max_length}}
    over = merge(merge({}, length), from_pairs(settings, keys_of(RecipeKeys)))
    found = evaluation.compare(model, out, asked, over, progress)
    plain = {**asdict(found), "path": str(found.path)}
    emit(show.as_json(plain) if as_json else format_comparison(found, progress))
    if found.failed:
        leave(
            FAILED,
            f"Error: {len(found.failed)} rows failed, the first is {next(iter(found.failed))}",
        )


def format_perplexity(found: Perplexity, progress: Progress) -> str:
    """Format a perplexity and its protocol."""
    figure, protocol = f"perplexity {found.perplexity:.4f}", _protocol(found)
    bits = found.nll / math.log(2)
    more = (
        f"{found.nll:.6f} nats or {bits:.6f} bits a token, {found.nll * found.tokens:.1f} nats in "
        "all"
    )
    return show.of_level(progress, f"{figure} {protocol}", f"{figure}\n{protocol}", more)


def format_divergence(found: Divergence, progress: Progress) -> str:
    """Format a KL divergence with its tails and its protocol."""
    from quantkit.reporting.facts import tails

    mean, protocol = f"KL divergence {found.kld:.6f} nats", _protocol(found)
    top1 = f"top-1 agreement {100 * found.top1:.3f} %"
    agreed = round(found.top1 * found.tokens)
    more = f"{found.kld / math.log(2):.6f} bits a token; {agreed} of {found.tokens} tokens agree"
    figures = [mean, ", ".join(map(" ".join, tails(asdict(found)))), top1, protocol]
    return show.of_level(progress, f"{mean}, {top1} {protocol}", "\n".join(figures), more)


def _protocol(found: Perplexity | Divergence) -> str:
    return (
        f"on {found.data}: {counted(found.windows, 'window')} of {found.window} tokens, stride "
        f"{found.stride}, {'BOS in front of each' if found.bos else 'no BOS'} ({found.bos_rule}), "
        f"{counted(found.tokens, 'prediction')}, text of {found.text_tokens} tokens (a last short "
        f"window is dropped); {found.weights}"
    )


def format_tasks(found: TaskScores, progress: Progress) -> str:
    """Format the scores of tasks, their mean and their protocol."""
    head = ["task", "metric", "value, %", "std error", "questions"]
    head += [found.against, "difference", "95 % interval"] if found.against else []

    def row(
        names: tuple[str, str], value: float, of: TaskScore | TaskScores, questions: str, other: str
    ) -> list[str]:
        figures = [
            _percent(value),
            _percent(of.stderr),
            questions,
            other,
            _percent(of.difference, "+"),
        ]
        ends = (_percent(of.difference_low, "+"), _percent(of.difference_high, "+"))
        return [*names, *figures, " to ".join(filter(None, ends))][: len(head)]

    rows = [
        row((each.task, each.metric), each.value, each, str(each.questions), _percent(each.against))
        for each in found.scores
    ]
    rows.append(row(("mean", "first metrics"), found.mean, found, "", ""))
    splits = sorted({f"{each.split} ({each.shots} examples)" for each in found.scores})
    questions = sum({each.task: each.questions for each in found.scores}.values())
    protocol = (
        f"on {found.data}: {', '.join(splits)}, {questions} questions, seed {found.seed}, batches "
        f"of {found.batch_size}, {'with' if found.chat_template else 'no'} chat template, "
        f"{found.truncated} requests cut to fit; lm-eval {found.lm_eval}; {found.weights}"
    )
    line = f"mean {' '.join(filter(None, rows[-1][2:]))}"
    return show.of_level(progress, f"{line} {protocol}", f"{show.table(head, rows)}\n{protocol}")


def _percent(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{100 * value:{sign}.2f}"


def format_comparison(found: Comparison, progress: Progress) -> str:
    """Format the table of finished rows, and the command of each."""
    from quantkit.reporting import recipe_table

    left = f", {len(found.unfinished)} unfinished" if found.unfinished else ""
    line = f"{len(found.rows)} rows{left} in {found.path}"
    if not found.rows:
        return line
    head, body = recipe_table.cells(
        found.rows, recipe_table.sections(found.rows)[recipe_table.QUALITY]
    )
    commands = [
        f"{recipe_table.name(row)}: {row['command']}" for row in found.rows if row["command"]
    ]
    text = "\n".join([show.table(head, body), recipe_table.notes(found.rows), *commands, "", line])
    return show.of_level(progress, line, text)


@command(
    "generate", "quantkit generate ./model-int4 'The capital of France is' --max-new-tokens 32"
)
@options.checkpoint
@click.argument("prompt")
@declared({"asked": WriteOptions, "load": LoadOptions}, section="")
def generate(
    checkpoint: str,
    prompt: str,
    asked: WriteOptions,
    load: LoadOptions,
    as_json: bool,
    progress: Progress,
) -> None:
    """Write on after PROMPT, or answer it.

    CHECKPOINT may be dense or quantized. The likeliest token is taken each time, unless
    --temperature or --top-p asks for a draw."""
    from quantkit.inference import generate as inference

    listener = None if as_json else stream if asked.chat else _after(prompt)
    given: Any = {**vars(asked), **vars(load), "progress": progress, "listener": listener}
    found = inference.generate(checkpoint, prompt, **given)
    emit(show.as_json(asdict(found)) if as_json else "")
    rate = found.tokens / found.seconds
    progress.note(
        f"{counted(found.tokens, 'token')} in {found.seconds:.1f} s, {rate:.1f} a second; "
        f"{found.weights}"
    )


def _after(prompt: str) -> Any:
    """Make a listener that prints the prompt in front of the first piece."""
    pieces = iter([prompt])
    return lambda piece: stream(next(pieces, "") + piece)
