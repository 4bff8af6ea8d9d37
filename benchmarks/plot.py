"""Draw CSVs of `quantkit bench kernels`: speedup over cuBLAS against tokens, a panel for each scheme, floors dashed."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from quantkit.bench import roofline
from quantkit.reporting import plots


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("-o", "--out", type=Path, required=True, help="a .svg or .png file")
    args = parser.parse_args()
    rows = []
    for path in args.csv:
        with path.open(newline="") as file:
            rows += list(csv.DictReader(file))
    plots.draw_speedups(roofline.panels(rows), args.out)


if __name__ == "__main__":
    main()
