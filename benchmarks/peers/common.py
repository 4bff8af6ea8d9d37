"""Arguments, tokens and the record of a run, shared by the scripts of this folder. Needs no quantkit."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

Tokens = list[list[int]]


def run(
    package: str,
    description: str,
    methods: Sequence[str],
    quantize: Callable[[Path, Tokens, Path, str, int], Any],
) -> None:
    """Quantize by `quantize(model, tokens, out, method, group_size)` as the command line asks; write `out/peer.json`.

    The seconds include loading the model and writing the folder, but not the imports nor the start of CUDA. On a
    machine that others use, `cpu_seconds` (of all threads) is the fairer measure of a run on a CPU.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path, help="folder of the dense model")
    parser.add_argument("tokens", type=Path, help="calibration tokens, from write_tokens.py")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--method", choices=methods, default=methods[0])
    parser.add_argument("--group-size", type=int, default=128)
    args = parser.parse_args()
    tokens: Tokens = json.loads(args.tokens.read_text())
    torch.manual_seed(0)
    finish_gpu_work()
    started, used = time.perf_counter(), time.process_time()
    quantize(args.model, tokens, args.out, args.method, args.group_size)
    finish_gpu_work()
    record = {
        "name": f"{package} {args.method}",
        "version": version(package),
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - used, 1),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
    }
    (args.out / "peer.json").write_text(json.dumps(record, indent=1) + "\n")
    print(record)


def finish_gpu_work() -> None:
    """Wait for the GPU, if there is one, so that a clock read next counts its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
