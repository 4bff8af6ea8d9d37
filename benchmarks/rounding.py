"""Time rounding to nearest of a model with random weights, beside `cp` of the bytes that it reads and writes.

    python -m benchmarks.rounding /tmp/rounding --model llama3-8b --blocks 16 --cores 2 16 --formats int4 fp6

The source is written once, and every run finds it in the page cache. `cp` copies the source and, as many bytes as the
output has, the output. One row of JSON for each run: seconds, bytes read and written, their GB/s beside those of `cp`,
CPU seconds, and the peak of memory beside that of the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.random_model import read
from benchmarks.random_source import shortened, write_model

COMMAND = [sys.executable, "-m", "quantkit"]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def copied(source: Path, into: Path) -> float:
    """Return the seconds of copying a folder durably."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, into], check=True)
    subprocess.run(["sync", *sorted(into.iterdir())], check=True)
    return time.perf_counter() - start


def measure(source: Path, work: Path, cores: int, arguments: list[str]) -> dict[str, Any]:
    """Round a folder on some cores in a process of its own."""
    out, copy = work / "out", work / "copy"
    for folder in (out, copy):
        shutil.rmtree(folder, ignore_errors=True)
    options = ["--method", "rtn", *arguments]
    planned = subprocess.run([*COMMAND, "plan", source, *options, "--json"], capture_output=True, check=True)
    usable = set(sorted(os.sched_getaffinity(0))[:cores])
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [*COMMAND, "quantize", source, "-o", out, "-q", *options],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": str(len(usable))},
        preexec_fn=lambda: os.sched_setaffinity(0, usable),
    )
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    report = json.loads((out / "quantkit_report.json").read_text())
    reference = copied(source, copy)
    shutil.rmtree(copy)
    reference += copied(out, copy)
    handled = size(source) + size(out)
    needs = json.loads(planned.stdout)
    return {
        "arguments": " ".join(arguments),
        "cores": len(usable),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "source_gb_per_s": round(size(source) / seconds / 1e9, 3),
        "of_cp": round(reference / seconds, 3),
        "cp_gb_per_s": round(handled / reference / 1e9, 3),
        "planned_seconds": needs.get("duration"),
        "peak_gb": round(report["totals"]["peak_memory"]["ram"] / 1e9, 2),
        "planned_gb": round(needs["peak_memory"]["ram"] / 1e9, 2),
        "peak_gpu_gb": round(report["totals"]["peak_memory"].get("vram", 0) / 1e9, 2),
        "planned_gpu_gb": round(needs["peak_memory"].get("vram", 0) / 1e9, 2),
        "phases": {name: round(value, 2) for name, value in report["phases"].items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for source and outputs")
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--cores", type=int, nargs="+", default=[2])
    parser.add_argument("--formats", nargs="+", default=["int4"])
    parser.add_argument("--set", nargs="*", default=[], help="recipe keys of one more run of each, like clip=none")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    source = args.work / "source"
    if not source.exists():
        args.work.mkdir(parents=True, exist_ok=True)
        source.mkdir()
        start = time.perf_counter()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        write_model(source, shortened(read(args.model), args.blocks), device)
        print(json.dumps({"made_gb": size(source) / 1e9, "seconds": time.perf_counter() - start}), flush=True)
    for cores in args.cores:
        for name in args.formats:
            for keys in [[], *([["--set", key] for key in args.set])]:
                options = ["--format", name, "--device", args.device, *keys]
                print(json.dumps(measure(source, args.work, cores, options)), flush=True)


if __name__ == "__main__":
    main()
