"""Tasks give the numbers of lm-eval itself, questions are paired, and bad data is found before any work."""

from __future__ import annotations

import json
import logging
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit import eval_tasks
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import QuantkitError
from quantkit.evaluation.divergence import interval
from quantkit.models.weights import load_dense_model
from quantkit.text.tokenizer import load_tokenizer
from tests.command_line import call, refused
from tests.evaluation.folders import written

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval, of which these are the tasks")
WORDS = ["rain", "hail", "snow", "wind", "fog", "sun", "cloud", "frost", "storm", "calm"]


def words(draws: random.Random, count: int) -> str:
    return " ".join(draws.choices(WORDS, k=count))


def piqa(draws: random.Random) -> dict[str, Any]:
    return {
        **{"goal": words(draws, 4), "sol1": words(draws, 3), "sol2": words(draws, draws.randint(1, 6))},
        "label": draws.randint(0, 1),
    }


def arc(draws: random.Random) -> dict[str, Any]:
    choices = {"text": [words(draws, draws.randint(1, 3)) for _ in range(4)], "label": list("ABCD")}
    return {"id": "x", "question": words(draws, 5), "choices": choices, "answerKey": draws.choice("ABCD")}


def gsm8k(draws: random.Random) -> dict[str, Any]:
    return {"question": words(draws, 3), "answer": f"so\n#### {draws.randint(0, 9)}"}


