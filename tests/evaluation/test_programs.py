"""pass@k equals its definition, programs are put together as their data set means, and nothing runs unasked."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.errors import QuantkitError
from quantkit.evaluation import programs
from quantkit.evaluation.programs import eval_code, pass_at_k
from quantkit.evaluation.sandbox import Sandbox
from quantkit.inference.batches import BatchWriter
from tests.command_line import call, refused
from tests.evaluation.folders import written

HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def double(x):\n    """Return twice x."""\n',
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate('a') == 'aa'\n",
    "entry_point": "double",
    "canonical_solution": "    return x + x\n",
}
MBPP = {
    "task_id": 367,
    "text": "Write a function to count the nodes of a list.",
    "code": "class Node: pass",
    "test_list": ["assert count(first) == 1", "assert count(None) == 0"],
    "test_setup_code": "first = Node(None)",
}
SANITIZED = {"prompt": "Write a function.", "test_list": ["assert root(4) == 2"], "test_imports": ["import math"]}
HUMANEVAL_X = {
    "task_id": "JavaScript/0",
    "prompt": "/* Return twice x. */\nconst double = (x) => {\n",
    "declaration": "\nconst double = (x) => {\n",
    "canonical_solution": "  return x + x;\n}\n\n",
    "test": "const testDouble = () => {\n  console.assert(double('a') === 'aa')\n}\n\ntestDouble()\n",
    "example_test": "",
}
MULTIPL_E = {
    "name": "HumanEval_0_double",
    "language": "js",
    "prompt": "//Return twice x.\nfunction double(x){\n",
    "tests": "const assert = require('node:assert');\n\n\nfunction test() {\n  let candidate = double;\n"
    "  assert.deepEqual(candidate('a'),'aa');\n}\n\ntest();",
    "stop_tokens": ["\nfunction ", "\n/*", "\n//", "\nconsole.log"],
}
SOLUTION = (
    "class Node:\n    def __init__(self, next): self.next = next\ndef count(n): return 1 + count(n.next) if n else 0"
)


@pytest.fixture(scope="module", autouse=True)
def contained() -> None:
    try:
        Sandbox(20).require()
    except QuantkitError as error:
        pytest.skip(f"needs namespaces: {error.rule}")


def answers(monkeypatch: pytest.MonkeyPatch, *texts: str) -> list[BatchWriter]:
    """Let the model write these texts in turn, cut as a model's own are; return the writers that were asked."""
    turn, asked = iter(texts * 100), []

    def write(self: BatchWriter, prompts: Any) -> list[str]:
        asked.append(self)
        return [self._text(self.tokenizer(next(turn))["input_ids"], []) for _ in prompts]

    monkeypatch.setattr(BatchWriter, "write", write)
    return asked


@pytest.mark.parametrize(("samples", "passed", "k"), [(5, 2, 1), (5, 2, 3), (5, 5, 2), (5, 0, 5), (6, 1, 4)])
def test_pass_at_k_is_the_share_of_draws_with_a_program_that_passes(samples: int, passed: int, k: int) -> None:
    draws = list(combinations([True] * passed + [False] * (samples - passed), k))
    assert pass_at_k(np.array([[passed]]), samples, k).mean == pytest.approx(sum(map(any, draws)) / len(draws))


def test_the_mean_is_over_problems_and_the_deviation_over_seeds() -> None:
    found = pass_at_k(np.array([[4, 0, 2], [4, 2, 3]]), 4, 1)
    assert found.seeds == pytest.approx([0.5, 0.75])
    assert found.mean == pytest.approx(0.625) and found.std == pytest.approx(np.std([0.5, 0.75], ddof=1))
    assert found.low is not None and found.high is not None and found.low < found.mean < found.high
    assert pass_at_k(np.array([[1]]), 4, 1).std is None


