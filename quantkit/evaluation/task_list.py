"""Tasks of lm-eval by name, with their questions from the hub or from a folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from quantkit.core.threads import grouped
from quantkit.errors import (
    CheckpointError,
    Option,
    RecipeError,
    Words,
    reason,
)
from quantkit.io import hub
from quantkit.names import Json
from quantkit.text.records import records

#: Ten usual zero-shot tasks under one name.
SUITES = {
    "zeroshot": (
        "arc_challenge",
        "arc_easy",
        "boolq",
        "cb",
        "copa",
        "hellaswag",
        "openbookqa",
        "piqa",
        "rte",
        "winogrande",
    )
}
#: Files of a task's folder, and the keys of lm-eval's configs that name their splits.
SPLITS = {"train": "training_split", "validation": "validation_split", "test": "test_split"}
_NAME = re.compile(r"""^["']?(?:task|group|tag)["']?:[ ]*["']?([^\s"'#\[{]+)""", re.MULTILINE)


def load_tasks(names: Sequence[str], data: Path | None, limit: int | None = None) -> Json:
    """Load tasks of lm-eval with their questions, by name in the order asked; groups and tags
    become their tasks.

    Questions come from the hub, or from `data`: a folder a task, in it the files train, validation
    and test (.jsonl) with the records of the hub's data set. Questions are from test, or without
    such a file from validation. Examples are from train, or else from the questions' file. Only the
    first `limit` questions are checked. RecipeError for an unknown name. CheckpointError for a task
    without data, for records of another task, and without a connection.
    """
    from lm_eval.tasks import TaskManager

    folders = _folders()
    wanted = list(dict.fromkeys(each for name in names for each in SUITES.get(name, (name,))))
    if not wanted:
        raise RecipeError("no task is named", Words("use", Option("tasks", "zeroshot")))
    for name in wanted:
        if name not in folders:
            near = get_close_matches(name, [*SUITES, *folders], n=3, cutoff=0.5)
            known = (
                f"lm-eval has {', '.join(near)}"
                if near
                else "lm-eval's own names are `lm-eval ls tasks`"
            )
            raise RecipeError(f"unknown task {name!r}", known)
    manager = TaskManager(
        include_defaults=False,
        include_path=sorted({folder for name in wanted for folder in folders[name]}),
    )
    tasks = dict.fromkeys(leaf for name in wanted for leaf in _leaves(manager.task_index, name))
    local = {name: _local(data / name) for name in tasks} if data is not None else {}
    return {name: _load(manager, name, local.get(name), data, limit) for name in tasks}


@cache
def _folders() -> dict[str, list[Path]]:
    """Map each name of lm-eval's to the folders of its files. Its own index of them takes many
    seconds to build.
    """
    import lm_eval.tasks

    return grouped(
        (name, path.parent)
        for path in sorted(Path(lm_eval.tasks.__file__).parent.rglob("*.yaml"))
        for name in _NAME.findall(path.read_text(encoding="utf-8", errors="replace"))
    )


def _leaves(index: Any, name: str) -> Iterator[str]:
    """Yield the tasks of a name: the task itself, or the tasks of a group or tag."""
    entry = index.get(name)
    if entry is None:
        raise RecipeError(f"lm-eval cannot read its task {name!r}", "name others")
    if entry.kind.name in ("GROUP", "TAG"):
        members = sorted(entry.tags) if entry.kind.name == "TAG" else entry.cfg["task"]
        for member in [members] if isinstance(members, str) else members:
            if not isinstance(member, str):
                raise RecipeError(
                    f"{name!r} is a group that changes its tasks", "name single tasks"
                )
            yield from _leaves(index, member)
    else:
        yield name


def _local(folder: Path) -> dict[str, list[Json]]:
    """Read the records of a task's folder by split; all of a file have the same keys."""
    found: dict[str, list[Json]] = {}
    for split in SPLITS:
        path = folder / f"{split}.jsonl"
        if path.is_file():
            keys: dict[str, type] = {}
            rows = found.setdefault(split, [])
            for where, row in records(path):
                keys = keys or dict.fromkeys(row, object)
                if row.keys() != keys.keys():
                    raise CheckpointError(
                        f"has the keys {', '.join(row)}, and the first record {', '.join(keys)}",
                        "repair the record",
                        subject=where,
                    )
                rows.append(row)
    if not {"validation", "test"} & found.keys():
        raise CheckpointError(
            "has no validation.jsonl and no test.jsonl",
            "fill it with benchmarks/task_data.py",
            Words("leave", Option("data"), "out, to read from the hub"),
            subject=folder,
        )
    return found


def _load(
    manager: Any,
    name: str,
    local: dict[str, list[Json]] | None,
    data: Path | None,
    limit: int | None,
) -> Any:
    """Build a task, and put every question into words, so that a wrong record is found before any
    work.
    """
    import datasets

    kind = manager.task_index[name].kind.name
    if local is not None and kind != "TASK":
        raise RecipeError(
            f"{name} is a program that reads its own data", Words("leave", Option("data"), "out")
        )
    changes: Json = {}
    try:
        if local is not None:
            tables = {split: datasets.Dataset.from_list(rows) for split, rows in local.items()}
            changes = {key: split if split in local else None for split, key in SPLITS.items()}
            examples = next(split for split in ("train", "test", "validation") if split in local)
            changes |= {
                "custom_dataset": lambda **_: datasets.DatasetDict(tables),
                "fewshot_split": examples,
            }
        loaded = manager.load([{"group": "quantkit", "task": [{"task": name, **changes}]}])
        task = loaded["tasks"][name]
        wrong = ""
        for number, doc in enumerate(
            islice(task.eval_docs, limit) if kind == "TASK" else (), start=1
        ):
            task.doc_to_text(doc)
            task.doc_to_target(doc)
            wrong = wrong or _unanswerable(task, doc, number) or _null(task, doc, number)
    except Exception as error:  # of lm-eval, the hub, a task's own code: they share no class
        if local is None and (found := hub.reasons(error, name, "data set")):
            raise CheckpointError(
                *found,
                Words(
                    "give a folder with",
                    Option("data", Words("DIR")),
                    ", which benchmarks/task_data.py fills",
                ),
                subject=name,
            ) from error
        raise CheckpointError(
            f"lm-eval cannot read the questions of {name} ({reason(error)})",
            "give records with the keys of the hub's data set"
            if data is not None
            else "check the task",
            subject=name if data is None else data / name,
        ) from error
    if wrong and data is not None:
        raise CheckpointError(wrong, "repair the record, or leave it out", subject=data / name)
    if getattr(task, "UNSAFE_CODE", False):
        raise RecipeError(
            f"{name} runs programs that the model writes, uncontained",
            "use benchmarks/study/programs.py",
            subject="lm-eval",
        )
    return task


def _unanswerable(task: Any, doc: Any, number: int) -> str:
    """Describe the fault of a question's answer that lm-eval would count as missed by
    every model.
    """
    if task.OUTPUT_TYPE != "multiple_choice" or callable(task.config.process_results):
        return ""
    choices, gold = (
        task.doc_to_choice(doc),
        (task.doc_to_text if task.multiple_input else task.doc_to_target)(doc),
    )
    for each in gold if isinstance(gold, list) else [gold]:
        if not (
            each in choices
            if isinstance(each, str)
            else isinstance(each, int) and 0 <= each < len(choices)
        ):
            return (
                f"the answer of question {number} is {each!r}, which is none of its {len(choices)} "
                "choices"
            )
    return ""


def _null(task: Any, doc: Any, number: int) -> str:
    """Name the null parts of a question that a template reads, and would write as the word None."""
    nulls = [key for key, value in doc.items() if value is None]
    empty = {**doc, **dict.fromkeys(nulls, "")}
    reads = [
        task.doc_to_text,
        task.doc_to_target,
        *[task.doc_to_choice] * (task.OUTPUT_TYPE == "multiple_choice"),
    ]
    if nulls and any(read(doc) != read(empty) for read in reads):
        return f"question {number} has null for {', '.join(nulls)}"
    return ""
