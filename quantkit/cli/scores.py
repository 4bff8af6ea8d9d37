"""The commands `eval rouge`, `eval code` and `eval tasks`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import completers, options, show
from quantkit.cli.exits import emit
from quantkit.cli.options import command, count, text
from quantkit.cli.parsing import Range, section
from quantkit.progress import Progress

if TYPE_CHECKING:
    from quantkit.evaluation.programs import CodeScores
    from quantkit.evaluation.rouge import Rouge
    from quantkit.evaluation.tasks import TaskScore, TaskScores


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers with commas between them."""

    name = "n,n"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        try:
            return value if isinstance(value, tuple) else tuple(map(int, str(value).split(",")))
        except ValueError:
            self.fail(f"{value!r} is no list of numbers: write it like 0,1,2", param, ctx)


shots = count("--shots", "Examples before a question [the task's].", least=0)
questions = text(
    "--data",
    "DIR",
    "Folder with a folder of questions for each task [the hub].",
    completers.folders,
)
allow_code_execution = options.flag(
    "--allow-code-execution", "Run the programs that the model writes, in contained processes."
)
_limit = count("--limit", "Read the first N records only [all].")
_kept = "Keep finished parts in FILE, from which the same command continues."
_journal = section("Output", text("--journal", "FILE", _kept, completers.files))
_advanced = section("Advanced", options.source, options.no_check)


@command("rouge", "quantkit eval rouge ./model-int4 --data summaries.jsonl --max-new-tokens 96")
@click.argument("checkpoint", shell_complete=completers.folders)
@section(
    "Basic",
    text(
        "--data",
        "FILE",
        "Records with document and summary (.jsonl, .json, .parquet).",
        completers.files,
        required=True,
    ),
    _limit,
    options.device,
)
@section(
    "Method",
    text(
        "--prompt",
        "TEXT",
        "Prompt, {document} in it is the document [it, and TL;DR: for a decoder].",
    ),
    count("--max-new-tokens", "Most tokens of a summary", 128),
    count("--batch-size", "Texts at a time", 8),
)
@_journal
@_advanced
def rouge(checkpoint: str, as_json: bool, progress: Progress, **asked: Any) -> None:
    """Measure ROUGE of summaries.

    CHECKPOINT summarizes each document by its likeliest tokens, up to a blank line. The summary is
    compared with the reference: F-measures of ROUGE-1, 2 and L of stemmed words, with 95 %
    intervals by bootstrap over records."""
    from quantkit import api

    found = api.eval_rouge(checkpoint, progress=progress, **asked)
    emit(show.as_json(asdict(found)) if as_json else format_rouge(found, progress))


def format_rouge(found: Rouge, progress: Progress) -> str:
    """Format the scores of summaries and their protocol."""
    kinds = {"ROUGE-1": "rouge1", "ROUGE-2": "rouge2", "ROUGE-L": "rougeL"}
    values = asdict(found)
    rows = [
        (
            label,
            f"{100 * values[kind]:.2f}",
            _interval(values[f"{kind}_low"], values[f"{kind}_high"]),
        )
        for label, kind in kinds.items()
    ]
    protocol = (
        f"on {found.data}: {found.records} records, at most {found.max_new_tokens} new tokens, "
        "batches of "
        f"{found.batch_size}, prompt {found.prompt!r}; {found.truncated} documents cut to fit, "
        f"{found.empty} summaries "
        f"empty; {found.weights}"
    )
    line = ", ".join(f"{label} {value}" for label, value, _ in rows)
    text = show.table(("F-measure, %", "mean", "95 % interval"), rows)
    return show.of_level(progress, f"{line} {protocol}", f"{text}\n{protocol}")


