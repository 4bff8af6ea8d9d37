"""Measure how far tuning from end to end brings the KL divergence down, on two texts, one of which calibrated nothing.

Each recipe is run without tuning, with tuned scales and norms, and with tuned codes. A finished row is written at once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy import PUBLISHED, REFINED, SEARCH
from quantkit.checkpoint.reader import Checkpoint
from quantkit.evaluation.divergence import kld
from quantkit.evaluation.perplexity import perplexity
from quantkit.models.weights import load_dense_model
from quantkit.pipeline.distill import distill
from quantkit.pipeline.quantize import quantize
from quantkit.recipes.recipe import from_mapping, merge
from quantkit.text.tokenizer import load_tokenizer

RECIPES: dict[str, Mapping[str, Any]] = {
    "int4 gptq g128, published": PUBLISHED,
    "int4 unsigned, no descent": {"signed": False, "gptq": {"descent": 0}},
    "int4 default": {},
    "refined": {"signed": True, **REFINED},
    "fp6 gptq": {"scheme": {"format": "fp6"}, "method": "gptq", **SEARCH},
    "2:4 + int4": {"scheme": {"format": "int4", "sparsity": "2:4"}},
}
TUNING = ("", "scales, norms", "scales, norms, codes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="evaluation texts")
    parser.add_argument("--calib", required=True)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=64, help="of each evaluation text, at most")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--recipe", nargs="*", choices=RECIPES, default=[*RECIPES])
    parser.add_argument("--tuned", nargs="*", choices=TUNING, default=[*TUNING])
    parser.add_argument("-o", "--out", type=Path, required=True, help="JSON to write; other rows of it stay")
    args = parser.parse_args()
    rows: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in args.recipe:
        for tuned in args.tuned:
            rows[f"{args.model.name} | {name} | {tuned or 'as it is'}"] = found = measure(args, name, tuned)
            print(name, tuned, found, flush=True)
            args.out.write_text(json.dumps(rows, indent=1) + "\n")


def measure(args: argparse.Namespace, name: str, tuned: str) -> dict[str, Any]:
    """Quantize by one recipe, evaluate, and return the row."""
    calibration = {"data": args.calib, "samples": args.samples, "max_length": args.window}
    recipe = from_mapping(merge(RECIPES[name], {"calibration": calibration}))
    words = load_tokenizer(args.model)
    reference = load_dense_model(Checkpoint(args.model), dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        report = quantize(args.model, out, recipe, device=args.device)
        if tuned:
            before, out, learned = out, Path(folder) / "tuned", {"steps": args.steps, "codes": "codes" in tuned}
            report = distill(before, out, args.model, recipe.calibration, device=args.device, **learned)
        model = load_dense_model(Checkpoint(out), dtype=torch.float32)
    row: dict[str, Any] = {"distillation": report.get("distillation"), "phases": report["phases"]}
    row |= {"peak_memory": report["totals"]["peak_memory"], "threads": torch.get_num_threads()}
    for path in args.text:
        text, options = path.read_text(encoding="utf-8"), {"window": args.window, "tokens": args.window * args.windows}
        found = kld(model, reference, words, text, **options)
        before, after = (perplexity(each, words, text, **options).perplexity for each in (reference, model))
        row[path.parent.name] = {"kl_x1e3": 1e3 * found.kld, "before": before, "after": after}
    return row


if __name__ == "__main__":
    main()
