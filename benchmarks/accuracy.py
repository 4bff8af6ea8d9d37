"""Measure perplexity and KL divergence of one model under many recipes, one ingredient at a time.

Each row is a recipe: `quantkit.quantize` writes a folder, which is read back, decoded and evaluated. Small models are
judged by KL divergence from the unquantized model, because their perplexity moves by 0.05 % at random (ALGORITHMS 14).
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.evaluation.divergence import kld
from quantkit.evaluation.perplexity import perplexity
from quantkit.models.weights import load_dense_model
from quantkit.pipeline.quantize import quantize
from quantkit.recipes.files import merge
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import Recipe, from_mapping, pruning_from_mapping
from quantkit.text.tokenizer import load_tokenizer

INT4_ABSMAX = {"scheme": {"format": "int4"}, "clip": "none"}
#: The published loop: natural order, absmax scales, mean damping, windows of fixed length, unquantized inputs.
PUBLISHED = {
    **INT4_ABSMAX,
    "method": "gptq",
    "signed": False,
    "gptq": {"act_order": "off", "damp_kind": "mean", "first_token": 0, "descent": 0},
    "true_sequential": False,
    "calibration": {"lengths": "fixed"},
}
SEARCH = {"clip": "search", "metric": "block"}
REFINED = {"gptq": {"descent": 3, "refit": True}}
TUNED = {**REFINED, "output_aware": True, "tune": 400}
UNQUANTIZED = "unquantized"
OWN_LENGTHS = {"calibration": {"lengths": "own"}}


def variants() -> dict[str, Mapping[str, Any]]:
    """Map names to recipes. The GPTQ rows add one ingredient at a time, up to int4-tuned."""
    clipped = merge(PUBLISHED, SEARCH)
    own = merge(clipped, OWN_LENGTHS)
    sequential = merge(own, {"true_sequential": True})
    diagonal = merge(sequential, {"gptq": {"damp_kind": "own"}})
    weighed = merge(diagonal, {"gptq": {"first_token": 0.1}})
    static = merge(weighed, {"gptq": {"act_order": "static"}})
    signed = merge(static, {"signed": True})
    return {
        "int4 rtn channel": merge(INT4_ABSMAX, {"method": "rtn", "scheme": {"group_size": "channel"}}),
        "int4 rtn g128": merge(INT4_ABSMAX, {"method": "rtn"}),
        "int4 rtn g128, search mse": {"method": "rtn", "clip": "search"},
        "int4 rtn g128, search block": {"method": "rtn", **SEARCH},
        "int4 gptq g128, published": PUBLISHED,
        "+ clipping search": clipped,
        "+ own lengths": own,
        "+ true sequential": sequential,
        "+ own-diagonal damping": diagonal,
        "+ weight of first tokens": weighed,
        "+ static act-order": static,
        "+ signed scales": signed,
        "+ descent 3 = default": merge(signed, {"gptq": {"descent": 3}}),
        "+ refit": merge(signed, REFINED),
        "+ 200 steps of tuning": merge(signed, {**REFINED, "tune": 200}),
        "+ gradients that weigh its error = int4-best": merge(signed, {**TUNED, "tune": 200}),
        "+ 200 steps more = int4-tuned": merge(signed, TUNED),
        "static act-order without search": merge(static, {"clip": "none"}),
        "marlin paper (damping 0.1)": merge(own, {"gptq": {"damp": 0.1}, "true_sequential": True}),
        "int4 gptq channel": merge(static, {"scheme": {"group_size": "channel"}}),
        "int4 gptq g32": merge(static, {"scheme": {"group_size": 32}}),
        "int4 gptq g128 asym": merge(static, {"scheme": {"symmetric": False}}),
        "fp6 rtn": {"scheme": {"format": "fp6"}},
        "fp6 gptq": {"scheme": {"format": "fp6"}, "method": "gptq", "clip": "none"},
        "fp6 gptq, search": {"scheme": {"format": "fp6"}, "method": "gptq", **SEARCH},
        "fp6 gptq, search, descent 3, refit": {"scheme": {"format": "fp6"}, "method": "gptq", **SEARCH, **REFINED},
        "fp6 gptq, search, tuned as int4-tuned": {"scheme": {"format": "fp6"}, "method": "gptq", **SEARCH, **TUNED},
        "fp5 rtn": {"scheme": {"format": "fp5"}},
        "fp5 gptq": {"scheme": {"format": "fp5"}, "method": "gptq", "clip": "none"},
        "fp5 gptq, search": {"scheme": {"format": "fp5"}, "method": "gptq", **SEARCH},
    }


def sparse() -> dict[str, Sequence[Mapping[str, Any]]]:
    """Map names to steps in order. A step without a scheme prunes and leaves the model dense (ALGORITHMS 9)."""
    int4 = {"scheme": {"format": "int4", "sparsity": "2:4"}}
    kept = {**int4, "prune": "magnitude"}  # uses the mask that the model has
    sparsegpt = {"method": "sparsegpt"}
    return {
        "2:4 magnitude": [{"method": "magnitude"}],
        "2:4 wanda": [{"method": "wanda"}],
        "2:4 sparsegpt": [sparsegpt],
        "2:4 magnitude + int4 g128 rtn": [{**kept, "method": "rtn"}],
        "2:4 sparsegpt, then int4 g128 rtn": [sparsegpt, {**kept, "method": "rtn"}],
        "2:4 sparsegpt, then int4 g128 gptq": [sparsegpt, kept],
        "2:4 wanda + int4 g128 gptq, jointly": [{**int4, "prune": "wanda"}],
        "2:4 sparsegpt + int4 g128 gptq, jointly": [int4],
        "the last, signed, tuned as int4-tuned": [{**int4, "signed": True, **TUNED}],
    }


def steps(name: str, calibration: Mapping[str, Any]) -> list[Recipe]:
    """Return the steps of a variant, in order."""
    chosen = sparse().get(name) or [variants()[name]]
    asked = [merge(mapping, {"calibration": calibration}) for mapping in chosen]
    return [from_mapping(m) if name not in sparse() or "scheme" in m else pruning_from_mapping(m) for m in asked]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--text", type=Path, nargs="+", required=True, help="evaluation texts; KL is taken on the first"
    )
    parser.add_argument("--calib", required=True)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sparse", action="store_true", help="measure 2:4 instead of dense schemes")
    parser.add_argument("--only", nargs="*", default=[], help="measure these variants again, keep other rows")
    parser.add_argument("-o", "--out", type=Path, required=True, help="CSV to write")
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"

    rows: dict[str, dict[str, Any]] = {}
    if args.only:
        with args.out.open(newline="") as file:
            rows = {row["variant"]: row for row in csv.DictReader(file)}
    every = [UNQUANTIZED, *(sparse() if args.sparse else variants())]
    for name in args.only or every:
        rows[name] = measure(args, name)
        print(rows[name], flush=True)
        save([rows[name] for name in every if name in rows], args.out)


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Quantize by one variant, evaluate, and return its row."""
    started = time.perf_counter()
    texts = {path.parent.name: path.read_text(encoding="utf-8") for path in args.text}
    words = load_tokenizer(args.model)
    reference = load_dense_model(Checkpoint(args.model), device=args.device, dtype=torch.float32)
    if name == UNQUANTIZED:
        return {"variant": name, **evaluate(reference, reference, words, texts, args.window)}
    calibration = {"data": args.calib, "samples": args.samples, "max_length": args.window}
    with tempfile.TemporaryDirectory() as folder:
        made = args.model
        for number, step in enumerate(steps(name, calibration)):
            source, made = made, Path(folder) / str(number)
            report = quantize(source, made, step, run=RunOptions(device=args.device))
        model = load_dense_model(Checkpoint(made), device=args.device, dtype=torch.float32)
    bits = report["totals"]["bits_per_weight"]
    print(name, {phase: round(seconds, 1) for phase, seconds in report["phases"].items()}, flush=True)
    return {
        "variant": name,
        **evaluate(model, reference, words, texts, args.window),
        "bits": None if bits is None else round(bits, 3),
        "tokens": report["calibration"].get("tokens", 0),
        "loss_over_rtn": _ratio(report["layers"]),
        "seconds": round(time.perf_counter() - started, 1),
        "guard_rows": sum(layer.get("guard_rows", 0) for layer in report["layers"]),
    }


def save(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows as CSV, with a column for each key of any row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


def evaluate(model: Any, reference: Any, words: Any, texts: Mapping[str, str], window: int) -> dict[str, Any]:
    """Return the perplexity on each text and, for any model but the reference, KL divergence and top-1 on the first."""
    row: dict[str, Any] = {}
    for name, text in texts.items():
        row[name] = round(perplexity(model, words, text, window=window, stride=window, data=name).perplexity, 4)
    if model is not reference:
        first = next(iter(texts.values()))
        divergence = dataclasses.asdict(kld(model, reference, words, first, window=window))
        row["kl_x1e3"] = round(1e3 * divergence["kld"], 4)
        row["top1"] = round(divergence["top1"], 5)
    return row


def _ratio(layers: list[Mapping[str, Any]]) -> float | None:
    """Return the geometric mean over layers of the proxy loss relative to plain RTN's."""
    ratios = [layer["loss"] / layer["rtn_loss"] for layer in layers if layer.get("rtn_loss") and "loss" in layer]
    return round(float(torch.tensor(ratios).log().mean().exp()), 4) if ratios else None


if __name__ == "__main__":
    main()
