"""Judge folders of any quantizer by one protocol, and quantkit's own recipes too, on the same calibration tokens.

A folder is decoded to float32. Each row has, on the first windows of each text, perplexity, the KL divergence from the
unquantized model with its interval and tails, and top-1 agreement, and the seconds that its quantizer took. The scripts
in `benchmarks/peers` make the folders of other packages. The unquantized model stays loaded and runs beside each one.

Rows that the CSV has already are skipped. A failed row is printed, and the next one runs.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import quantkit
from benchmarks.accuracy import INT4_ABSMAX, PUBLISHED, REFINED, UNQUANTIZED, save
from quantkit.checkpoint.reader import Checkpoint
from quantkit.evaluation.divergence import TokenValues, token_values
from quantkit.evaluation.perplexity import Windows, cut, exponential, mean_loss
from quantkit.keys import keys_of
from quantkit.models.weights import load_dense_model
from quantkit.pipeline.inspection import describe
from quantkit.pipeline.quantize import quantize
from quantkit.recipes.files import from_pairs, merge
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import from_mapping
from quantkit.recipes.schema import RecipeKeys
from quantkit.text.tokenizer import load_tokenizer, token_ids

DEFAULT = {"scheme": {"format": "int4"}}
PLAIN = merge(DEFAULT, {"signed": False, "gptq": {"descent": 0}})
SIGNED = merge(PLAIN, {"signed": True})
BEST = merge(SIGNED, REFINED)
TUNED = merge(BEST, {"output_aware": True, "tune": 400})
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
    "refined, tune 50": merge(BEST, {"tune": 50}),
    "refined, tune 200": merge(BEST, {"tune": 200}),
    "int4-best": merge(BEST, {"output_aware": True, "tune": 200}),
    "int4-tuned": TUNED,
    "int3-best": merge(TUNED, {"scheme": {"format": "int3", "group_size": 64}}),
    "fp6": FP6,
    "fp6, output-aware, tune 50": merge(FP6, {"output_aware": True, "tune": 50}),
    "fp6, output-aware, tune 200": merge(FP6, {"output_aware": True, "tune": 200}),
    "2:4": SPARSE,
    "2:4, output-aware, tune 200": merge(SPARSE, {"output_aware": True, "tune": 200}),
}
#: Columns of a run, from `peer.json` or from `run`.
FACTS = ("version", "seconds", "cpu_seconds", "device", "torch")
KEY = ("model", "name", "seed")
#: A text of fewer windows than `FEWEST` is cut into windows of `SHORT` tokens.
FEWEST, SHORT = 4, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", nargs="+", required=True, metavar="NAME=FILE", help="evaluation texts")
    parser.add_argument("--folder", nargs="*", default=[], metavar="NAME=FOLDER", help="quantized folders to judge")
    parser.add_argument("--recipe", nargs="*", default=[], choices=RECIPES, help="recipes of quantkit to run and judge")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of all recipes, part of names")
    parser.add_argument("--group-size", type=int, help="of all INT4 recipes; part of the names")
    parser.add_argument("--calib", help="calibration text of the recipes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of the calibration tokens")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--windows", type=int, help="judge the first windows of each text only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("-o", "--out", type=Path, required=True, help="CSV; rows of other models and names stay")
    args = parser.parse_args()
    if args.recipe and not args.calib:
        parser.error("--recipe needs --calib")
    have = {tuple(row[key] for key in KEY) for row in read(args.out)}
    reference = load_dense_model(Checkpoint(args.model), device=args.device)
    texts = dict(read_text(args, reference, *each.partition("=")[::2]) for each in args.text)
    failed = []

    def add(name: str, seed: int | str, make: Callable[[Path], tuple[Path, Mapping[str, Any]]]) -> None:
        if (args.model.name, name, str(seed)) in have:
            return
        try:
            with tempfile.TemporaryDirectory() as scratch:
                folder, facts = make(Path(scratch) / "out")
                judged = judge(reference, folder, texts, args.device)
        except Exception:  # the other rows may well be made
            traceback.print_exc()
            print(f"FAILED: {name}, seed {seed}", flush=True)
            failed.append(name)
            return
        row = {"model": args.model.name, "name": name, "seed": str(seed), **facts, **judged}
        print(json.dumps(row), flush=True)
        save([*read(args.out), row], args.out)

    add(UNQUANTIZED, "", lambda _: (args.model, dict.fromkeys(FACTS, "")))
    for each in args.folder:
        name, _, folder = each.partition("=")
        add(name, args.seeds[0], partial(peer, Path(folder)))
    for name in args.recipe:
        shown, recipe = changed(args, name)
        for seed in args.seeds:
            add(shown, seed, partial(run, args, name, recipe, seed))
    sys.exit(1 if failed else 0)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the CSV, if it exists."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_text(args: argparse.Namespace, reference: Any, name: str, file: str) -> tuple[str, Windows]:
    """Return the name and the windows of a text, short ones where it has few tokens. BOS is the tokenizer's rule."""
    tokenizer, text = load_tokenizer(args.model), Path(file).read_text(encoding="utf-8")
    few = len(token_ids(tokenizer, text, special=False)) < FEWEST * args.window
    window = min(SHORT, args.window) if few else args.window
    tokens = args.windows * window if args.windows else None
    found = cut([reference], tokenizer, text, window=window, tokens=tokens)
    print(f"{name}: {found.protocol}", flush=True)
    return name, found


