"""Programs that a model writes in Python or JavaScript: the share that passes the tests of their
problems.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from quantkit.errors import CheckpointError, Option, RecipeError, Words
from quantkit.evaluation.divergence import interval
from quantkit.evaluation.finished import Finished, Get
from quantkit.evaluation.opened import Opened, open_writer
from quantkit.evaluation.sandbox import Language, Sandbox, Verdict
from quantkit.inference.batches import BatchWriter, room_for_prompt
from quantkit.inference.generate import Sampling
from quantkit.inference.swap_linears import describe_weights
from quantkit.io.hashing import hash_of_file
from quantkit.progress import Listener, Progress, reporter
from quantkit.text.records import records_with
from quantkit.text.tokenizer import token_ids

#: What ends a completion: the next statement at the margin (Chen et al. 2021, section 2.2).
STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
#: What ends a whole solution of MBPP, which may have several functions.
SOLUTION_STOPS = ("\nclass", "\nassert", '\n"""', "\nif", "\nprint", "\n```")
JAVASCRIPT_STOPS = (
    "\nfunction ",
    "\nconst ",
    "\nlet ",
    "\nvar ",
    "\n/*",
    "\n//",
    "\nconsole.log",
    "\n```",
)
#: Keys of HumanEval, of MBPP, of the sanitized MBPP, of HumanEval-X, and of MultiPL-E.
SHAPES: tuple[dict[str, type], ...] = (
    {"prompt": str, "test": str, "entry_point": str},
    {"text": str, "test_list": list},
    {"prompt": str, "test_list": list},
    {"task_id": str, "prompt": str, "declaration": str, "test": str},
    {"language": str, "prompt": str, "tests": str, "stop_tokens": list},
)
USUAL_K = (1, 10, 100)


@dataclass(frozen=True)
class Problem:
    """The prompt of a problem. A program is `head`, the model's completion and `tests`.

    The first of `stops` ends the completion, and what follows its last `close` is left out.
    """

    prompt: str
    head: str
    tests: str
    stops: tuple[str, ...]
    language: Language = "Python"
    close: str = ""

    def program(self, completion: str) -> str:
        completion = completion[: completion.rfind(self.close) + len(self.close)] or completion
        return f"{self.head}{completion}\n{self.tests}"


@dataclass(frozen=True)
class PassAtK:
    """The probability that one of `k` programs passes: its mean over `seeds`, and their standard
    deviation.

    `low` to `high` is the 95 % interval by bootstrap over problems. `std` is None for one seed, the
    interval for one problem.
    """

    k: int
    mean: float
    std: float | None
    low: float | None
    high: float | None
    seeds: list[float]


@dataclass(frozen=True)
class CodeScores:
    """pass@k of `samples` programs for each of `problems`, drawn with each of `seeds`.

    `timed_out` programs ran longer than `timeout` seconds. `namespaces` says whether these
    contained the programs.
    """

    scores: list[PassAtK]
    problems: int
    samples: int
    seeds: list[int]
    temperature: float
    top_p: float
    max_new_tokens: int
    batch_size: int
    timeout: float
    namespaces: bool
    timed_out: int
    data: str
    weights: str = ""


def eval_code(
    checkpoint: str | Path,
    *,
    data: str | Path,
    allow_code_execution: bool = False,
    samples: int = 10,
    k: Sequence[int] | None = None,
    seeds: Sequence[int] = (0,),
    temperature: float = 0.2,
    top_p: float = 0.95,
    limit: int | None = None,
    max_new_tokens: int = 512,
    batch_size: int = 16,
    timeout: float = 5.0,
    namespaces: bool = True,
    journal: str | Path | None = None,
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    check: bool = True,
    progress: Progress | Listener | None = None,
) -> CodeScores:
    """Let a checkpoint write programs for the problems of a data set, run their tests, and estimate
    pass@k.

    `data` is a file of records of HumanEval or MBPP, or in JavaScript of HumanEval-X or MultiPL-E,
    of which the first `limit` are read. For each of `seeds` and each problem, `samples` programs
    are drawn. `k` defaults to those of 1, 10 and 100 that `samples` allows. `temperature` 0 takes
    the likeliest program, which must be the only one.

    Programs run only with `allow_code_execution`, each for at most `timeout` seconds and in
    namespaces: without network and home folder, with limits of memory, processes and files. Where
    the kernel allows no namespaces, this is refused; with `namespaces` False only the limits
    contain a program, which can read and delete your files.

    `journal` is a file that keeps finished programs, from which the same call continues. Raises a
    QuantkitError, before any weight is read, for problems, options or a model that cannot be
    evaluated.

    Example:

    ```python
    import quantkit

    options = {"samples": 1, "temperature": 0.0, "max_new_tokens": 8, "limit": 1} found =
    quantkit.eval_code("model-int4", data="problems.jsonl", allow_code_execution=True, **options)
    print(found.scores[0].k, found.scores[0].mean) ```
    """
    progress = reporter(progress)
    drawing: Any = {
        "samples": samples,
        "k": k,
        "seeds": seeds,
        "temperature": temperature,
        "top_p": top_p,
    }
    drawing |= {"limit": limit, "max_new_tokens": max_new_tokens, "batch_size": batch_size}
    exam = CodeExam(data, allow_code_execution, timeout=timeout, namespaces=namespaces, **drawing)
    opened = open_writer(checkpoint, revision, trust_remote_code)
    exam.require(opened)
    finished = Finished(journal, {"model": opened.digest(), **exam.run, "device": device})
    model = opened.load(device, trust_remote_code, check, progress)
    return exam.scores(model, opened, finished.get, progress)


