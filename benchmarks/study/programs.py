"""Let a model write the programs of HumanEval or MBPP, and count those that pass the tests of their problems.

    pip install --no-deps evalplus
    python -m benchmarks.study.programs ./model-int4 --data tasks/humaneval.jsonl -o int4.jsonl

An instruct model is asked through its chat template. Of its answer counts the fence that defines a function of the
tests, without asserts and examples, which are no part of the solution. A model without a template, or with
--completion, continues the prompt: so the figures of SmolLM2 in docs/study.md were taken, and it gives an instruct
model much less than it can do. `--recipe` judges MODEL as `quantkit compare` does: decoded to float32 after
a recipe, also one whose scheme no layout stores. Answers and verdicts are kept in OUT, and the same command continues.
A machine without evalplus only writes the answers. Intervals are by bootstrap over problems. Without a GPU give --limit
and --max-new-tokens: three answers of 64 tokens by SmolLM2-135M took three minutes on two busy cores.

Programs run in the processes of evalplus, in a namespace without a network. That protects from what a program sends or
fetches, and evalplus from accidents: it limits time and memory, and takes away functions that delete files or start
processes. It is no sandbox. A program that means to do harm reads and deletes your files: use a machine or container
that holds nothing of yours.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.study.writing import records, write

FENCE = re.compile(r"```(?:\w+)?\n(.*?)(?:```|\Z)", re.DOTALL)
FUNCTION = re.compile(r"^def (\w+)", re.MULTILINE)
DEFINITIONS = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | ast.Try
#: What ends a completion: the next statement at the margin (Chen et al. 2021, section 2.2); and a solution of MBPP.
STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
SOLUTION_STOPS = ("\nclass", "\nassert", '\n"""', "\nif", "\nprint", "\n```")
ASK = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
ISOLATED = ("unshare", "--map-root-user", "--net")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, dense or quantized")
    parser.add_argument(
        "--data", type=Path, required=True, help="problems: humaneval.jsonl or mbpp.jsonl of task_data.py"
    )
    parser.add_argument("--recipe", help="name or scheme, like fp6:g64:gptq, by which MODEL is quantized first")
    parser.add_argument("--calib", default="packaged", help="calibration text of --recipe [packaged]")
    parser.add_argument("--samples", type=int, default=256, help="calibration sequences of --recipe [256]")
    parser.add_argument("--max-length", type=int, default=4096, help="their longest length in tokens [4096]")
    parser.add_argument("--completion", action="store_true", help="continue the prompt, without the chat template")
    parser.add_argument("--limit", type=int, help="first N problems [all]")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds a program [10]")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--against", type=Path, help="judged answers, as of the unquantized model, to compare with")
    parser.add_argument("-o", "--out", type=Path, required=True, help="file of answers; finished ones in it stay")
    args = parser.parse_args()
    rows = records(args.data, args.limit)
    answers = records(args.out, None) if args.out.exists() else []
    if len(answers) < len(rows):
        with tempfile.TemporaryDirectory() as folder:
            model, words = opened(args, Path(folder))
            answer(args, model, words, rows, len(answers))
    answers = records(args.out, len(rows))
    programs = [program(row, each["answer"], each["chat"]) for row, each in zip(rows, answers, strict=True)]
    passed = judged(programs, args.timeout)
    lines = [{**each, "passed": passes} for each, passes in zip(answers, passed, strict=True)]
    lines += records(args.out, None)[len(rows) :]
    args.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(f"pass@1 {percent(passed)}: {sum(passed)} of {len(rows)} programs")
    if args.against is not None:
        others = [each["passed"] for each in records(args.against, len(rows))]
        differences = [mine - other for mine, other in zip(passed, others, strict=True)]
        print(f"against {args.against.stem} {percent(differences)}")


def percent(scores: list[bool] | list[int]) -> str:
    """Format the mean of scores of problems in percent, with its 95 % interval by bootstrap over the problems."""
    from quantkit.evaluation.divergence import interval

    found = interval(np.array(scores, dtype=np.float64))
    ends = "" if found is None else " ({:.2f} to {:.2f})".format(*(100 * end for end in found))
    return f"{100 * sum(scores) / len(scores):.2f} %{ends}"


