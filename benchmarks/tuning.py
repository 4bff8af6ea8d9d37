"""Measure tuned recipes beside the same without tuning: KL divergence and perplexity on several texts.

A row is a model and a recipe. Rows that the file has already are kept, unless their arguments differ.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy import PUBLISHED, REFINED
from quantkit.checkpoint.reader import Checkpoint
from quantkit.evaluation.divergence import kld
from quantkit.evaluation.perplexity import perplexity
from quantkit.models.weights import load_dense_model
from quantkit.pipeline.quantize import quantize
from quantkit.recipes.files import merge
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import from_mapping
from quantkit.text.tokenizer import load_tokenizer

BEST = {"signed": True, **REFINED}
FP6 = {"scheme": {"format": "fp6"}, "method": "gptq", **REFINED}
SPARSE = {"scheme": {"sparsity": "2:4"}, **BEST}
RECIPES: dict[str, Mapping[str, Any]] = {
    "unquantized": {},
    "int4 published gptq": PUBLISHED,
    "int4 refined": BEST,
    "int4 refined, tuned": {**BEST, "tune": True},
    "2:4 int4": SPARSE,
    "2:4 int4, tuned": {**SPARSE, "tune": True},
    "fp6 gptq": FP6,
    "fp6 gptq, tuned": {**FP6, "tune": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="evaluation texts, named by their folders")
    parser.add_argument("--calib", required=True)
    parser.add_argument("--samples", type=int, default=128, help="calibration sequences [128]")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a sequence and of a window [1024]")
    parser.add_argument("--windows", type=int, help="evaluate the first so many windows of each text [all]")
    parser.add_argument("--steps", type=int, default=200, help="steps of tuning [200]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("-o", "--out", type=Path, default=Path("benchmarks/cpu/tuning.json"))
    args = parser.parse_args()
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    for name in args.only:
        asked = {
            "model": args.model.name,
            "recipe": name,
            "steps": args.steps if "tuned" in name else 0,
            **{key: getattr(args, key) for key in ("samples", "window", "windows", "seed")},
        }
        if any(asked.items() <= row.items() for row in rows):
            continue
        rows.append({**asked, **measure(args, name)})
        print(rows[-1], flush=True)
        args.out.write_text("[\n" + ",\n".join(f" {json.dumps(row)}" for row in rows) + "\n]\n", encoding="utf-8")


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Quantize with one recipe and return its figures."""
    reference = load_dense_model(Checkpoint(args.model), device=args.device, dtype=torch.float32)
    if name == "unquantized":
        return evaluate(args, reference, None)
    steps = {"tune": args.steps} if "tune" in RECIPES[name] else {}
    fixed = {"data": args.calib, "samples": args.samples, "max_length": args.window, "lengths": "fixed"}
    calibration = {"calibration": {**fixed, "seed": args.seed}}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        recipe = from_mapping(merge(merge(RECIPES[name], steps), calibration))
        report = quantize(args.model, out, recipe, run=RunOptions(device=args.device))
        seconds = time.perf_counter() - started
        model = load_dense_model(Checkpoint(out), device=args.device, dtype=torch.float32)
    layers = [layer for layer in report["layers"] if layer.get("tuned_error")]
    ratios = torch.tensor([layer["tuned_error"] / layer["untuned_error"] for layer in layers])
    return {
        **evaluate(args, model, reference),
        "bits": round(report["totals"]["bits_per_weight"], 3),
        "seconds": round(seconds, 1),
        "tune_seconds": round(report["phases"].get("tune", 0.0), 1),
        "error_ratio": round(float(ratios.log().mean().exp()), 4) if layers else None,
        "codes_changed": sum(layer["tuned_changed"] for layer in layers),
        "device": report["device"],
        "torch": torch.__version__,
    }


def evaluate(args: argparse.Namespace, model: Any, reference: Any) -> dict[str, float]:
    """Return perplexity and, beside a reference, KL divergence of a model on each text."""
    words, found = load_tokenizer(args.model), {}
    for path in args.text:
        text, name = path.read_text(encoding="utf-8"), path.parent.name
        protocol = {"window": args.window, "tokens": args.windows and args.window * args.windows}
        found[f"{name}_ppl"] = round(perplexity(model, words, text, **protocol).perplexity, 4)
        if reference is not None:
            divergence = kld(model, reference, words, text, **protocol)
            found[f"{name}_kl_x1e3"] = round(1e3 * divergence.kld, 3)
    return found


if __name__ == "__main__":
    main()