class CodeExam:
    """Problems, and how programs for them are drawn and run; QuantkitError for what cannot be drawn
    or run.

    `run` has everything that the programs depend on, besides the model.
    """

    def __init__(
        self,
        data: str | Path,
        allow_code_execution: bool,
        *,
        samples: int = 10,
        k: Sequence[int] | None = None,
        seeds: Sequence[int] = (0,),
        temperature: float = 0.2,
        top_p: float = 0.95,
        limit: int | None = None,
        max_new_tokens: int = 512,
        batch_size: int = 16,
        timeout: float = 5.0,
        namespaces: bool = True,
    ) -> None:
        if not allow_code_execution:
            raise RecipeError(
                "programs that the model writes are run here, in a contained process",
                Words("add", Option("allow_code_execution", True)),
            )
        self._draws = [_sampling(temperature, top_p, seed, samples, len(seeds)) for seed in seeds]
        self._counts = [each for each in USUAL_K if each <= samples] if k is None else list(k)
        if len(set(seeds)) < len(seeds):
            raise RecipeError(f"a seed is given twice in {list(seeds)}", "give each once")
        if not seeds:
            raise RecipeError("no seed draws the programs", Words("use", Option("seeds", [0])))
        if not self._counts or min(self._counts) < 1:
            raise RecipeError(
                f"there is no pass@k of {self._counts}", Words("use", Option("k"), "of 1 or more")
            )
        if max(self._counts) > samples:
            raise RecipeError(
                f"{samples} samples give no pass@{max(self._counts)}",
                Words("use", Option("samples", max(self._counts)), "or more"),
            )
        self._data = Path(data)
        self._problems = _problems(self._data, limit)
        self._sandbox = Sandbox(timeout, namespaces, language=self._problems[0].language)
        self._about: dict[str, Any] = {
            "samples": samples,
            "seeds": list(seeds),
            "temperature": temperature,
        }
        self._about |= {"top_p": top_p, "max_new_tokens": max_new_tokens, "batch_size": batch_size}
        self.run = {
            "data": hash_of_file(self._data),
            "problems": len(self._problems),
            **self._about,
        }

    def require(self, opened: Opened) -> None:
        """Raise QuantkitError for an encoder-decoder, too few positions, or programs that cannot be
        contained.
        """
        opened.require_decoder_only()
        new = self._about["max_new_tokens"]
        room = room_for_prompt(opened.config, new)
        longest, number = max(
            (len(ids), number) for number, ids in enumerate(self._prompts(opened), start=1)
        )
        if room is not None and longest > room:
            left = room + new - longest
            raise RecipeError(
                f"problem {number} has {longest} tokens, and with {new} new ones more than the "
                f"model's {room + new} "
                "positions",
                Words("use", Option("max_new_tokens", left), "or less")
                if left > 0
                else "take it out",
                subject=self._data,
            )
        self._sandbox.require()

    def scores(self, model: Any, opened: Opened, get: Get, progress: Progress) -> CodeScores:
        """Let a model write the programs, and run them; `get` keeps those that are written."""
        prompts, problems, about = self._prompts(opened), self._problems, self._about
        samples, seeds, size = about["samples"], about["seeds"], about["batch_size"]
        wanted = [number for number in range(len(problems)) for _ in range(samples)]
        batches = [
            (number, start) for number in range(len(seeds)) for start in range(0, len(wanted), size)
        ]
        programs: list[str] = []
        for number, start in progress.bar(batches, "programs", len(batches), each="batch"):
            part, draw = wanted[start : start + size], self._draws[number].of_batch(start)
            writer = BatchWriter(
                model, opened.tokenizer, about["max_new_tokens"], draw, problems[0].stops
            )
            name = f"seed {seeds[number]}, programs {start} to {start + len(part)}"
            texts = get(name, partial(writer.write, [prompts[each] for each in part]))
            programs += [
                problems[each].program(text) for each, text in zip(part, texts, strict=True)
            ]
        verdicts = _verdicts(programs, self._sandbox, progress)
        shape = (len(seeds), len(problems), samples)
        passed = np.array([verdict == "passed" for verdict in verdicts]).reshape(shape).sum(2)
        return CodeScores(
            scores=[pass_at_k(passed, samples, each) for each in self._counts],
            problems=len(problems),
            timeout=self._sandbox.seconds,
            namespaces=self._sandbox.namespaces,
            timed_out=verdicts.count("timed out"),
            data=self._data.name,
            weights=describe_weights(model),
            **about,
        )

    def _prompts(self, opened: Opened) -> list[Tensor]:
        return [
            token_ids(opened.tokenizer, problem.prompt, special=True) for problem in self._problems
        ]


