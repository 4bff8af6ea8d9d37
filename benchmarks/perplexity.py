"""Measure the perplexity of one model in every layout, multiplied by kernels, by a CPU, and by transformers.

The first two are `quantkit eval ppl` of the packed folder. A GPU repacks layouts without a kernel at load; a CPU
decodes weights at each call. For the third, the decoded weights are saved as an ordinary float32 folder, which
`AutoModelForCausalLM` reads. All weights are rounded to nearest, because the multiplications are compared.

A CPU takes a second for a window. So one row has the first windows of a text for all three, and another row the whole
text without a CPU. Without a GPU there are only the first windows, and no figures of kernels.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import quantkit
from benchmarks import timing
from quantkit.api import eval_ppl
from quantkit.checkpoint.reader import Checkpoint
from quantkit.evaluation.perplexity import Perplexity, perplexity
from quantkit.io import files
from quantkit.models.weights import load_dense_model
from quantkit.text.sources import load_evaluation_text
from quantkit.text.tokenizer import load_tokenizer

#: Layout, scheme, and how it is asked for: first those that have kernels, then those that are repacked for them.
CASES: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("marlin", "int4:g128", {}),
    ("marlin24", "int4:g128:24", {"prune": "2:4"}),
    ("tcfpx", "fp6:channel", {"format": "fp6"}),
    ("tcfpx", "fp5:channel", {"format": "fp5"}),
    ("quick", "int4:g128:asym", {"asym": True}),
    ("compressed-tensors", "int4:g128", {}),
    ("compressed-tensors", "int4:g128:asym", {"asym": True}),
    ("gptq", "int4:g128", {}),
    ("gptq-v2", "int4:g128:asym", {"asym": True}),
    ("awq", "int4:g128:asym", {"asym": True}),
    ("marlin24-ct", "int4:g128:24", {"prune": "2:4"}),
    ("humming", "fp6:channel", {"format": "fp6"}),
    ("humming", "fp5:channel", {"format": "fp5"}),
)
#: Tokens behind the last window that are left in a text that is cut, whose end may become other tokens.
SLACK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="evaluation texts, named by their folders")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=64, help="windows of a text that a CPU is given; 0: all")
    parser.add_argument("--layout", nargs="+", help="only these layouts")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        texts = {path.parent.name: path for path in args.text}
        short = cut(args, texts, Path(folder)) if args.windows else texts
        for number, (layout, scheme, options) in enumerate(CASES):
            if args.layout and layout not in args.layout:
                continue
            out = Path(folder) / str(number)
            quantkit.quantize(args.model, out, method="rtn", layout=layout, **options)
            for name, path in {**short, **(texts if torch.cuda.is_available() else {})}.items():
                rows.append({"layout": layout, "scheme": scheme} | measure(out, name, path, args.window, name in short))
                print(rows[-1], flush=True)
            if args.csv:
                files.write_atomic(args.csv, timing.table(rows))


def cut(args: argparse.Namespace, texts: Mapping[str, Path], folder: Path) -> dict[str, Path]:
    """Write the first windows of each text to `folder`, and return them by name."""
    words = load_tokenizer(args.model)
    found = {}
    for name, path in texts.items():
        text, _ = load_evaluation_text(str(path))
        ends = words(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
        last = args.windows * args.window + SLACK
        if last >= len(ends):  # nothing to cut
            found[name] = path
            continue
        found[f"{name}, first {args.windows} windows"] = short = folder / f"{name}.txt"
        files.write_atomic(short, text[: ends[last][1]].encode())
    return found


def measure(folder: Path, name: str, path: Path, window: int, cpu: bool) -> dict[str, Any]:
    """Return the perplexities of a packed folder on a text, by a CPU only if asked for."""
    ask = partial(eval_ppl, folder, data=str(path), window=window)
    kernel = ask(device="cuda") if torch.cuda.is_available() else None
    decoded = ask(device="cpu") if cpu else None
    plain = in_transformers(folder, load_evaluation_text(str(path))[0], window)
    found = [one for one in (kernel, decoded, plain) if one is not None]
    if len({one.tokens for one in found}) > 1:
        raise SystemExit(f"{folder}: not the same tokens of {name} were predicted")
    ratio = kernel.perplexity / decoded.perplexity if kernel and decoded else None
    return {
        "kernel": kernel.weights.removeprefix("weights by the ") if kernel else "",
        "text": name,
        "tokens": plain.tokens,
        "perplexity_kernel": kernel.perplexity if kernel else "",
        "perplexity_cpu": decoded.perplexity if decoded else "",
        "perplexity_transformers_decoded_float32": plain.perplexity,
        "kernel_vs_cpu_pct": 100 * (ratio - 1) if ratio else "",
    }


def in_transformers(folder: Path, text: str, window: int) -> Perplexity:
    """Return the perplexity of the decoded weights in float32, in an ordinary folder that transformers reads."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as ordinary:
        load_dense_model(Checkpoint(folder)).save_pretrained(ordinary)
        if "quantization_config" in Checkpoint(ordinary).config:
            raise SystemExit(f"{folder}: what was saved is not an ordinary model")
        model = AutoModelForCausalLM.from_pretrained(ordinary, dtype=torch.float32, device_map=device)
    return perplexity(model, load_tokenizer(folder), text, window=window)


if __name__ == "__main__":
    main()
