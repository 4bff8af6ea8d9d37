"""The command `eval tasks`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import completers, options, show
from quantkit.cli.exits import emit
from quantkit.cli.options import command, count, text
from quantkit.cli.parsing import section
from quantkit.progress import Progress

if TYPE_CHECKING:
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
_kept = "Keep finished parts in FILE, from which the same command continues."
_journal = section("Output", text("--journal", "FILE", _kept, completers.files))
_advanced = section("Advanced", options.source, options.no_check)


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


def _percent(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{100 * value:{sign}.2f}"


def _interval(low: float | None, high: float | None, sign: str = "") -> str:
    """Format an interval of shares in percent, empty if there is none."""
    return "" if low is None or high is None else f"{_percent(low, sign)} to {_percent(high, sign)}"
