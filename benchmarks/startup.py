"""Time how long the command line takes to answer, beside `import torch`: benchmarks/cpu/startup.json.

    python benchmarks/startup.py -o benchmarks/cpu/startup.json

Rounds alternate between all command lines and `import torch`, so that another load of the machine meets all of them.
Each figure is a median.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from quantkit import names
from quantkit.cli.commands import PLACES
from quantkit.io.files import write_atomic

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "quantkit" / "demo_model"
RUN = [sys.executable, "-m", "quantkit"]
TORCH = "import torch"
#: What is promised to take at most a quarter of `import torch`: help, versions, completion, wrong usage.
QUICK = {
    "--help": ["--help"],
    "--version": ["--version"],
    **{f"{name} --help": [name, "--help"] for name in PLACES},
    "wrong command": ["quantise"],
    "wrong option": ["quantize", "model", "--layot", names.LAYOUTS[0]],
    "missing option": ["quantize", "model"],
}
COMPLETED = {"COMP_WORDS": "quantkit quantize --layout mar", "COMP_CWORD": "3", "_QUANTKIT_COMPLETE": "bash_complete"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = timings(args.rounds, Path(folder))
    torch = median(seconds[TORCH])
    found = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("click", "torch", "transformers")},
        "rounds": args.rounds,
        "import_torch_seconds": round(torch, 3),
        "quick": {name: row(seconds[name], torch) for name in (*QUICK, "completion", "import quantkit")},
        "others": {name: row(seconds[name], torch) for name in ("inspect", "plan")},
    }
    write_atomic(args.out, (json.dumps(found, indent=1) + "\n").encode())


def timings(rounds: int, folder: Path) -> dict[str, list[float]]:
    """Time each command line `rounds` times, in seconds, after one round that is not counted."""
    lines: dict[str, tuple[list[str], dict[str, str]]] = {name: ([*RUN, *args], {}) for name, args in QUICK.items()}
    lines["completion"] = (RUN, COMPLETED)
    lines["import quantkit"] = ([sys.executable, "-c", "import quantkit"], {})
    lines["inspect"] = ([*RUN, "inspect", str(MODEL)], {})
    lines["plan"] = ([*RUN, "plan", str(MODEL), "-o", str(folder / "out")], {})
    lines[TORCH] = ([sys.executable, "-c", TORCH], {})
    found: dict[str, list[float]] = {name: [] for name in lines}
    for count in range(rounds + 1):
        for name, (line, more) in lines.items():
            start = time.perf_counter()
            subprocess.run(line, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT), **more})
            if count:
                found[name].append(time.perf_counter() - start)
        print(f"round {count} of {rounds}", file=sys.stderr)
    return found


def row(seconds: list[float], torch: float) -> dict[str, Any]:
    return {"seconds": round(median(seconds), 3), "of_import_torch": round(median(seconds) / torch, 3)}


if __name__ == "__main__":
    main()
