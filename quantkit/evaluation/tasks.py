"""Tasks of lm-eval: the share of questions that a model answers rightly, compared with another
model in pairs.
"""

from __future__ import annotations

import io
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.errors import Option, RecipeError, Words
from quantkit.evaluation.divergence import interval
from quantkit.evaluation.opened import Finished, Opened, open_checkpoint, require_package
from quantkit.evaluation.options import TaskOptions, listed
from quantkit.evaluation.task_list import load_tasks
from quantkit.inference.swap_linears import describe_weights
from quantkit.io.files import hash_of
from quantkit.names import Json, JsonView
from quantkit.progress import Progress
from quantkit.recipes.options import LoadOptions

#: Resamples of a metric whose error has no formula.
RESAMPLES = 1000


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task over `questions` of a `split`, with `shots` examples before each.

    `stderr` is lm-eval's standard error, None if it has none. `against` is the other checkpoint's
    value, and `difference` how much ours is above it; `difference_low` to `difference_high` is the
    95 % interval by bootstrap over the questions, in pairs. They are None without another
    checkpoint, and for a metric that is no mean over questions.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    questions: int
    split: str
    shots: int
    against: float | None = None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None


@dataclass(frozen=True)
class TaskScores:
    """The `scores` of all tasks, and the `mean` of the first metric of each task with its standard
    error.

    `difference` is the mean of the differences to `against`, with its 95 % interval by the normal
    distribution. `truncated` requests were longer than the model's context, and lost their
    beginning.
    """

    scores: list[TaskScore]
    mean: float
    stderr: float | None
    difference: float | None
    difference_low: float | None
    difference_high: float | None
    against: str | None
    data: str
    seed: int
    batch_size: int
    chat_template: bool
    truncated: int
    lm_eval: str
    weights: str = ""


def evaluate(
    checkpoint: str | Path, asked: TaskOptions, load: LoadOptions, progress: Progress
) -> TaskScores:
    """Let a checkpoint answer the questions of tasks, and compare it with another one in pairs.

    Both are never in memory together. Raises a QuantkitError, before any weight is read, for tasks,
    data or a model that cannot be evaluated.
    """
    exam = Exam(asked)
    opened = {"": open_checkpoint(checkpoint, load)}
    if asked.against is not None:
        opened["against"] = open_checkpoint(asked.against, replace(load, revision=None))
    for each in opened.values():
        exam.require(each)
    models = {which or "model": each.digest() for which, each in opened.items()}
    run = {**models, **exam.about, "tasks": exam.asked, "device": load.device}
    finished = Finished(asked.journal, run)
    answers: dict[str, Json] = {}
    for which, each in opened.items():
        model = cache(partial(each.load, progress))
        answers[which] = {}
        for name in progress.bar(exam.asked, f"{which} tasks".strip(), each="task"):
            ask = partial(exam.answer, name, model, each, progress)
            answers[which][name] = finished.get(f"{which} {name}".strip(), ask)
        del model
    scores = exam.scores(answers[""], answers.get("against"))
    return TaskScores(
        scores=scores,
        **means(scores),
        against=asked.against,
        data="the hub" if asked.data is None else Path(asked.data).name,
        truncated=sum(answer["truncated"] for answer in answers[""].values()),
        weights=answers[""][next(iter(exam.asked))]["weights"],
        **exam.about,
    )


class Exam:
    """Tasks with their questions, and how models are asked them; QuantkitError for those that
    cannot be asked.

    `asked` has the facts that each task's answers depend on, and `about` the facts of all tasks.
    """

    def __init__(self, options: TaskOptions) -> None:
        require_package("lm-eval")
        from lm_eval import __version__

        self._limit, data = options.limit, options.data
        with _as_guest():
            folder = None if data is None else Path(data)
            self._tasks = load_tasks(listed(options.tasks), folder, options.limit)
            self.asked = {
                name: _asked(task, options.shots, options.limit)
                for name, task in self._tasks.items()
            }
        self.about: Json = {
            "seed": options.seed,
            "batch_size": options.batch_size,
            "chat_template": options.chat_template,
            "lm_eval": __version__,
        }

    def require(self, opened: Opened) -> None:
        """Raise QuantkitError for a model that cannot be asked so."""
        opened.require_decoder_only()
        if not opened.tokenizer.chat_template and self.about["chat_template"]:
            raise RecipeError(
                "the model has no chat template",
                Words("drop", Option("chat_template")),
                subject=opened.src.path,
            )

    def answer(
        self, name: str, load: Callable[[], Any], opened: Opened, progress: Progress
    ) -> Json:
        """Return the metrics of a task, each with its error and its values of each question, as
        JSON has them.
        """
        from lm_eval.evaluator import evaluate

        model, task, about = load(), self._tasks[name], self.about
        task.set_fewshot_seed(about["seed"])
        bar = progress.bar(1, name)
        language = _language_model(model, opened.tokenizer, about["batch_size"], bar, progress)
        with _as_guest(), language as lm:
            results: Any = evaluate(
                lm,
                {"tasks": {name: task}},
                limit=self._limit,
                bootstrap_iters=RESAMPLES,
                apply_chat_template=about["chat_template"],
                fewshot_as_multiturn=about["chat_template"],
            )
        bar.close()
        found, samples = results["results"][name], results["samples"][name]
        metrics = {}
        for key, value in found.items():
            metric, comma, chosen = key.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
                values = [each.get(metric) for each in samples if each["filter"] == chosen]
                is_mean = all(isinstance(each, int | float) for each in values) and math.isclose(
                    math.fsum(values) / len(values), value, rel_tol=1e-6, abs_tol=1e-9
                )
                error = found.get(f"{metric}_stderr,{chosen}")
                metrics[metric if chosen == "none" else key] = {
                    "value": float(value),
                    "stderr": float(error)
                    if isinstance(error, int | float) and math.isfinite(error)
                    else None,
                    "values": [float(each) for each in values] if is_mean else None,
                }
        return {
            "metrics": metrics,
            "truncated": lm.truncated,
            "weights": describe_weights(model),
            "batch_size": about["batch_size"],
        }

    def scores(self, answers: JsonView, others: JsonView | None = None) -> list[TaskScore]:
        """Return the scores of all tasks, compared in pairs with another model's."""
        return [
            score
            for name, asked in self.asked.items()
            for score in _scores(name, asked, answers[name], (others or {}).get(name))
        ]


