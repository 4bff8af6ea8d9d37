"""Print the CSVs of `accuracy.py` as Markdown tables, with the change against the unquantized model.

Or what `streaming.py` printed (`.json`): layouts in memory, then folders beside copies of them.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

#: What of a copy and of a conversion is printed: a column, and the figure in it.
STREAMING = {
    "GB/s": "gb_s",
    "of the larger folder": "larger_gb_s",
    "of a plain copy": "of copy",
    "of one into touched memory": "of copy into touched memory",
    "of cp into touched memory": "of cp into touched memory",
    "of the disk": "of disk",
    "of that with hashes": "of disk with hashes",
    "cores busy": "busy",
    "peak memory MB": "peak_mb",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--only", nargs="*", help="print these variants")
    args = parser.parse_args()
    if args.table.suffix == ".json":
        streaming(args.table)
        return
    with args.table.open(newline="") as file:
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


def streaming(path: Path) -> None:
    """Print what `streaming.py` found."""
    found = json.loads(path.read_text())
    print("| layout, scheme | pack MB/s | unpack MB/s |\n|---|---|---|")
    for name, rates in found["memory"].items():
        print(f"| {name} | {rates['pack_mb_s']} | {rates['unpack_mb_s']} |")
    print(f"\n| {found['threads']} cores | {' | '.join(STREAMING)} |\n|---|{'---|' * len(STREAMING)}")
    for name, figures in found["folders"].items():
        print(f"| {name} | {' | '.join(str(figures.get(key, '')) for key in STREAMING.values())} |")


def _change(value: str, base: str, is_base: bool) -> str:
    if is_base:
        return f"{float(value):.3f}"
    return f"{float(value):.3f} (+{100 * (float(value) / float(base) - 1):.2f} %)"


if __name__ == "__main__":
    main()
