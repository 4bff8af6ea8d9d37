"""Quantize with auto-round's automatic scheme: 2, 4 or 8 bits for each linear, `--bits` in the mean, scales counted.

Its scores need the text itself, from which it cuts the tokens (a JSON list of {"text": ...}). The folder is the model
with decoded weights, since no packed form of a mix is read everywhere; `peer.json` has the bits of each linear.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from auto_round import AutoRound, AutoScheme
from auto_round.schemes import QuantizationScheme
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the dense model")
    parser.add_argument("text", help="JSON file of the calibration text")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--bits", type=float, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=1024)
    args = parser.parse_args()
    torch.manual_seed(0)
    started, text = time.perf_counter(), {"dataset": args.text, "nsamples": args.samples, "seqlen": args.length}
    options = [QuantizationScheme(bits=b, group_size=args.group_size, sym=True, data_type="int") for b in (2, 4, 8)]
    job = AutoRound(
        AutoModelForCausalLM.from_pretrained(args.model, dtype="auto"),
        AutoTokenizer.from_pretrained(args.model),
        scheme=AutoScheme(avg_bits=args.bits, options=options),
        iters=args.steps,
        batch_size=8,
        enable_torch_compile=False,
        **text,
    )
    job.quantize_and_save(str(args.out), format="fake")
    (folder,) = (path for path in args.out.iterdir() if path.is_dir())  # named after the scheme
    for file in folder.iterdir():
        file.rename(args.out / file.name)
    folder.rmdir()
    record = {"bits": {name: one["bits"] for name, one in job.layer_config.items()}, "asked": args.bits}
    record["seconds"] = round(time.perf_counter() - started, 1)
    (args.out / "peer.json").write_text(json.dumps(record) + "\n")
    print(record["seconds"])


if __name__ == "__main__":
    main()