def opened(args: argparse.Namespace, folder: Path) -> tuple[Any, Any]:
    """Load the model, after --recipe decoded to float32, and its tokenizer."""
    from transformers import AutoTokenizer

    import quantkit
    from quantkit.pipeline.quantize import quantize
    from quantkit.recipes.files import load_named_or_scheme, merge
    from quantkit.recipes.options import RunOptions
    from quantkit.recipes.recipe import from_mapping

    words = AutoTokenizer.from_pretrained(args.model)
    if args.recipe is None:
        return quantkit.load(args.model, device=args.device), words
    text = {"data": args.calib, "samples": args.samples, "max_length": args.max_length, "lengths": "fixed"}
    mapping = merge(load_named_or_scheme(args.recipe), {"calibration": text})
    unpacked: Any = {"layout": None, "dense_dtype": "float32"}
    recipe = replace(from_mapping(mapping), **unpacked)
    quantize(args.model, folder / "model", recipe, RunOptions(device=args.device))
    return quantkit.load(folder / "model", device=args.device), words


def answer(args: argparse.Namespace, model: Any, words: Any, rows: list[dict[str, Any]], done: int) -> None:
    """Let the model write the programs that are not there yet, a batch after the other."""
    chats = words.chat_template is not None and not args.completion
    for start in range(done, len(rows), args.batch_size):
        part = rows[start : start + args.batch_size]
        prompts = [prompt(row) for row in part]
        asked, stops = prompts, () if chats else STOPS if "entry_point" in part[0] else SOLUTION_STOPS
        if chats:
            talks = [[{"role": "user", "content": ASK.format(text)}] for text in prompts]
            asked = [words.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) for talk in talks]
        sizes = {"new": args.max_new_tokens, "batch": args.batch_size}
        texts = write(model, words, asked, **sizes, stops=stops, special=not chats)
        with args.out.open("a", encoding="utf-8") as file:
            for text in texts:
                file.write(json.dumps({"answer": text, "chat": chats}) + "\n")
        print(f"{start + len(part)} of {len(rows)} answers", file=sys.stderr)


def prompt(row: dict[str, Any]) -> str:
    """What a model reads of a problem: of MBPP the text and the tests in a docstring."""
    if "entry_point" in row:
        return str(row["prompt"].strip())
    return '"""\n{}\n{}\n"""\n'.format(row.get("text", row.get("prompt")), "\n".join(row["test_list"]))


def program(row: dict[str, Any], text: str, chats: bool) -> str:
    """Put a program together: the solution, and a function `passes` that runs the tests of the problem."""
    solution = solution_of(text, json.dumps([row.get("entry_point"), row.get("test_list")])) if chats else text
    if "entry_point" in row:
        # A completion goes on in the function of the prompt. An answer defines it again, and may lack its imports.
        head, tests = row["prompt"].strip() + "\n" * chats, [row["test"], f"check({row['entry_point']})"]
        lines = [f"{head}{solution}"]
    else:
        lines = [*(row.get("test_imports") or []), solution, row.get("test_setup_code") or ""]
        tests = row["test_list"]
    indented = [f"    {line}" for test in tests for line in test.splitlines()]
    return "\n".join([*lines, "def passes():", *indented, "    return True", ""])


def solution_of(answer: str, tests: str) -> str:
    """Take the definitions out of the first fence that defines a function of the tests, or out of the longest fence."""
    fences, named = FENCE.findall(answer) or [answer], set(re.findall(r"\w+", tests))
    wanted = (fence for fence in fences if named.intersection(FUNCTION.findall(fence)))
    code: str = next(wanted, max(fences, key=len))
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return code
    tree.body = [each for each in tree.body if isinstance(each, DEFINITIONS)]
    return ast.unparse(tree)


def judged(programs: list[str], seconds: float) -> list[bool]:
    """Run programs in a process without a network, and say which ones pass."""
    line = [*ISOLATED, sys.executable, "-c", "from benchmarks.study.programs import judge; judge()"]
    asked = json.dumps({"programs": programs, "seconds": seconds})
    done = subprocess.run(line, input=asked, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the programs were not run: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    found: list[bool] = json.loads(done.stdout)
    return found


def judge() -> None:
    """Run the programs of the standard input by evalplus; each is a function that returns True in time."""
    from evalplus.eval import untrusted_check

    asked = json.load(sys.stdin)
    limits: Any = {"ref_time": [0.0], "min_time_limit": asked["seconds"]}
    call: Any = {"dataset": "", "inputs": [[]], "entry_point": "passes", "expected": [True], "atol": 0}
    print(json.dumps([untrusted_check(code=code, **call, **limits)[0] == "pass" for code in asked["programs"]]))


if __name__ == "__main__":
    main()
