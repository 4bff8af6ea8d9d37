"""Print the CSVs of `accuracy.py` as Markdown tables, with the change against the unquantized model."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--only", nargs="*", help="print these variants")
    args = parser.parse_args()
    with args.csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    base = rows[0]
    print("| variant | bits | WikiText-2 | PTB | KL ×10³ | top-1 |\n|---|---|---|---|---|---|")
    for row in rows:
        if args.only and row["variant"] not in args.only:
            continue
        texts = [_change(row[name], base[name], row is base) for name in ("wikitext2", "ptb")]
        kl = f"{float(row['kl_x1e3']):.2f}" if row["kl_x1e3"] else ""
        top1 = f"{100 * float(row['top1']):.1f} %" if row["top1"] else ""
        print(f"| {row['variant']} | {row['bits'] or '16'} | {texts[0]} | {texts[1]} | {kl} | {top1} |")


def _change(value: str, base: str, is_base: bool) -> str:
    if is_base:
        return f"{float(value):.3f}"
    return f"{float(value):.3f} (+{100 * (float(value) / float(base) - 1):.2f} %)"


if __name__ == "__main__":
    main()
