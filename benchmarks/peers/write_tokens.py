"""Write the calibration tokens that every quantizer of the comparison gets: a JSON list of equal sequences.

quantkit draws them: windows of fixed length of a text, chosen by a seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from quantkit.text.sequences import draw_calibration
from quantkit.text.tokenizer import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--calib", required=True, help="text to cut")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    drawn = draw_calibration(
        args.calib,
        load_tokenizer(args.model),
        samples=args.samples,
        max_length=args.length,
        seed=args.seed,
        lengths="fixed",
    )
    args.out.write_text(json.dumps([sequence.tolist() for sequence in drawn.sequences]))
    print(drawn.facts["sha256"], args.out)


if __name__ == "__main__":
    main()
