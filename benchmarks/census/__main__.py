"""Run the census: python -m benchmarks.census [--families a,b] [--method rtn|gptq|both] [--vllm SCRIPT] -o census.json.

With `--only-vllm`, the file keeps its rows: outputs by RTN are made again, and vLLM's verdicts on them are renewed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.census import engine, families
from benchmarks.census.run import METHODS, TOLERANCE, examine


def versions() -> dict[str, str]:
    """Return today's date and the versions that decide what a census finds."""
    names = ("quantkit", "transformers", "torch", "compressed_tensors")
    return {"date": f"{date.today()}", **{name: version(name.replace("_", "-")).partition("+")[0] for name in names}}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.census", description="Quantize a tiny model of each family."
    )
    parser.add_argument("--families", help="comma-separated model types [all]")
    parser.add_argument("--method", choices=(*METHODS, "both"), default="both")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time [1]")
    parser.add_argument("-o", "--out", type=Path, required=True, help="JSON file with one row a family")
    parser.add_argument(
        "--vllm", type=Path, help="script that checks folders by vLLM's loader (benchmarks.census.engine)"
    )
    parser.add_argument("--keep", type=Path, help="folder in which models and outputs by RTN stay, for --vllm later")
    parser.add_argument("--resume", action="store_true", help="leave out the families that the file has")
    parser.add_argument("--only-vllm", action="store_true", help="ask vLLM again, for the rows that the file has")
    arguments = parser.parse_args()
    if arguments.only_vllm and not arguments.vllm:
        parser.error("--only-vllm needs --vllm")
    census: dict[str, Any] = {"versions": versions(), "tolerance": TOLERANCE, "families": []}
    known = families.families()
    if arguments.only_vllm:
        census = json.loads(arguments.out.read_text(encoding="utf-8"))
        known = [row["family"] for row in census["families"]]
    if arguments.resume and arguments.out.exists():
        census["families"] = json.loads(arguments.out.read_text(encoding="utf-8"))["families"]
    done = set() if arguments.only_vllm else {row["family"] for row in census["families"]}
    chosen = arguments.families.split(",") if arguments.families else known
    if unknown := set(chosen) - {*known}:
        where = arguments.out if arguments.only_vllm else "the installed transformers"
        parser.error(f"no family of {where}: {', '.join(sorted(unknown))}")
    methods = METHODS if arguments.method == "both" else (arguments.method,)
    if arguments.only_vllm:
        methods = ("rtn",)
    chosen = [family for family in chosen if family not in done]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        kept = arguments.keep or (Path(folder) if arguments.vllm else None)
        made = [family for family in chosen if kept is None or not (kept / family).exists()]
        for row in _shown(pool.map(lambda family: examine(family, methods, keep=kept), made), len(made)):
            if not arguments.only_vllm:
                census["families"].append(row)
                arguments.out.write_text(json.dumps(census, indent=1) + "\n")
        if kept is not None:
            engine.ask(arguments.vllm, kept, [row for row in census["families"] if row["family"] in chosen])
            census["versions"] |= engine.versions()
    arguments.out.write_text(json.dumps(census, indent=1) + "\n")


def _shown(rows: Iterator[dict[str, Any]], total: int) -> Iterator[dict[str, Any]]:
    for i, row in enumerate(rows, 1):
        print(f"{i}/{total} {row['family']}", file=sys.stderr)
        yield row


if __name__ == "__main__":
    main()
