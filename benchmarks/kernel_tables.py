"""Print CSVs of `bench kernels` as the tables of docs/results.md, and how many cells are behind published kernels'.

Speed-up over the faster order of cuBLAS, geometric mean over a model's layers, and the share of the floor. `--peers`
are CSVs of published kernels with the columns of ours; both speed-ups are of their own run.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean

from quantkit.bench.roofline import read_peers
from quantkit.bench.workloads import MODELS

#: Scheme -> the published kernels of it.
PEERS = {
    "int4:g128": ("marlin_int4_g128", "humming_int4_g128"),
    "int4:channel": ("marlin_int4_per_channel",),
    "int4:g128:24": ("sparse_marlin_int4_2:4_g128",),
    "int4:channel:24": ("sparse_marlin_int4_2:4_per_channel",),
    "int4:g128:asym": ("quick_int4_g128",),
    "fp6:channel": ("fp6_llm_e3m2_per_channel", "humming_fp6_e3m2_per_channel"),
    "fp5:channel": ("humming_fp5_e3m1_per_channel",),
}
Row = dict[str, str]


def tables(rows: Sequence[Row]) -> str:
    """Return a table for each model: tokens by schemes."""
    cells: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        cells[row["layer"].split(" ")[0], row["M"], row["scheme"]].append(row)
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    lines = []
    for model in MODELS:
        lines += [f"| {model}, M | " + " | ".join(schemes) + " |", "|---|" + "---|" * len(schemes)]
        for m in dict.fromkeys(row["M"] for row in rows):
            shown = [_shown(cells[model, m, scheme]) for scheme in schemes]
            lines.append(f"| {m} | " + " | ".join(shown) + " |")
        lines.append("")
    return "\n".join(lines)


def behind(rows: Sequence[Row], peers: Sequence[Path]) -> Iterable[str]:
    """Yield a line for each published kernel: cells of ours that are not slower, and the others, the worst first."""
    for scheme, names in PEERS.items():
        ours = [row for row in rows if row["scheme"] == scheme]
        for name in names:
            ratios = {}
            for path in peers:
                if name not in path.read_text():
                    continue
                theirs = read_peers(path, [name])
                for row in ours:
                    key = (name, int(row["N"]), int(row["K"]), int(row["M"]))
                    if key in theirs:
                        shape = f"{row['N']}x{row['K']} M={row['M']}"
                        ratios[shape] = float(row["speedup_vs_cublas"]) / theirs[key]
            late = sorted((ratio, shape) for shape, ratio in ratios.items() if ratio < 1)
            found = ", ".join(f"{shape} {ratio:.3f}" for ratio, shape in late)
            yield f"{scheme} beside {name}: {len(ratios) - len(late)} of {len(ratios)} not slower; {found}"


def _shown(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    speed, share = (geometric_mean([float(row[key]) for row in rows]) for key in ("speedup_vs_cublas", "pct_of_floor"))
    return f"{speed:.2f} ({share:.0f} %)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("--peers", type=Path, nargs="*", default=())
    args = parser.parse_args()
    rows = [row for path in args.csv for row in csv.DictReader(path.read_text().splitlines())]
    print(tables(rows))
    print("\n".join(behind(rows, args.peers)))


if __name__ == "__main__":
    main()