@pytest.mark.parametrize(
    ("record", "completion", "mean"),
    [
        (HUMANEVAL, "\n    return x + x\n\ndef more(): assert 0\n", 1),
        (HUMANEVAL, "\n    return x * 2\nassert 0", 0),  # it is no stop, so the program has it
        (HUMANEVAL, "\n    return 4\n", 0),
        (HUMANEVAL, "\n    exit(0)\n", 0),
        (MBPP, SOLUTION + "\nassert count(1) == 2", 1),
        (MBPP, "def count(n): return 1", 0),
        (SANITIZED, "def root(x): return math.isqrt(x)\nprint(1/0)", 1),
        (MBPP | {"test_imports": None}, SOLUTION, 1),
    ],
)
def test_a_program_is_the_prompt_the_completion_and_the_tests(
    record: dict[str, Any], completion: str, mean: int, small_llama: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    answers(monkeypatch, completion)
    data = written(tmp_path / "data.jsonl", record)
    found = eval_code(small_llama, data=data, allow_code_execution=True, samples=1, max_new_tokens=8, timeout=20)
    assert (found.scores[0].mean, found.problems, found.timed_out) == (mean, 1, 0)


@pytest.mark.skipif(which("node") is None, reason="needs node")
@pytest.mark.parametrize(
    ("record", "completion", "mean"),
    [
        (HUMANEVAL_X, "\n  return x + x\n}\n\nHere it is.", 1),  # text after the last brace is left out
        (HUMANEVAL_X, "\n  return x + x\n}\nconst more = () => {", 1),
        (HUMANEVAL_X, "\n  return x + x", 0),
        (HUMANEVAL_X, "\n  return 2 * x\n}\n", 0),
        (HUMANEVAL_X | {"entry_point": "double"}, "\n  return x + x\n}\n", 1),  # as HumanEvalPack has them
        (MULTIPL_E, "\n  return x + x;\n}\n\nfunction more() { throw 1", 1),
        (MULTIPL_E, "\n  return 2 * x;\n}\n", 0),
    ],
)
def test_a_program_in_javascript_runs_by_node(
    record: dict[str, Any], completion: str, mean: int, small_llama: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    asked = answers(monkeypatch, completion)
    data = written(tmp_path / "data.jsonl", record)
    found = eval_code(small_llama, data=data, allow_code_execution=True, samples=1, max_new_tokens=8, timeout=20)
    assert (found.scores[0].mean, found.problems, found.timed_out) == (mean, 1, 0)
    assert asked[0].stops == tuple(record.get("stop_tokens", programs.JAVASCRIPT_STOPS))


def test_javascript_without_node_is_refused_before_any_weight_is_read(
    small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.evaluation.opened.load_for_evaluation", lambda *_, **__: pytest.fail("read"))
    monkeypatch.setenv("PATH", str(tmp_path))
    data = written(tmp_path / "data.jsonl", HUMANEVAL_X)
    with pytest.raises(QuantkitError, match="problems are in JavaScript, and node is not installed: install Node"):
        eval_code(small_llama, data=data, allow_code_execution=True, max_new_tokens=8)


def test_samples_and_seeds_are_counted_where_they_belong(
    small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = "\n    return x + x\n", "\n    return 0\n"
    asked = answers(monkeypatch, right, wrong, wrong, wrong, right, right, wrong, wrong)
    data = written(tmp_path / "data.jsonl", HUMANEVAL, HUMANEVAL, {**HUMANEVAL, "test": ""})
    found = eval_code(
        small_llama,
        **{"data": data, "limit": 2, "samples": 2, "seeds": (3, 5), "k": (1, 2), "batch_size": 3, "timeout": 20},
        allow_code_execution=True,
        max_new_tokens=8,
    )
    one, two = found.scores
    assert (one.seeds, two.seeds) == ([0.25, 0.5], [0.5, 0.5])
    assert (found.problems, found.samples, found.seeds) == (2, 2, [3, 5])
    assert len({each.sampling.seed for each in asked}) == 4  # each batch of each seed draws anew


def test_equal_seeds_write_equal_programs_and_the_rest_of_a_killed_run_is_the_same(
    small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(programs, "_verdicts", lambda texts, *_: seen.append(texts) or ["passed"] * len(texts))
    data, own = written(tmp_path / "data.jsonl", HUMANEVAL), BatchWriter.write
    options: dict[str, Any] = {"data": data, "allow_code_execution": True, "samples": 6, "batch_size": 2}
    options |= {"max_new_tokens": 6, "temperature": 1.0, "device": "cpu"}
    eval_code(small_llama, **options)
    eval_code(small_llama, **options, seeds=[1])
    assert len(set(seen[0])) > 3 and seen[0] != seen[1]
    batches = iter(range(10))

    def killed(self: BatchWriter, prompts: Any) -> list[str]:
        if next(batches) == 2:
            raise KeyboardInterrupt
        return own(self, prompts)

    monkeypatch.setattr(BatchWriter, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        eval_code(small_llama, **options, journal=tmp_path / "kept")
    torch.manual_seed(5)
    eval_code(small_llama, **options, journal=tmp_path / "kept")
    assert seen[2] == seen[0] and next(batches) == 4


@pytest.mark.parametrize(
    ("record", "options", "says"),
    [
        ({"prompt": "x"}, "--allow-code-execution", "needs the keys prompt, test, entry_point or text, test_list or"),
        ({**MBPP, "test_list": "assert"}, "--allow-code-execution", "test_list is no list, or empty"),
        ({**HUMANEVAL_X, "task_id": "CPP/0"}, "--allow-code-execution", "is a problem in CPP: use those in JavaScript"),
        (
            {**MULTIPL_E, "language": "rb"},
            "--allow-code-execution",
            "is a problem in rb: use those in JavaScript, or Hum",
        ),
        ({**MULTIPL_E, "stop_tokens": "\n//"}, "--allow-code-execution", "stop_tokens is no list, or empty"),
        ({**SANITIZED, "test_imports": "import math"}, "--allow-code-execution", "line 1: test_imports is no list"),
        ({**MBPP, "text": "rain " * 600}, "--allow-code-execution --max-new-tokens 8", "positions: take it out"),
        (HUMANEVAL, "--allow-code-execution --temperature -1", "temperature is -1"),
        (HUMANEVAL, "--allow-code-execution --top-p 2", "top_p 2.0 is not in (0, 1]"),
        (HUMANEVAL, "--allow-code-execution --seeds 1,-1", "seed is -1"),
        (HUMANEVAL, "--allow-code-execution --seeds 1,0,1", "a seed is given twice in [1, 0, 1]: give each once"),
        (HUMANEVAL, "--allow-code-execution --k 0", "there is no pass@k of [0]: use --k of 1 or more"),
        (HUMANEVAL, "--allow-code-execution --k 1,20", "10 samples give no pass@20: use --samples 20 or more"),
    ],
)
def test_bad_input_is_one_line_before_any_weight_is_read(
    record: dict[str, Any], options: str, says: str, small_llama: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("quantkit.evaluation.opened.load_for_evaluation", lambda *_, **__: pytest.fail("read"))
    monkeypatch.setattr(Sandbox, "run", lambda *_: pytest.fail("run"))
    data = written(tmp_path / "data.jsonl", record)
    assert says in refused("eval", "code", small_llama, "--data", data, *options.split(), code=None)


@pytest.mark.parametrize("records", [(HUMANEVAL, MBPP), (HUMANEVAL_X, MULTIPL_E)])
def test_records_of_two_data_sets_are_refused(records: Any, small_llama: Path, tmp_path: Path) -> None:
    data = written(tmp_path / "data.jsonl", *records)
    with pytest.raises(QuantkitError, match="line 2: is of another data set than the first record"):
        eval_code(small_llama, data=data, allow_code_execution=True)


def test_the_table_and_the_json_say_the_same(small_llama: Path, tmp_path: Path, monkeypatch: Any) -> None:
    answers(monkeypatch, "\n    return x + x\n", "\n    return 0\n")
    words = ("eval", "code", small_llama, "--data", written(tmp_path / "data.jsonl", HUMANEVAL), "--samples", 2)
    words += ("--allow-code-execution", "--seeds", "0,1", "--max-new-tokens", 8, "--timeout", 20)
    found, text = json.loads(call(*words, "--json").stdout), call(*words).stdout
    assert (found["scores"][0]["k"], found["scores"][0]["mean"], found["scores"][0]["std"]) == (1, 0.5, 0.0)
    assert "pass@1  50.00" in text and "2 samples each, seeds 0, 1, temperature 0.2" in text
    fields = {"problems", "samples", "seeds", "temperature", "top_p", "max_new_tokens", "batch_size", "timeout"}
    assert found.keys() == fields | {"scores", "namespaces", "timed_out", "data", "weights"}
    assert found["scores"][0].keys() == {"k", "mean", "std", "low", "high", "seeds"}