def peer(folder: Path, _: Path) -> tuple[Path, dict[str, Any]]:
    """Return a folder, and the facts of its run that a script of `benchmarks/peers` wrote."""
    found = json.loads((folder / "peer.json").read_text())
    return folder, {key: found[key] for key in FACTS}


def changed(args: argparse.Namespace, name: str) -> tuple[str, dict[str, Any]]:
    """Return a recipe as the command line changes it, and its name, which says so."""
    recipe: dict[str, Any] = dict(RECIPES[name])
    group = args.group_size and recipe.get("scheme", {}).get("format", "int4") == "int4"
    if group:
        recipe = merge(recipe, {"scheme": {"group_size": args.group_size}})
    recipe = merge(recipe, from_pairs(args.set, keys_of(RecipeKeys)))
    return ", ".join([f"{name} g{args.group_size}" if group else name, *args.set]), recipe


def run(
    args: argparse.Namespace, name: str, settings: Mapping[str, Any], seed: int, out: Path
) -> tuple[Path, dict[str, Any]]:
    """Quantize by a recipe into `out`, on the tokens of `peers/write_tokens.py`; return it and the facts."""
    calibration = {
        "data": args.calib,
        "samples": args.samples,
        "max_length": args.window,
        "seed": seed,
        "lengths": "fixed",
    }
    started, used = time.perf_counter(), time.process_time()
    recipe = from_mapping(merge({"calibration": calibration}, settings))
    quantize(args.model, out, recipe, run=RunOptions(device=args.device))
    return out, {
        "version": quantkit.__version__,
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - used, 1),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "torch": torch.__version__,
    }


def judge(reference: Any, folder: Path, texts: Mapping[str, Windows], device: str) -> dict[str, Any]:
    """Return the stored bits per weight of a folder and, for each text, the figures of `quantkit eval ppl` and `kld`.

    KL divergences are in thousandths of a nat; `_above` is the share of tokens above 0.1 nat.
    """
    src = Checkpoint(folder)
    bits = describe(src)["bits_per_weight"]
    model = load_dense_model(src, device=device)
    row: dict[str, Any] = {"bits": "" if bits is None else round(bits, 3)}
    for text, pieces in texts.items():
        found = token_values(reference, model, pieces)
        row |= {f"{text}_{key}": value for key, value in columns(found).items()}
    return row


def columns(found: TokenValues) -> dict[str, Any]:
    """Return the columns of one text."""
    figures = found.figures()
    thousandths = {
        key.replace("kld", "kl_x1e3"): "" if figures[key] is None else round(1e3 * figures[key], 4)
        for key in ("kld", "kld_low", "kld_high", "kld_median", "kld_p99", "kld_p999")
    }
    return {
        "ppl": round(exponential(mean_loss(found.losses)), 4),
        **thousandths,
        "above": round(figures["kld_above"], 5),
        "top1": round(figures["top1"], 5),
        "tokens": sum(map(len, found.kl)),
    }


if __name__ == "__main__":
    main()
