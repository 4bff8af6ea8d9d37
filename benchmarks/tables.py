"""Print the CSVs of `accuracy.py` as Markdown tables, with the change against the unquantized model.

Prints what `accuracy_peers.py` wrote as tables with means over seeds, and what `conversion.py` wrote (`.json`), too.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from pathlib import Path
from typing import Any

#: Figure of a conversion -> its column.
FIGURES = {"gb_s": "GB/s", "of_cp_and_sync": "of `cp` and `sync`", "peak_mb": "peak MB"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--only", nargs="*", help="print these variants")
    args = parser.parse_args()
    if args.table.suffix == ".json":
        conversions(json.loads(args.table.read_text()))
        return
    with args.table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if "seed" in rows[0]:
        peers(rows)
        return
    base = rows[0]
    print("| variant | bits | WikiText-2 | PTB | KL ×10³ | top-1 |\n|---|---|---|---|---|---|")
    for row in rows:
        if args.only and row["variant"] not in args.only:
            continue
        texts = [_change(row[name], base[name], row is base) for name in ("wikitext2", "ptb")]
        kl = f"{float(row['kl_x1e3']):.2f}" if row["kl_x1e3"] else ""
        top1 = f"{100 * float(row['top1']):.1f} %" if row["top1"] else ""
        print(f"| {row['variant']} | {row['bits'] or '16'} | {texts[0]} | {texts[1]} | {kl} | {top1} |")


def peers(rows: list[dict[str, str]]) -> None:
    """Print one table a model: each quantizer's mean over seeds and, of KL divergence, the standard deviation too."""
    for model in dict.fromkeys(row["model"] for row in rows):
        ours = [row for row in rows if row["model"] == model]
        names = [name.removesuffix("_tokens") for name in ours[0] if name.endswith("_tokens") and ours[0][name]]
        texts = {name: {"wikitext2": "WikiText-2", "ptb": "PTB", "c4": "C4"}.get(name, name) for name in names}
        tokens = ", ".join(f"{ours[0][f'{name}_tokens']} of {shown}" for name, shown in texts.items())
        print(f"\n{model}, first tokens: {tokens}\n")
        on_cpu = all(row["device"] in ("", "cpu") for row in ours)
        columns = [f"{shown} {figure}" for figure in ("KL ×10³", "perplexity") for shown in texts.values()]
        print(f"| quantizer | version | seeds | bits | {' | '.join(columns)} | {'CPU s' if on_cpu else 's'} |")
        print(f"|---|---|---|---|---|{'---|' * len(columns)}")
        for name in dict.fromkeys(row["name"] for row in ours):
            same = [row for row in ours if row["name"] == name]
            kl = [_mean(same, f"{text}_kl_x1e3", 2, spread=True) for text in texts]
            perplexity = [_mean(same, f"{text}_ppl", 3) for text in texts]
            cells = [name, same[0]["version"], str(len(same)), same[0]["bits"], *kl, *perplexity]
            print(f"| {' | '.join([*cells, _mean(same, 'cpu_seconds' if on_cpu else 'seconds', 0)])} |")


def _mean(rows: list[dict[str, str]], column: str, digits: int, spread: bool = False) -> str:
    values = [float(row[column]) for row in rows if row[column]]
    if not values:
        return ""
    around = f" ± {statistics.stdev(values):.{digits}f}" if spread and len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{around}"


def conversions(found: dict[str, Any]) -> None:
    """Print one row a conversion, with the figures of each checkout that was measured."""
    folders = {kind: pairs for kind, pairs in found.items() if isinstance(pairs, dict)}
    trees = list(next(iter(next(iter(folders.values())).values())))
    columns = [f"{column} ({tree})" if len(trees) > 1 else column for tree in trees for column in FIGURES.values()]
    print(f"| weights | conversion | {' | '.join(columns)} |\n|---|---|{'---|' * len(columns)}")
    for kind, pairs in folders.items():
        for pair, figures in pairs.items():
            values = [str(figures[tree][key]) for tree in trees for key in FIGURES]
            print(f"| {kind} | {pair} | {' | '.join(values)} |")


def _change(value: str, base: str, is_base: bool) -> str:
    if is_base:
        return f"{float(value):.3f}"
    return f"{float(value):.3f} (+{100 * (float(value) / float(base) - 1):.2f} %)"


if __name__ == "__main__":
    main()
