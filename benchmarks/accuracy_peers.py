"""Judge folders of any quantizer by one protocol, and quantkit's own recipes too, on the same calibration tokens.

A folder is decoded to float32. Each row has perplexity, KL divergence from the unquantized model, and top-1 agreement,
on the first windows of each text, and the seconds that its quantizer took. The scripts in `benchmarks/peers` make the
folders of other packages. The logits of the unquantized model are computed once and kept in `--cache`.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import quantkit
from benchmarks.accuracy import INT4_ABSMAX, PUBLISHED, REFINED, UNQUANTIZED, save
from quantkit.checkpoint.reader import Checkpoint
from quantkit.evaluation.windows import ROWS, window_logits, windows
from quantkit.models.whole_model import load_dense_model
from quantkit.pipeline.distill import distill
from quantkit.pipeline.inspection import describe
from quantkit.pipeline.quantize import quantize
from quantkit.recipes.recipe import from_mapping, merge
from quantkit.text.tokenizer import load_tokenizer, token_ids

DEFAULT = {"scheme": {"format": "int4"}}
PLAIN = merge(DEFAULT, {"signed": False, "gptq": {"descent": 0}})
SIGNED = merge(PLAIN, {"signed": True})
BEST = merge(SIGNED, REFINED)
TUNED = merge(BEST, {"output_aware": True, "tune": 200})
FP6 = merge({"scheme": {"format": "fp6"}, "method": "gptq"}, REFINED)
SPARSE = merge(DEFAULT, {"scheme": {"sparsity": "2:4"}, "signed": True, **REFINED})
#: Name -> recipe of quantkit. A new row is a line here.
RECIPES: dict[str, Mapping[str, Any]] = {
    "rtn": merge(INT4_ABSMAX, {"method": "rtn"}),
    "published gptq": PUBLISHED,
    "unsigned, no descent": PLAIN,
    "refit": merge(PLAIN, {"gptq": {"refit": True}}),
    "descent 1": merge(PLAIN, {"gptq": {"descent": 1}}),
    "descent 3": merge(PLAIN, {"gptq": {"descent": 3}}),
    "signed": SIGNED,
    "signed, refit": merge(SIGNED, {"gptq": {"refit": True}}),
    "signed, descent 1": merge(SIGNED, {"gptq": {"descent": 1}}),
    "default": DEFAULT,  # signed, descent 3
    "refined": BEST,  # the default with refit
    "refined, output-aware": merge(BEST, {"output_aware": True}),
    "refined, tune 50": merge(BEST, {"tune": 50}),
    "refined, tune 200": merge(BEST, {"tune": 200}),
    "refined, tune 200, distill 100": merge(BEST, {"tune": 200}),
    "int4-best": merge(BEST, {"output_aware": True, "tune": 50}),
    "int4-tuned": TUNED,
    "int4-tuned, distill 100": TUNED,
    "int4-tuned, distill 100, codes": TUNED,
    "fp6": FP6,
    "fp6, output-aware, tune 50": merge(FP6, {"output_aware": True, "tune": 50}),
    "fp6, output-aware, tune 200": merge(FP6, {"output_aware": True, "tune": 200}),
    "2:4": SPARSE,
    "2:4, output-aware, tune 200": merge(SPARSE, {"output_aware": True, "tune": 200}),
}
#: Name -> whether codes learn too, of the rows whose folder is distilled in 100 steps.
DISTILLED = {name: "codes" in name for name in RECIPES if "distill" in name}
#: Columns of a run, from `peer.json` or from `run`.
FACTS = ("version", "seconds", "cpu_seconds", "device", "torch")
KEY = ("model", "name", "seed")
NO_PREFIX = torch.tensor([], dtype=torch.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="evaluation texts, named by their folders")
    parser.add_argument("--folder", nargs="*", default=[], metavar="NAME=FOLDER", help="quantized folders to judge")
    parser.add_argument("--recipe", nargs="*", default=[], choices=RECIPES, help="recipes of quantkit to run and judge")
    parser.add_argument("--calib", help="calibration text of the recipes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of the calibration tokens")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--windows", type=int, help="judge the first windows of each text only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cache", type=Path, required=True, help="folder for the unquantized model's logits")
    parser.add_argument("-o", "--out", type=Path, required=True, help="CSV; rows of other models and names stay")
    args = parser.parse_args()
    if args.recipe and not args.calib:
        parser.error("--recipe needs --calib")

    texts = {path.parent.name: windows_and_logits(args, path) for path in args.text}

    def add(name: str, seed: int | str, folder: Path, facts: Mapping[str, Any]) -> None:
        row = {"model": args.model.name, "name": name, "seed": seed, **facts, **judge(args, folder, texts)}
        print(row, flush=True)
        rows = {tuple(row[key] for key in KEY): row for row in read(args.out)}
        save(list({**rows, tuple(str(row[key]) for key in KEY): row}.values()), args.out)

    if not args.folder and not args.recipe:
        add(UNQUANTIZED, "", args.model, dict.fromkeys(FACTS, ""))
    for each in args.folder:
        name, _, folder = each.partition("=")
        found = json.loads((Path(folder) / "peer.json").read_text())
        add(name, args.seeds[0], Path(folder), {key: found[key] for key in FACTS})
    for name in args.recipe:
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as scratch:
                add(name, seed, Path(scratch) / "out", run(args, name, seed, Path(scratch) / "out"))


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the CSV, if it exists."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run(args: argparse.Namespace, name: str, seed: int, out: Path) -> dict[str, Any]:
    """Quantize by a recipe into `out`, on the tokens of `peers/write_tokens.py`; return version, times and device."""
    calibration = {
        "data": args.calib,
        "samples": args.samples,
        "max_length": args.window,
        "seed": seed,
        "lengths": "fixed",
    }
    started, used = time.perf_counter(), time.process_time()
    recipe = from_mapping(merge(RECIPES[name], {"calibration": calibration}))
    made = out.with_name("undistilled") if name in DISTILLED else out
    quantize(args.model, made, recipe, device=args.device)
    if name in DISTILLED:
        options = {"steps": 100, "codes": DISTILLED[name]}
        distill(made, out, args.model, recipe.calibration, device=args.device, **options)
    return {
        "version": quantkit.__version__,
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - used, 1),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "torch": torch.__version__,
    }


@torch.inference_mode()
def judge(args: argparse.Namespace, folder: Path, texts: Mapping[str, tuple[list[Tensor], Tensor]]) -> dict[str, Any]:
    """Return the stored bits per weight of a folder and, for each text, perplexity, KL divergence and top-1 agreement.

    Perplexity predicts all tokens of a window but the first, as `quantkit eval ppl` does. KL and top-1 are over all
    positions, as in `quantkit eval kld`, with softmax in float32 and the sum in float64.
    """
    src = Checkpoint(folder)
    bits = describe(src)["bits_per_weight"]
    model = load_dense_model(src, device=args.device)
    row: dict[str, Any] = {"bits": "" if bits is None else round(bits, 3)}
    for text, (parts, reference) in texts.items():
        nll = kl = agree = 0.0
        for number, (part, theirs) in enumerate(zip(parts, reference, strict=True)):
            ours = window_logits(model, part, NO_PREFIX, number)
            nll += float(torch.nn.functional.cross_entropy(ours[:-1], part[1:].to(ours.device), reduction="sum"))
            for p, q in zip(theirs.to(ours.device).split(ROWS), ours.split(ROWS), strict=True):
                agree += float((p.argmax(-1) == q.argmax(-1)).sum())
                p, q = p.log_softmax(-1), q.log_softmax(-1)
                kl += float((p.exp() * (p - q)).sum(-1, dtype=torch.float64).sum())
        count = len(parts) * args.window
        row[f"{text}_ppl"] = round(math.exp(nll / (count - len(parts))), 4)
        row[f"{text}_kl_x1e3"] = round(1e3 * kl / count, 4)
        row[f"{text}_top1"] = round(agree / count, 5)
        row[f"{text}_tokens"] = count
    return row


def windows_and_logits(args: argparse.Namespace, path: Path) -> tuple[list[Tensor], Tensor]:
    """Return the windows of a text and the unquantized model's logits `[windows, tokens, v]` on them, in float32.

    The logits are kept under a hash of the tokens and of the model's files.
    """
    tokens = token_ids(load_tokenizer(args.model), path.read_text(encoding="utf-8"), special=False)
    parts = [part for _, part in windows(tokens, args.window, args.window, None, "", args.windows)]
    seen = hashlib.sha256(torch.stack(parts).numpy().tobytes())
    for file in sorted(args.model.glob("*.safetensors")):
        seen.update(file.read_bytes())
    kept = args.cache / f"{seen.hexdigest()[:16]}.pt"
    if not kept.exists():
        model = load_dense_model(Checkpoint(args.model), device=args.device)
        args.cache.mkdir(parents=True, exist_ok=True)
        torch.save(torch.stack([window_logits(model, part, NO_PREFIX, 0).cpu() for part in parts]), kept)
    return parts, torch.load(kept, mmap=True)


if __name__ == "__main__":
    main()
