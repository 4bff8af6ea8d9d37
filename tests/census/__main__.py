"""Run the census: python -m tests.census [--families a,b] [--method rtn|gptq|both] [--vllm SCRIPT] -o census.json."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.census import families
from tests.census.engine import opened
from tests.census.run import METHODS, TOLERANCE, examine


def versions() -> dict[str, str]:
    """Return today's date and the versions that decide what a census finds."""
    names = ("quantkit", "transformers", "torch", "compressed_tensors")
    return {"date": f"{date.today()}", **{name: version(name.replace("_", "-")) for name in names}}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.census", description="Quantize a tiny model of each family.")
    parser.add_argument("--families", help="comma-separated model types [all]")
    parser.add_argument("--method", choices=(*METHODS, "both"), default="both")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time [1]")
    parser.add_argument("-o", "--out", type=Path, required=True, help="JSON file with one row a family")
    parser.add_argument("--vllm", type=Path, help="script that checks folders by vLLM's loader (tests.census.engine)")
    arguments = parser.parse_args()
    chosen = arguments.families.split(",") if arguments.families else families.families()
    if unknown := set(chosen) - {*families.families()}:
        parser.error(f"no family of the installed transformers: {', '.join(sorted(unknown))}")
    methods = METHODS if arguments.method == "both" else (arguments.method,)
    census: dict[str, Any] = {"versions": versions(), "tolerance": TOLERANCE, "families": []}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        keep = Path(folder) if arguments.vllm else None
        for row in pool.map(lambda family: examine(family, methods, keep=keep), chosen):
            census["families"].append(row)
            arguments.out.write_text(json.dumps(census, indent=1) + "\n")
            print(f"{len(census['families'])}/{len(chosen)} {row['family']}", file=sys.stderr)
        if arguments.vllm:
            verdicts = opened(arguments.vllm, sorted(Path(folder).iterdir()))
            for row in census["families"]:
                row["vllm"] = verdicts.get(row["family"])
    arguments.out.write_text(json.dumps(census, indent=1) + "\n")


if __name__ == "__main__":
    main()
