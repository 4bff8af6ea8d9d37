"""Measure which tokens to calibrate experts on: those that the router sends them, or all tokens of the layer.

Each row is one `quantkit.quantize` of a mixture of experts to INT4 g128, read back, decoded and evaluated as in
`accuracy.py`. With few samples some experts see few tokens. `routed` calibrates those on all tokens too; the column
`on_all_tokens` is the share of expert linears for which this was done.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accuracy import UNQUANTIZED, evaluate, save

from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.weights import load_dense_model
from quantkit.pipeline.quantize import quantize
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import from_mapping
from quantkit.text.tokenizer import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a mixture of experts, such as that of train_moe.py")
    parser.add_argument(
        "--text", type=Path, nargs="+", required=True, help="evaluation texts; KL is taken on the first"
    )
    parser.add_argument("--characters", type=int, help="evaluate on the first ones of each text only")
    parser.add_argument("--calib", required=True)
    parser.add_argument("--samples", type=int, nargs="+", default=[128, 32, 8])
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="seeds that draw the samples")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("-o", "--out", type=Path, required=True, help="CSV to write")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = load_tokenizer(args.model)
    texts = {path.parent.name: path.read_text(encoding="utf-8")[: args.characters] for path in args.text}
    reference = load_dense_model(Checkpoint(args.model), device=device, dtype=torch.float32)
    recipes: list[dict[str, Any]] = [{"method": "rtn"}]
    for seed in args.seed:
        for samples in args.samples:
            drawn = {"data": args.calib, "samples": samples, "max_length": args.window, "seed": seed}
            recipes += [{"method": "gptq", "calibration": {**drawn, "moe": moe}} for moe in ("routed", "all")]
    rows = [{"method": UNQUANTIZED, **evaluate(reference, reference, words, texts, args.window)}]
    print(rows[-1], flush=True)
    for mapping in recipes:
        with tempfile.TemporaryDirectory() as folder:
            report = quantize(args.model, Path(folder) / "out", from_mapping(mapping), run=RunOptions(device=device))
            model = load_dense_model(Checkpoint(Path(folder) / "out"), device=device, dtype=torch.float32)
        started = time.perf_counter()
        rows.append({**described(mapping, report), **evaluate(model, reference, words, texts, args.window)})
        phases = {phase: round(seconds, 1) for phase, seconds in report["phases"].items()}
        print(rows[-1], phases, f"evaluated in {time.perf_counter() - started:.0f} s", flush=True)
        save(rows, args.out)
    print_table(rows)


def described(mapping: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that tell about the run: its settings, the tokens that calibrated the experts, seconds."""
    calibration = mapping.get("calibration", {})
    experts = [layer for layer in report["layers"] if "moe" in layer]
    tokens = [count for layer in experts if (count := routed_tokens(layer)) is not None]
    on_all = sum(layer["moe"] == "all" for layer in experts)
    return {
        "method": mapping["method"],
        "samples": calibration.get("samples", ""),
        "moe": calibration.get("moe", ""),
        "seed": calibration.get("seed", ""),
        "tokens": report["calibration"].get("tokens", 0),
        "routed_min": min(tokens, default=""),
        "routed_median": statistics.median_low(tokens) if tokens else "",
        "on_all_tokens": round(on_all / len(experts), 4) if experts else "",
        "guard_rows": sum(layer.get("guard_rows", 0) for layer in report["layers"]),
        "seconds": round(report["totals"]["seconds"], 1),
    }


def routed_tokens(layer: dict[str, Any]) -> int | None:
    """Return the tokens that the router sent to an expert, from its entry in the report; None if nothing says it."""
    if "few_routed" in layer:
        return int(layer["few_routed"].split()[0])
    return layer["tokens"] if layer["moe"] == "routed" else None


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print rows as a Markdown table, with the columns of the last one."""
    columns = list(rows[-1])
    print("", *columns, "", sep=" | ")
    print("|", "---|" * len(columns), sep="")
    for row in rows:
        print("", *(row.get(column, "") for column in columns), "", sep=" | ")


if __name__ == "__main__":
    main()
