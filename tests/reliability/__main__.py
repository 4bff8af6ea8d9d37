"""Run the campaign: python -m tests.reliability [--column pr|nightly|release] [--only K1,H1] -o reliability.json.

Each family has a process of its own. The exit code is 1 if a case failed, or a family ran fewer cases than it must.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.reliability.campaign import COLUMNS, MODULES, Family, Run, alone, entry, families, problems

MEMORY = Path("/dev/shm")
#: Each family is a fork of a server that has run its commands once, which would take it some eight seconds.
PROCESSES = multiprocessing.get_context("forkserver")
PRELOADED = [*(f"tests.reliability.{name}" for name in MODULES), "tests.reliability.warmed"]
THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
#: Seconds after which a family is stopped.
LIMIT = {"pr": 900, "nightly": 4 * 3600, "release": 24 * 3600}


def scratch() -> str | None:
    """Return a folder in memory if it is large enough: there fsync is free."""
    large = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= 2**31
    return str(MEMORY) if large else None


def versions() -> dict[str, str]:
    """Return what decides the result beside the code."""
    names = ("quantkit", "torch", "transformers", "safetensors", "hypothesis")
    commit = os.environ.get("COMMIT")  # where no repository is
    if commit is None:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = found.stdout.strip() or "unknown"
    return {
        "date": f"{date.today()}",
        "commit": commit,
        "python": platform.python_version(),
        **{name: version(name) for name in names},
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
    }


def attempt(family: Family, column: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run a family in a process of its own, so that a crash or a hang ends this family alone."""
    result = folder / f"{family.id}.json"
    said_in = result.with_suffix(".txt")
    said_in.touch()
    process = PROCESSES.Process(target=alone, args=(family.id, column, seed, folder, result, said_in))
    process.start()
    process.join(LIMIT[column])
    if process.is_alive():
        process.kill()
        process.join()
        said = f"did not end within {LIMIT[column]} seconds"
    else:
        said = f"exit {process.exitcode}: {said_in.read_text(errors='replace')[-2000:]}"
    if result.exists():
        found: dict[str, Any] = json.loads(result.read_text())
        return found
    broken = Run(column, family.least(column), seed, folder, folder)
    broken.fail(family.id, said)
    return entry(family, broken, 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description="Attack quantkit, and count.")
    parser.add_argument("--column", choices=COLUMNS, default="pr", help="how many cases [pr]")
    parser.add_argument("--only", help="comma-separated families [all]")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers [0]")
    parser.add_argument("--jobs", type=int, default=2, help="families at a time [2]")
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        required=True,
        help="JSON file with one entry a family; with --only, it keeps the others, which state their own versions",
    )
    arguments = parser.parse_args()
    known, column, seed = families(), arguments.column, arguments.seed
    chosen = arguments.only.split(",") if arguments.only else [name for name in known if known[name].least(column)]
    if unknown := set(chosen) - {*known}:
        parser.error(f"no such family: {', '.join(sorted(unknown))}")
    result: dict[str, Any] = {"column": column, "seed": seed, "families": {}}
    if arguments.only and arguments.out.exists():
        before = json.loads(arguments.out.read_text())
        if all(before[key] == result[key] for key in ("column", "seed")):
            result["families"] = before["families"]
    here = versions()
    # As the command line sets them before its imports, which the forks here have done already.
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    os.environ |= {name: os.environ.get(name, word) for name, word in THREADS.items()}
    PROCESSES.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(dir=scratch()) as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        running = {pool.submit(attempt, known[name], column, seed, Path(folder)): name for name in chosen}
        for done in as_completed(running):
            name = running[done]
            result["families"][name] = found = {**done.result(), "versions": here}
            print(
                f"{name:3} {found['cases']:>8} cases, {found['failures']} failures, {found['seconds']:7.1f} s  "
                f"{found['title']}",
                flush=True,
            )
            result["families"] = dict(sorted(result["families"].items()))
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    failed = problems(result)
    print("\n".join(failed) or f"{sum(e['cases'] for e in result['families'].values())} cases, 0 failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
