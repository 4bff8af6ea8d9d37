"""Run the study of docs/study.md: `quantkit compare` on SmolLM2-135M-Instruct and the 29 M Llama, several at a time.

INT4, FP5 and FP6, by rounding and GPTQ, one scale a row and groups, calibrated on three texts. Each model is judged on
four texts. SmolLM2, calibrated on WikiText-2, also answers ten tasks, for which the Llama is too small; and
`python -m benchmarks.study.programs` asks it for programs.
Texts are those of `real.py`, questions those of `task_data.py`. Calibration is windows of 1024 tokens cut anywhere
(`lengths: fixed`).

Processes share the rows of a folder in OUT, and the same command continues after --seconds. OUT/MODEL.csv has the rows
that are finished; put it into benchmarks/gpu as study_MODEL.csv, and `make docs` renders it. To continue on another
machine, put OUT/*/rows there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from quantkit.reporting.recipe_table import Row, as_csv, read_csv

#: Model -> size of groups that divides its widths, and whether it answers tasks.
MODELS = {"smollm2": (64, True), "llama-29m": (128, False)}
FORMATS, METHODS, WINDOW = ("int4", "fp5", "fp6"), ("rtn", "gptq"), 1024
#: WikiText-2, whose rows answer questions, and other texts: each is a call.
CALLS = ("wikitext2", "others")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", required=True, metavar="NAME=FOLDER", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--texts", type=Path, required=True, help="folder that real_texts.py made")
    parser.add_argument("--data", type=Path, required=True, help="folder of WikiText-2 and PTB")
    parser.add_argument("--tasks", type=Path, help="folder that task_data.py made [no tasks]")
    parser.add_argument("--names", default="zeroshot", help="tasks; those with F1 need scikit-learn [zeroshot]")
    parser.add_argument("--limit", type=int, default=500, help="questions of each task [500]")
    parser.add_argument("--windows", type=int, default=64, help="windows of 1024 tokens of each text [64]")
    parser.add_argument("--samples", type=int, default=128, help="calibration sequences [128]")
    parser.add_argument("--seeds", default="0", help="seeds of calibration, like 0,1,2 [0]")
    parser.add_argument("--batch-size", type=int, default=32, help="questions at a time [32]")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--processes", type=int, default=1, help="processes that share the rows [1]")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then; the same command continues")
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    models = dict(each.partition("=")[::2] for each in args.model)
    if unknown := models.keys() - MODELS:
        parser.error(f"unknown model {min(unknown)}: use {', '.join(MODELS)}")
    lines = [line for name, model in models.items() for line in calls(args, name, model)]
    finished = run(lines, args.processes, time.monotonic() + args.seconds, args.out)
    for name in models:
        rows = merged([args.out / f"{name}-{call}" / "compare.csv" for call in CALLS])
        (args.out / f"{name}.csv").write_text(as_csv(rows), encoding="utf-8")
        print(f"{name}: {len(rows)} rows", flush=True)
    sys.exit(0 if finished else 75)


def calls(args: argparse.Namespace, name: str, model: str) -> Iterator[list[str]]:
    """Yield the commands of a model: one for WikiText-2, one for the other texts."""
    group, answers = MODELS[name]
    chats = args.texts / "chat_calib.jsonl" if answers else plain_chats(args.texts / "chat_calib.jsonl", args.out)
    sources = {
        "wikitext2": f"wikitext2={args.data}/wikitext2/train.txt",
        "others": f"c4={args.texts}/c4_calib.txt,chat={chats}",
    }
    texts = {"wikitext2": args.data / "wikitext2/test.txt", "ptb": args.data / "ptb/test.txt"}
    texts |= {"c4": args.texts / "c4_eval.txt", "chat": args.texts / f"chat_eval{'' if answers else '_plain'}.txt"}
    for call in CALLS:
        asked = call == "wikitext2"
        methods = METHODS if asked else METHODS[1:]
        recipes = [f"{form}:{size}:{by}" for form in FORMATS for size in ("channel", f"g{group}") for by in methods]
        line = [sys.executable, "-m", "quantkit", "compare", model, "-o", str(args.out / f"{name}-{call}")]
        line += ["--recipes", ",".join(recipes), "--calib", sources[call], "--seeds", args.seeds]
        line += ["--samples", str(args.samples), "--max-length", str(WINDOW), "--set", "calibration.lengths=fixed"]
        line += ["--text", ",".join(f"{text}={path}" for text, path in texts.items())]
        # The window of the Llama, whose context is 1024 tokens, has room for BOS.
        line += ["--window", str(WINDOW if answers else WINDOW - 1), "--tokens", str(args.windows * WINDOW)]
        line += ["--device", args.device]
        if answers and asked and args.tasks is not None:
            line += ["--tasks", args.names, "--data", str(args.tasks), "--limit", str(args.limit)]
            line += ["--batch-size", str(args.batch_size)]
        yield line


def run(lines: list[list[str]], processes: int, end: float, out: Path) -> bool:
    """Run the commands one after the other in several processes; say whether all ended well before `end`."""

    def work(number: int) -> bool:
        # Threads of many processes would wait for each other.
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}
        with (out / f"log-{number}.txt").open("a") as log:
            for line in lines:
                share_unquantized(Path(line[line.index("-o") + 1]))
                running = subprocess.Popen(line, stdout=log, stderr=log, env={**os.environ, **threads})
                try:
                    if running.wait(max(0.0, end - time.monotonic())) != 0:
                        return False
                except subprocess.TimeoutExpired:
                    running.send_signal(signal.SIGTERM)
                    with suppress(subprocess.TimeoutExpired):
                        running.wait(20)
                    running.kill()  # the disk holds a resumable state at any moment
                    return False
        return True

    with ThreadPoolExecutor(processes) as pool:
        return all(list(pool.map(work, range(processes))))


def share_unquantized(out: Path) -> None:
    """Copy the row of the unquantized model from the other call of the same model."""
    for path in out.parent.glob(f"{out.name.rpartition('-')[0]}-*/rows/unquantized-*.jsonl"):
        (out / "rows").mkdir(parents=True, exist_ok=True)
        if not (out / "rows" / path.name).exists():
            shutil.copy(path, out / "rows" / path.name)


def merged(paths: list[Path]) -> list[Row]:
    """Join the rows of tables, of equal ones the first."""
    found: dict[tuple[object, ...], Row] = {}
    for row in (row for path in paths if path.exists() for row in read_csv(path)):
        found.setdefault((row["recipe"], row["calibration"], row.get("seed")), row)
    return list(found.values())


def plain_chats(path: Path, out: Path) -> Path:
    """Write conversations as plain text, for a model without a chat template."""
    made = out / "chat_calib_plain.jsonl"
    talks = [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]
    texts = ["".join(f"{turn['role'].capitalize()}: {turn['content']}\n\n" for turn in talk) for talk in talks]
    made.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return made


if __name__ == "__main__":
    main()