def pass_at_k(passed: Any, samples: int, k: int) -> PassAtK:
    """Estimate pass@k without bias: 1 - C(n - c, k) / C(n, k) for each problem (Chen et al. 2021,
    equation 1).

    `passed` int `[seeds, problems]` counts the programs that passed, of `samples` each.
    """
    all_fail = [
        [math.comb(samples - c, k) / math.comb(samples, k) for c in row] for row in passed.tolist()
    ]
    chances = 1 - np.array(all_fail)
    means = chances.mean(1)
    low, high = interval(chances.mean(0)) or (None, None)
    std = float(means.std(ddof=1)) if len(means) > 1 else None
    return PassAtK(k, float(means.mean()), std, low, high, means.tolist())


def _problems(data: Path, limit: int | None) -> list[Problem]:
    """Read problems, all of one kind."""
    found: list[Problem] = []
    for where, row in islice(records_with(data, *SHAPES), limit):
        found.append(_problem(row, where))
        if (found[-1].language, found[-1].stops) != (found[0].language, found[0].stops):
            raise CheckpointError(
                "is of another data set than the first record", "give each its file", subject=where
            )
    return found


def _problem(row: dict[str, Any], where: str) -> Problem:
    language = str(row.get("language") or row.get("task_id")).partition("/")[0]
    if "test_list" not in row:
        prompt = row["prompt"].strip()
        if language.lower() in ("js", "javascript"):
            if "stop_tokens" in row:
                return Problem(
                    prompt, prompt, row["tests"], tuple(map(str, row["stop_tokens"])), "JavaScript"
                )
            return Problem(prompt, prompt, row["test"], JAVASCRIPT_STOPS, "JavaScript", "}")
        if "entry_point" not in row or ("declaration" in row and language != "Python"):
            raise CheckpointError(
                f"is a problem in {language}",
                "use those in JavaScript, or HumanEval",
                subject=where,
            )
        return Problem(prompt, prompt, f"\n{row['test']}\ncheck({row['entry_point']})\n", STOPS)
    tests = "\n".join(map(str, row["test_list"]))
    imports = row.get("test_imports") or []
    if not isinstance(imports, list):
        raise CheckpointError("test_imports is no list", "repair the record", subject=where)
    prompt = f'"""\n{row.get("text", row.get("prompt"))}\n{tests}\n"""\n'
    # The setup makes objects of the solution's classes.
    setup, head = row.get("test_setup_code") or "", "\n".join(map(str, imports))
    return Problem(prompt, f"{head}\n", f"\n{setup}\n{tests}\n", SOLUTION_STOPS)


def _sampling(temperature: float, top_p: float, seed: int, samples: int, seeds: int) -> Sampling:
    if not 0 <= seed < 2**31:
        raise RecipeError(f"seed is {seed}", "use a number from 0 to 2^31 - 1")
    if temperature:
        return Sampling(temperature, top_p, seed)
    if samples > 1 or seeds > 1:
        raise RecipeError(
            Words("with", Option("temperature", 0), "all programs of a problem are one"),
            Words("use", Option("samples", 1), "and one seed"),
        )
    return Sampling()


def _verdicts(programs: Sequence[str], sandbox: Sandbox, progress: Progress) -> list[Verdict]:
    """Run each program; equal ones run once."""
    different = list(dict.fromkeys(programs))
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "quantkit-programs")
    try:
        running = [pool.submit(sandbox.run, program) for program in different]
        found = {
            program: future.result()
            for program, future in progress.bar(
                zip(different, running, strict=True), "tests", len(different)
            )
        }
    finally:
        pool.shutdown(cancel_futures=True)
    return [found[program] for program in programs]