@command(
    "tasks", "quantkit eval tasks ./model-int4 --tasks arc_easy,piqa --data tasks --against ./model"
)
@click.argument("checkpoint", shell_complete=completers.folders)
@section(
    "Basic",
    text(
        "--tasks",
        "NAME,NAME",
        "Tasks, groups or tags of lm-eval; zeroshot is ten usual ones.",
        required=True,
    ),
    questions,
    text(
        "--against",
        "CHECKPOINT",
        "Another checkpoint, compared in pairs on the same questions.",
        completers.folders,
    ),
    count("--limit", "Ask the first N questions of each task [all]."),
    options.device,
)
@section(
    "Method",
    shots,
    options.flag("--chat-template", "Ask through the model's chat template."),
    count("--seed", "Seed that chooses the examples", 1234, least=0),
    count("--batch-size", "Texts at a time", 8),
)
@_journal
@_advanced
def tasks(
    checkpoint: str,
    tasks: str,
    against: str | None,
    as_json: bool,
    progress: Progress,
    **asked: Any,
) -> None:
    """Measure answers to tasks.

    CHECKPOINT answers the questions of lm-eval's tasks. Each metric has its standard error;
    --against adds the difference to another checkpoint with a 95 % interval by bootstrap over the
    questions, in pairs. DIR has for each task TASK/validation.jsonl or TASK/test.jsonl, and
    TASK/train.jsonl for examples, with the records of the hub's data set."""
    from quantkit import api

    names = [name for name in tasks.split(",") if name]
    found = api.eval_tasks(checkpoint, tasks=names, against=against, progress=progress, **asked)
    emit(show.as_json(asdict(found)) if as_json else format_tasks(found, progress))


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
        return [*names, *figures, _interval(of.difference_low, of.difference_high, "+")][
            : len(head)
        ]

    rows = [
        row((each.task, each.metric), each.value, each, str(each.questions), _percent(each.against))
        for each in found.scores
    ]
    rows.append(row(("mean", "first metrics"), found.mean, found, "", ""))
    splits = sorted({f"{each.split} ({each.shots} examples)" for each in found.scores})
    questions = sum({each.task: each.questions for each in found.scores}.values())
    protocol = (
        f"on {found.data}: {', '.join(splits)}, {questions} questions, seed {found.seed}, batches "
        "of "
        f"{found.batch_size}, {'with' if found.chat_template else 'no'} chat template, "
        f"{found.truncated} requests cut "
        f"to fit; lm-eval {found.lm_eval}; {found.weights}"
    )
    line = f"mean {' '.join(filter(None, rows[-1][2:]))}"
    return show.of_level(progress, f"{line} {protocol}", f"{show.table(head, rows)}\n{protocol}")


@command(
    "code",
    "quantkit eval code ./model-int4 --data HumanEval.jsonl.gz --samples 20 --allow-code-execution",
)
@click.argument("checkpoint", shell_complete=completers.folders)
@section(
    "Basic",
    text(
        "--data",
        "FILE",
        "Problems of HumanEval, MBPP, HumanEval-X or MultiPL-E (.jsonl, .jsonl.gz, .json, "
        ".parquet).",
        completers.files,
        required=True,
    ),
    allow_code_execution,
    _limit,
    options.device,
)
@section(
    "Method",
    count("--samples", "Programs for each problem and seed", 10),
    click.option(
        "--k", type=Numbers(), help="The k of pass@k [those of 1,10,100 that --samples allows]."
    ),
    click.option(
        "--seeds", type=Numbers(), default=(0,), help="Seeds of the draws, like 0,1,2 [0]."
    ),
    click.option(
        "--temperature",
        type=float,
        default=0.2,
        metavar="X",
        help="0 for the likeliest program [0.2].",
    ),
    click.option(
        "--top-p",
        type=float,
        default=0.95,
        metavar="X",
        help="Draw from the likeliest tokens [0.95].",
    ),
    count("--max-new-tokens", "Most tokens of a program", 512),
    count("--batch-size", "Texts at a time", 16),
    click.option(
        "--timeout", type=Range(0.1), default=5.0, metavar="S", help="Most seconds each [5]."
    ),
    click.option(
        "--namespaces/--no-namespaces",
        default=True,
        help="Contain programs in namespaces of the kernel, or by limits alone: then they can read "
        "and delete files.",
    ),
)
@_journal
@_advanced
def code(checkpoint: str, as_json: bool, progress: Progress, **asked: Any) -> None:
    """Measure pass@k of programs.

    CHECKPOINT writes programs for each problem, which are run with the problem's tests. pass@k is
    the probability that one of k programs passes, estimated without bias, with its standard
    deviation over seeds and a 95 % interval by bootstrap over problems. Each program runs without
    network and home folder, in an empty folder, with limits of time, memory, processes and
    files."""
    from quantkit import api

    found = api.eval_code(checkpoint, progress=progress, **asked)
    emit(show.as_json(asdict(found)) if as_json else format_code(found, progress))


def format_code(found: CodeScores, progress: Progress) -> str:
    """Format pass@k and its protocol."""
    rows = [
        (
            f"pass@{each.k}",
            f"{100 * each.mean:.2f}",
            _percent(each.std),
            _interval(each.low, each.high),
        )
        for each in found.scores
    ]
    protocol = (
        f"on {found.data}: {found.problems} problems, {found.samples} samples each, seeds "
        f"{', '.join(map(str, found.seeds))}, temperature {found.temperature:g}, top-p "
        f"{found.top_p:g}, at most "
        f"{found.max_new_tokens} new tokens, batches of {found.batch_size}; {found.timed_out} "
        "programs ran longer than "
        f"{found.timeout:g} s{'' if found.namespaces else ', contained by limits alone'}; "
        f"{found.weights}"
    )
    line = ", ".join(f"{label} {value} %" for label, value, *_ in rows)
    text = show.table(("%", "mean", "std over seeds", "95 % interval"), rows)
    return show.of_level(progress, f"{line} {protocol}", f"{text}\n{protocol}")


def _percent(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{100 * value:{sign}.2f}"


def _interval(low: float | None, high: float | None, sign: str = "") -> str:
    """Format an interval of shares in percent, empty if there is none."""
    return "" if low is None or high is None else f"{_percent(low, sign)} to {_percent(high, sign)}"