#: Task -> the records of its files.
FILES = {
    "piqa": {"validation": (piqa, 50)},
    "arc_easy": {"train": (arc, 8), "test": (arc, 20)},
    "gsm8k": {"train": (gsm8k, 6), "test": (gsm8k, 3)},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draws = tmp_path_factory.mktemp("tasks"), random.Random(0)
    for task, splits in FILES.items():
        for split, (record, count) in splits.items():
            written(folder / task / f"{split}.jsonl", *(record(draws) for _ in range(count)))
    return folder


def directly(folder: Path, data: Path, task: str, shots: int) -> dict[str, float]:
    """Run lm-eval as its own users do: it loads the folder, and reads the files with datasets."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False, include_path=str(Path(lm_eval.__file__).parent / "tasks" / task))
    files = {path.stem: str(path) for path in sorted((data / task).iterdir())}
    splits = {f"{key}_split": name if name in files else None for key, name in SPLITS.items()}
    changed = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}, **splits}
    loaded = manager.load([{"group": "mine", "task": [{"task": task, **changed}]}])
    loaded["tasks"][task].set_config("num_fewshot", shots)
    loaded["tasks"][task].set_fewshot_seed(1234)
    lm = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=8)
    found = lm_eval.evaluate(lm, {"tasks": loaded["tasks"]}, bootstrap_iters=1000)["results"][task]
    return {key.removesuffix(",none"): value for key, value in found.items() if "," in key}


SPLITS = {"training": "train", "validation": "validation", "test": "test"}


@pytest.mark.parametrize(("task", "shots"), [("piqa", 0), ("gsm8k", 1)])
def test_a_packed_model_gives_the_numbers_of_lm_eval_on_the_decoded_folder(
    task: str, shots: int, int4: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    load_dense_model(Checkpoint(int4)).save_pretrained(tmp_path / "dense")
    load_tokenizer(int4).save_pretrained(tmp_path / "dense")
    expected = directly(tmp_path / "dense", data, task, shots)
    found = eval_tasks(int4, tasks=task, data=data, shots=shots, device="cpu")
    assert len(found.scores) == 2 and "decoded" in found.weights
    for score in found.scores:
        metric, _, chosen = score.metric.partition(",")
        suffix = f",{chosen}" if chosen else ""
        assert score.value == expected[score.metric]
        assert score.stderr == expected[f"{metric}_stderr{suffix}"]
    assert {(score.questions, score.shots) for score in found.scores} == {(found.scores[0].questions, shots)}


def test_differences_are_paired_by_question(int4: Path, small_llama: Path, data: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    found = eval_tasks(int4, tasks=["piqa", "arc_easy"], data=data, against=small_llama, journal=kept, device="cpu")
    lines = {line["name"]: line["value"] for line in (json.loads(x)["line"] for x in kept.open()) if "name" in line}
    assert lines.keys() == {"piqa", "arc_easy", "against piqa", "against arc_easy"}
    for score in found.scores:
        ours, theirs = (
            np.array(lines[f"{a}{score.task}"]["metrics"][score.metric]["values"]) for a in ("", "against ")
        )
        assert len(ours) == score.questions and score.value == pytest.approx(ours.mean())
        assert score.against == pytest.approx(theirs.mean())
        assert score.difference == pytest.approx((ours - theirs).mean())
        assert (score.difference_low, score.difference_high) == interval(ours - theirs)
    first = [score for score in found.scores if score.metric == "acc"]
    assert found.mean == pytest.approx(sum(score.value for score in first) / 2)
    assert found.stderr == pytest.approx(np.hypot(*(score.stderr for score in first)) / 2)
    assert found.difference == pytest.approx(sum(score.difference for score in first) / 2)  # type: ignore[misc]
    assert found.difference_low <= found.difference <= found.difference_high  # type: ignore[operator]


def test_a_killed_run_continues_with_the_next_task(
    small_llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval import evaluator

    options: dict[str, Any] = {"tasks": ["arc_easy", "piqa"], "data": data, "shots": 1, "limit": 4, "device": "cpu"}
    whole, own, asked = eval_tasks(small_llama, **options), evaluator.evaluate, []

    def evaluate(lm: Any, tasks: Any, **rest: Any) -> Any:
        asked.extend(tasks["tasks"])
        if len(asked) == 2:
            raise KeyboardInterrupt
        return own(lm, tasks, **rest)

    monkeypatch.setattr(evaluator, "evaluate", evaluate)
    with pytest.raises(KeyboardInterrupt):
        eval_tasks(small_llama, **options, journal=tmp_path / "kept")
    assert eval_tasks(small_llama, **options, journal=tmp_path / "kept") == whole
    assert asked == ["arc_easy", "piqa", "piqa"]
    with pytest.raises(QuantkitError, match=r"another run \(tasks changed\)"):
        eval_tasks(small_llama, **{**options, "limit": 3}, journal=tmp_path / "kept")


def test_nothing_of_lm_eval_reaches_stderr_or_the_state_of_random(
    small_llama: Path, data: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(sys.stderr)])  # as rouge-score adds one
    random.seed(3)
    state, numpy_state = random.getstate(), np.random.get_state()[1].tolist()
    eval_tasks(small_llama, tasks="piqa", data=data, limit=3, shots=1, device="cpu")
    assert capfd.readouterr() == ("", "")
    assert random.getstate() == state and np.random.get_state()[1].tolist() == numpy_state


def test_a_question_that_is_too_long_is_counted(small_llama: Path, tmp_path: Path) -> None:
    long = {"goal": "rain " * 200, "sol1": "a", "sol2": "b", "label": 0}
    written(tmp_path / "piqa" / "validation.jsonl", {**long, "goal": "rain"}, long)
    assert eval_tasks(small_llama, tasks="piqa", data=tmp_path, device="cpu").truncated == 2  # of two answers


def test_groups_and_tags_become_their_tasks(data: Path) -> None:
    from quantkit.evaluation.task_list import load_tasks

    with pytest.raises(QuantkitError, match=r"mmlu_\w+: has no validation.jsonl and no test.jsonl"):
        load_tasks(["mmlu"], data)
    assert list(load_tasks(["piqa", "piqa"], data)) == ["piqa"]


PIQA = piqa(random.Random(0))


@pytest.mark.parametrize(
    ("tasks", "records", "options", "says"),
    [
        ("arc_easy", [PIQA], "", "arc_easy: has no validation.jsonl and no test.jsonl: fill it with"),
        ("piqa", [{"goal": "a", "label": 0}], "", "lm-eval cannot read the questions of piqa ("),
        ("piqa", [PIQA, {**PIQA, "label": "x"}], "", "lm-eval cannot read the questions of piqa ("),
        *(
            ("piqa", [PIQA, {**PIQA, "label": label}], "", f"piqa: the answer of question {number} is {shown}, which")
            for label, number, shown in ((-1, 2, "-1"), (2, 2, "2"), (None, 2, "None"), (0.5, 1, "0.0"))
        ),
        ("piqa", [{**PIQA, "label": "1"}], "", "is '1', which is none of its 2 choices: repair the record"),
        ("piqa", [PIQA, {**PIQA, "goal": None}], "", "piqa: question 2 has null for goal: repair the record"),
        ("piqa", [PIQA, {**PIQA, "sol2": None}], "", "piqa: question 2 has null for sol2: repair the record"),
        ("piqa", [PIQA, {"goal": "a"}], "", "validation.jsonl: line 2: has the keys goal, and the first record goal,"),
        ("piqa", [], "", "validation.jsonl: has no records"),
        ("piqa", [3], "", "line 1: is no JSON object"),
        ("piqa", [PIQA], "--shots 1", "piqa has 1 records for 1 examples: use fewer --shots"),
        ("piqa", [PIQA], "--chat-template", "the model has no chat template: drop --chat-template"),
        (",", [PIQA], "", "no task is named"),
    ],
)
def test_bad_input_is_one_line_before_any_weight_is_read(
    tasks: str, records: Any, options: str, says: str, small_llama: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("quantkit.evaluation.opened.load_for_evaluation", lambda *_, **__: pytest.fail("read"))
    written(tmp_path / "piqa" / "validation.jsonl", *records)
    line = ("eval", "tasks", small_llama, "--tasks", tasks, "--data", tmp_path, *options.split())
    assert says in refused(*line, code=None)


def test_a_task_of_the_hub_without_a_network_names_the_folder(small_llama: Path, monkeypatch: Any) -> None:
    import datasets

    def load(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load)
    said = refused("eval", "tasks", small_llama, "--tasks", "piqa", code=None)
    assert said.endswith("is cached: give a folder with --data DIR, which benchmarks/task_data.py fills\n")


def test_the_table_and_the_json_say_the_same(small_llama: Path, data: Path) -> None:
    line = ("eval", "tasks", small_llama, "--tasks", "piqa", "--data", data, "--limit", 10, "--device", "cpu")
    found, text = json.loads(call(*line, "--json").stdout), call(*line).stdout
    assert re.search(f"acc +{100 * found['scores'][0]['value']:.2f} ", text)
    assert "validation (0 examples), 10 questions" in text
    beside = call(*line, "--against", small_llama, "-q").stdout
    assert "+0.00" in beside and len(beside.splitlines()) == 1
    assert quantkit.eval_tasks.__doc__
