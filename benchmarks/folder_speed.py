"""Time the steps of folders that `quantkit.load` opens, by CUDA graphs: prompts of 32 tokens, 128 new ones each.

    python -m benchmarks.serving make h4 compressed-tensors int4:g128 --head int4:g64
    python -m benchmarks.folder_speed h4 --csv load.csv

The calls are those of `bench_generate`, over a static cache, with small operations fused by torch.compile. Compare rows
of one run on one card only.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

import quantkit
from benchmarks.bench_generate import graph_of, per_call
from benchmarks.decode_graphs import decode_calls, fused, likeliest
from quantkit.inference.swap_linears import describe_weights


def measure(folder: Path, batch: int, prompt: int, new: int) -> dict[str, Any]:
    """Load a folder, and time a step of `batch` sequences."""
    before = torch.cuda.memory_allocated()
    model = quantkit.load(folder, device="cuda", check=False)
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated() - before
    random = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (batch, prompt), device="cuda", generator=random)
    kinds = model._no_split_modules or ()
    blocks = [name for name, module in model.named_modules() if type(module).__name__ in kinds]
    with torch.inference_mode(), fused(model, blocks):
        calls = decode_calls(model, ids, new, torch.compile(likeliest))
        calls.rewind(0)
        calls.prompt()  # fills the cache
        rewind = partial(calls.rewind, prompt)
        step = per_call(graph_of(calls.step, rewind), rewind, new)
    return {
        "folder": folder.name,
        "batch": batch,
        "step_ms": round(1e3 * step, 4),
        "tokens_per_s": round(batch / step, 1),
        "weight_bytes": held,
        "weights": describe_weights(model),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--csv", type=Path, help="file to append to")
    args = parser.parse_args()
    for folder in args.folders:
        for batch in args.batch:
            row = measure(folder, batch, args.prompt_tokens, args.new_tokens)
            print(json.dumps(row), flush=True)
            if args.csv:
                new = not args.csv.exists()
                with args.csv.open("a", newline="") as file:
                    writer = csv.DictWriter(file, row)
                    if new:
                        writer.writeheader()
                    writer.writerow(row)
            gc.collect()
            torch.cuda.empty_cache()
            torch._dynamo.reset()


if __name__ == "__main__":
    main()
