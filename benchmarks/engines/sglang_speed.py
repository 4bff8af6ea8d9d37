"""Measure SGLang's decoding speed on folders, one after the other.

    python sglang_speed.py -o speeds.jsonl FOLDER[@KEY=VALUE...]...

Folders come from `serving.py make`. A step is (seconds with 129 new tokens - seconds with 1) / 128, each the median of
three runs, prompts of 32 tokens, float16: scheduler and sampler are included. Options are those of `sglang_check.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_check import MARK, add_arguments, leave, parse, run_all, start

LENGTH, NEW, RUNS = 32, 128, 3


def measure(spec: str, batches: list[int]) -> Iterator[dict[str, Any]]:
    """Start the engine on a folder, and yield a row for each batch size."""
    folder, options = parse(spec)
    begun = time.perf_counter()
    engine = start(
        folder, options, cuda_graph_bs_decode=batches, disable_prefill_cuda_graph=True, chunked_prefill_size=8192
    )
    load = round(time.perf_counter() - begun, 1)
    vocabulary = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    draws = random.Random(1)

    def seconds(prompts: list[list[int]], new: int) -> float:
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        begun = time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=sampling)
        took = time.perf_counter() - begun
        assert all(len(answer["output_ids"]) == new for answer in answers)
        return took

    for batch in batches:
        prompts = [[draws.randrange(10, vocabulary) for _ in range(LENGTH)] for _ in range(batch)]
        seconds(prompts, 8)
        short = statistics.median(seconds(prompts, 1) for _ in range(RUNS))
        step = (statistics.median(seconds(prompts, 1 + NEW) for _ in range(RUNS)) - short) / NEW
        yield {
            "batch": batch,
            "step_ms": round(1e3 * step, 3),
            "tokens_per_s": round(batch / step, 1),
            "prompt_ms": round(1e3 * short, 2),
            "load_s": load,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    add_arguments(parser)
    args = parser.parse_args()
    if args.child:
        for row in measure(args.folders[0], args.batch):
            print(MARK + json.dumps(row), flush=True)
        leave()
    rest = ["-o", str(args.out), "--child", "--batch", *map(str, args.batch), "--"]
    commands = [(spec, [__file__, *rest, spec]) for spec in args.folders]
    sys.exit(0 if run_all(args, commands, 1, 1) else 1)


if __name__ == "__main__":
    main()