@contextmanager
def _language_model(
    model: Any, tokenizer: Any, batch_size: int, bar: Any, progress: Progress
) -> Iterator[Any]:
    """Wrap a transformers model for lm-eval. The wrapper moves a bar and counts requests that are
    too long.
    """
    from lm_eval.models.huggingface import HFLM

    class Language(HFLM):  # type: ignore[misc]
        truncated = 0

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            self.begin(["".join(request.args) for request in requests], self.max_length + 1)
            return super().loglikelihood(requests, disable_tqdm=True)

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            most = self.max_length - self.max_gen_toks
            self.begin([request.args[0] for request in requests], most)
            return super().generate_until(requests, disable_tqdm=True)

        def begin(self, texts: Sequence[str], most: int) -> None:
            bar.total = len(texts)
            self.truncated += sum(len(self.tok_encode(text)) > most for text in texts)

    def tell(module: Any, arguments: Any, output: Any) -> None:
        progress.check()
        bar.update(min(batch_size, bar.total - bar.n))

    model.generation_config.stop_strings = None  # tasks end their texts by strings of their own
    hook = model.register_forward_hook(tell)
    try:
        yield Language(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    finally:
        hook.remove()


def _asked(task: Any, shots: int | None, limit: int | None) -> Json:
    """Set a task's number of examples, as lm-eval does; return the facts that its result depends
    on.
    """
    own = task.get_config("num_fewshot")
    if own is None or (shots is not None and own != 0):
        task.set_config("num_fewshot", shots or 0)
    docs, given = list(task.eval_docs), task.get_config("num_fewshot")
    if given and (known := len(list(task.fewshot_docs()))) <= given:
        raise RecipeError(
            f"{task.config.task} has {known} records for {given} examples",
            Words("use fewer", Option("shots")),
        )
    split = task.config.test_split if task.has_test_docs() else task.config.validation_split
    digest = hash_of("\n".join(map(repr, docs)).encode())
    return {"split": split, "shots": given, "questions": len(docs[:limit]), "data": digest}


def _scores(name: str, asked: Json, answer: Json, other: Json | None) -> Iterator[TaskScore]:
    facts = {key: asked[key] for key in ("questions", "split", "shots")}
    for metric, found in answer["metrics"].items():
        beside: Json = {}
        if other is not None:
            theirs = other["metrics"][metric]
            beside["against"] = theirs["value"]
            if found["values"] is not None and theirs["values"] is not None:
                differences = np.array(found["values"]) - np.array(theirs["values"])
                low, high = interval(differences) or (None, None)
                beside |= {
                    "difference": float(differences.mean()),
                    "difference_low": low,
                    "difference_high": high,
                }
        yield TaskScore(name, metric, found["value"], found["stderr"], **facts, **beside)


def means(scores: Sequence[TaskScore]) -> Json:
    """Average the first metric of each task, by the fields of `TaskScores`; errors of tasks are
    independent.
    """
    scores = list({score.task: score for score in reversed(scores)}.values())[::-1]
    count = len(scores)
    errors = [score.stderr for score in scores if score.stderr is not None]
    found: Json = {
        "mean": sum(score.value for score in scores) / count,
        "stderr": math.hypot(*errors) / count if len(errors) == count else None,
        **dict.fromkeys(("difference", "difference_low", "difference_high")),
    }
    paired = [score for score in scores if score.difference is not None]
    if len(paired) == count:
        found["difference"] = sum(score.difference or 0.0 for score in paired) / count
        # An interval by bootstrap is about as wide as the normal one.
        half = (
            math.hypot(*((s.difference_high or 0.0) - (s.difference_low or 0.0) for s in paired))
            / 2
            / count
        )
        if all(score.difference_low is not None for score in paired):
            found |= {
                "difference_low": found["difference"] - half,
                "difference_high": found["difference"] + half,
            }
    return found


@contextmanager
def _as_guest() -> Iterator[None]:
    """Silence lm-eval's bars and log lines, and restore the global random generators afterwards."""
    states, logger = (random.getstate(), np.random.get_state()), logging.getLogger("lm_eval")
    propagates = logger.propagate
    logger.propagate = False  # a handler of the root has the real stderr, as absl's
    random.seed(0)
    np.random.seed(0)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.propagate = propagates
        random.setstate(states[0])
        np.random.set_state(states[1])
